"""``torch.library`` operators with little overhead.

A training step of a small model makes hundreds of calls, and what Python does around a kernel then costs more time than the
kernel saves. Two things keep it short. ``torch.library.custom_op`` checks every call for aliasing; these operators are
registered one level below, without the checks: an implementation must never return or modify an input. And a call on plain
tensors goes to the implementation itself, through a ``torch.autograd.Function`` where a gradient is wanted, and not through the
dispatcher, which takes three times as long. Whatever wants to see the operator (torch.compile, torch.export, fake
tensors, tensor subclasses, dispatch modes, torch.func) still does. ``torch.library.opcheck`` runs on each in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class Operator:
    """One operator, under construction: implementations, fake implementation and autograd are added to it."""

    def __init__(self, name: str, cpu: Callable[..., Any]) -> None:
        self.name = name
        schema = torch.library.infer_schema(cpu, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "cpu", cpu)
        self.dispatched = getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1])
        self.kernels = {"cpu": cpu}
        self.function: type[torch.autograd.Function] | None = None

    def register_kernel(self, device: str) -> Callable[[Callable[..., Any]], None]:
        """Decorator of the implementation for another device type."""

        def register(function: Callable[..., Any]) -> None:
            torch.library.impl(self.name, device, function)
            self.kernels[device] = function

        return register

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Decorator of the implementation that computes shapes only."""
        torch.library.register_fake(self.name, function)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """Gradient formula, as in ``torch.library.register_autograd``."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)
        self.function = _function_of(self.kernels, backward, setup_context)

    def __call__(self, *args: Any) -> Any:
        """The operator on ``args``, the first of which is a tensor."""
        if torch.compiler.is_compiling() or not _are_plain(args) or args[0].device.type not in self.kernels:
            return self.dispatched(*args)
        if torch.is_grad_enabled() and any(_wants_gradient(a) for a in args):
            # without a formula the dispatcher warns, so that a gradient of a gradient is not just left out
            return self.dispatched(*args) if self.function is None else self.function.apply(*args)
        return self.kernels[args[0].device.type](*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator that makes an annotated function the CPU implementation of a new operator ``namespace::name``."""
    return lambda cpu: Operator(name, cpu)


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Does nobody but the implementation want to see a call with ``args``?"""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._is_torch_function_mode_enabled():
        return False
    return all(type(a) in PLAIN_TYPES for a in args if isinstance(a, Tensor))


def _wants_gradient(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.requires_grad


def _function_of(
    kernels: dict[str, Callable[..., Any]], backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """The implementations and their gradient as an autograd function; the older form, whose calls cost less than a third."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = kernels[args[0].device.type](*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return backward(ctx, *gradients)

    return Direct
