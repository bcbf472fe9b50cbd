"""``torch.library`` operators with little overhead.

``torch.library.custom_op`` checks every call for aliasing; a training step of a small model makes hundreds of calls, and
the checks then cost more time than the kernels save. These operators are registered one level below, without
the checks: an implementation must never return or modify an input. ``torch.library.opcheck`` runs on each in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Operator:
    """One operator, under construction: implementations, fake implementation and autograd are added to it."""

    def __init__(self, name: str, cpu: Callable[..., Any]) -> None:
        self.name = name
        schema = torch.library.infer_schema(cpu, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "cpu", cpu)

    def register_kernel(self, device: str) -> Callable[[Callable[..., Any]], None]:
        """Decorator of the implementation for another device type."""
        return lambda function: torch.library.impl(self.name, device, function)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Decorator of the implementation that computes shapes only."""
        torch.library.register_fake(self.name, function)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """Gradient formula, as in ``torch.library.register_autograd``."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator that makes an annotated function the CPU implementation of a new operator ``namespace::name``."""
    return lambda cpu: Operator(name, cpu)
