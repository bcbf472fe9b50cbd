"""``torch.library`` operators with little overhead.

A training step of a small model makes hundreds of calls, and what Python does around a kernel then costs more time than the
kernel saves. Two things keep it short. ``torch.library.custom_op`` checks every call for aliasing; these operators are
registered one level below, without the checks: an implementation must never return or modify an input. And a call on plain
tensors goes to the implementation itself, through a ``torch.autograd.Function`` where a gradient is wanted, and not through the
dispatcher, which takes three times as long. Whatever wants to see the operator (torch.compile, torch.export, torch.jit.trace,
fake tensors, tensor subclasses, modes, torch.func, profilers) still does. There is no forward-mode derivative: dual tensors
are refused. ``torch.library.opcheck`` runs on each operator in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad, profiler

TENSORS = (Tensor, torch.nn.Parameter)
VALUES = frozenset({bool, int, float, str, type(None)})
# What tells whether anybody watches; where torch has renamed one of these every call is dispatched, and dual tensors are not noticed.
ASKED = (
    "_any_requires_grad", "_are_functorch_transforms_active", "_dispatch_tls_is_dispatch_key_included", "_get_tracing_state",
    "_is_fwd_grad_enabled", "_is_torch_function_mode_enabled", "_len_torch_dispatch_stack", "_parse_dispatch_key",
)  # fmt: skip
ASKED_OF_BATCHES = ("is_batchedtensor", "get_unwrapped")


def _vmap_key() -> Any:
    try:
        return _C._parse_dispatch_key("VmapMode")
    except (AttributeError, RuntimeError):
        return None


LEGACY_VMAP = _vmap_key()
CAN_ASK = (
    LEGACY_VMAP is not None
    and all(hasattr(_C, name) for name in ASKED)
    and all(hasattr(getattr(_C, "_functorch", None), name) for name in ASKED_OF_BATCHES)
    and hasattr(forward_ad, "_current_level")
    and hasattr(profiler, "_is_profiler_enabled")
)


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
        self.function = _function_of(self.name, self._kernel, backward, setup_context)

    def __call__(self, *args: Any) -> Any:
        """The operator on ``args``, the first of which is a tensor. Errors: NotImplementedError for dual tensors."""
        if torch.compiler.is_compiling() or not CAN_ASK or _somebody_watches() or not _are_plain(args):
            return self._dispatch(args)
        kernel = self._kernel(args[0])
        if kernel is None:
            return self._dispatch(args)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            # without a formula the dispatcher warns, so that a gradient of a gradient is not just left out
            return self._dispatch(args) if self.function is None else self.function.apply(*args)
        return kernel(*args)

    def _kernel(self, x: Tensor) -> Callable[..., Any] | None:
        return self.kernels.get("cuda" if x.is_cuda else x.device.type)  # the name of a device type is slow to make

    def _dispatch(self, args: tuple[Any, ...]) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_tangents(self.name, args)
        return self.dispatched(*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator that makes an annotated function the CPU implementation of a new operator ``namespace::name``."""
    return lambda cpu: Operator(name, cpu)


def _somebody_watches() -> bool:
    """Does anything around the call want to see operators? Modes, transforms, jit traces, dual tensors, profilers."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._are_functorch_transforms_active()
        or _C._is_torch_function_mode_enabled()
        or _C._get_tracing_state()
        or _C._dispatch_tls_is_dispatch_key_included(LEGACY_VMAP)  # torch.autograd.grad(is_grads_batched=True)
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Values, and tensors whose storage holds what they are."""
    for arg in args:
        kind = type(arg)
        if kind in TENSORS:
            if arg.is_neg():
                return False
        elif kind not in VALUES:
            return False
    return True


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for dual tensors: the dispatcher drops what they carry, and says nothing."""
    if not CAN_ASK or forward_ad._current_level < 0 or not _C._is_fwd_grad_enabled():
        return
    for arg in args:
        while isinstance(arg, Tensor) and _C._functorch.is_batchedtensor(arg):  # of torch.vmap, which cannot unpack it
            arg = _C._functorch.get_unwrapped(arg)
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative: take the gradient in reverse mode, "
                "or pass what torch.autograd.forward_ad.unpack_dual calls primal"
            )


def _function_of(
    name: str, kernel: Callable[[Tensor], Any], backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """The implementations and their gradient as an autograd function; the older form, whose calls cost less than a third."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = kernel(args[0])(*args)
        setup_context(ctx, args, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name.replace("::", "_"), (torch.autograd.Function,), members)
