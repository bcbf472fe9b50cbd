"""Aligning to an engine whose residual stream is wider than its tensors.

A compiler that finds two residual adds in one graph computes the first sum again where the second add reads it, from the
same 16-bit addends in fp32, and drops the rounding in between (Inductor: emulate_precision_casts is off). The stream is then
rounded where a graph ends, and not at every add:

* ``layer``: graphs end at attention. The MLP's add reads attention's sum unrounded, attention's add a rounded tensor.
* ``stream``: the model is one graph. No add reads a rounded sum.

Modules still hand rounded tensors to each other, so hooks see what they see in the unaligned model; the fp32 sums
travel beside them (see :mod:`rpadiag.regions.addends`). Forward on the norm's operation in fp32, so a contract that rounds inside the norm
(scale=lp, rstd=lp) is refused; gradients pass from layer to layer in the model's dtype, so that of a sum is rounded before the other addend's is
added to it, as dsum=lp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpadiag.regions.addends import Channel, addends_of, attach
from rpadiag.regions.align_modules import STORED, lost_sum, norm_eps, refuse_loss
from rpadiag.regions.ops import RmsNormOperation

CARRIED = ("carries sums unrounded", STORED)  # what the contract does, and what needs no such sum


class Widened(torch.autograd.Function):
    """The fp32 values of a sum with the graph of its rounded tensor: ``apply(rounded, values)``."""

    @staticmethod
    def forward(ctx: Any, rounded: Tensor, values: Tensor) -> Tensor:
        """Returns ``values``."""
        ctx.dtype = rounded.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient goes to ``rounded`` alone, in its dtype."""
        return grad.to(ctx.dtype), None


@torch.library.custom_op("rpadiag_reference::rounded", mutates_args=())
def rounded_op(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``x`` in ``dtype``. An operator, because Inductor drops a cast to 16 bits and back."""
    return x.to(dtype)


@rounded_op.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _rounded_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.to(torch.float32), None


rounded_op.register_autograd(_rounded_backward)


def leave(total: Tensor, dtype: torch.dtype, channel: Channel) -> Tensor:
    """``total`` [..., H] fp32 rounded to ``dtype``, with the fp32 values beside it."""
    if dtype == torch.float32:
        return total
    rounded = rounded_op(total, dtype) if torch.compiler.is_compiling() else total.to(dtype)
    attach(rounded, total, total, channel)
    return rounded


def wide_sum(rounded: Tensor, channel: Channel) -> Tensor | None:
    """What :func:`leave` left beside ``rounded``, in its graph; None where nothing was."""
    found = addends_of(rounded, channel)
    return None if found is None else Widened.apply(rounded, found[0])


@dataclass(frozen=True, kw_only=True)
class CarriedNormForward:
    """Forward of an RMSNorm module: of the unrounded sum that its input was rounded from.

    expects: where that sum comes from and where the norm is, if there must be one: (number of the layer, name of the norm).
    """

    operation: RmsNormOperation
    channel: Channel
    expects: tuple[int, str] | None = None

    def __call__(self, module: Any, hidden_states: Tensor) -> Tensor:
        wide = wide_sum(hidden_states, self.channel)
        if wide is None:
            refuse_loss(hidden_states, self.channel, self.expects, CARRIED)
            return self.operation(hidden_states, module.weight, None, norm_eps(module))  # type: ignore[return-value]
        normed = self.operation(wide, module.weight.to(torch.float32), None, norm_eps(module))
        return normed.to(hidden_states.dtype)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class CarriedLayerForward:
    """Forward of a pre-norm decoder layer with two residual adds. carry: ``layer`` or ``stream``, see the module.

    number: of the layer. incoming: the layer below carries its sums as well, so that of this layer's input must be there.
    """

    number: int
    carry: str
    channel: Channel
    incoming: bool

    def __call__(self, module: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        dtype = hidden_states.dtype
        residual = hidden_states
        wide = wide_sum(hidden_states, self.channel)
        if wide is None and self.incoming and dtype != torch.float32:
            raise lost_sum(self.number - 1, f"layer {self.number}", *CARRIED)
        if wide is not None:
            attach(hidden_states, wide, wide, self.channel)  # for the norm, which takes it again
            residual = wide if self.carry == "stream" else hidden_states
        x, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        total = x.to(torch.float32) + residual.to(torch.float32)
        x = module.mlp(module.post_attention_layernorm(leave(total, dtype, self.channel)))
        return leave(x.to(torch.float32) + total, dtype, self.channel)
