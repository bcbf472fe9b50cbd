"""SwiGLU: ``silu(gate) * up``.

Forward, all arithmetic in float32 (``lp`` is the dtype of gate; ``lp(.)`` rounds to nearest even), e = exp(-gate)::

    silu = gate / (1 + e), or gate * sig with sig = 1 / (1 + e)      axes formula, exp
    out  = store(lp(silu) * up or silu * up)                         axes silu, store

Axis sigmoid=lp rounds sig first, and then silu = gate * lp(sig) whatever the formula. Formula ``x*u/(1+e)`` is
``(gate * up) / (1 + e)``, which needs silu=fp32 and sigmoid=fp32; with another choice it is ``x/(1+e)``.

Backward of an incoming dy::

    dup   = lp(dy * (lp(silu) or silu))                              axis grad_silu
    dact  = lp(dy * up) or dy * up                                   axis dact
    dgate = lp((dact * sig) * (1 + gate * (1 - sig)))                sig unrounded

The rounding points are those of ``rpadiag.regions.swiglu``; a test holds the two together. On CUDA the Triton kernels of ``gpu/swiglu.py`` give the bits of these references, which use the device's own
exponential; on the CPU the references run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpadiag_kernels.axes import check_same, contract, from_string, lp_code
from rpadiag_kernels.operators import operator
from rpadiag_kernels.rounding import store, to_lp

LOG2_E = 1.4426950408889634


def swiglu(gate: Tensor, up: Tensor, **axes: str) -> Tensor:
    """``silu(gate) * up`` of two tensors of one shape, dtype and device; any strides. axes: ``axes.AXES["swiglu"]``."""
    _, carried = contract("swiglu", axes)
    lp_code(gate, "swiglu")
    check_same("swiglu", gate=gate, up=up)
    if gate.dim() == 0:
        raise ValueError("swiglu takes tensors with at least one axis")
    return _op(gate, up, carried)


def _one_plus_exp(x: Tensor, codes: dict[str, int]) -> Tensor:
    return 1.0 + (torch.exp(-x) if codes["exp"] == 0 else torch.exp2(-x * LOG2_E))


def _silu(x: Tensor, lp: torch.dtype, codes: dict[str, int]) -> Tensor:
    if codes["sigmoid"] == 1:
        return x * to_lp(1.0 / _one_plus_exp(x, codes), lp)
    if codes["formula"] == 1:
        return x * (1.0 / _one_plus_exp(x, codes))
    if codes["exp"] == 0 and not x.is_cuda:
        return torch.nn.functional.silu(x)  # on CPUs its exponential is another one than torch.exp's
    return x / _one_plus_exp(x, codes)


def reference_forward(gate: Tensor, up: Tensor, codes: dict[str, int]) -> Tensor:
    """``out`` like ``gate``."""
    lp, x, u = gate.dtype, gate.float(), up.float()
    if codes["formula"] == 2 and codes["silu"] == 1 and codes["sigmoid"] == 0:
        out = (x * u) / _one_plus_exp(x, codes)
    else:
        silu = _silu(x, lp, codes)
        out = (to_lp(silu, lp) if codes["silu"] == 0 else silu) * u
    return store(out, lp, toward_zero=codes["store"] == 1)


def reference_backward(dy: Tensor, gate: Tensor, up: Tensor, codes: dict[str, int]) -> tuple[Tensor, Tensor]:
    """(dgate, dup) like ``gate``."""
    lp, x, u, d = gate.dtype, gate.float(), up.float(), dy.float()
    silu, dact = _silu(x, lp, codes), d * u
    if codes["grad_silu"] == 0:
        silu = to_lp(silu, lp)
    if codes["dact"] == 0:
        dact = to_lp(dact, lp)
    if codes["exp"] == 0 and not x.is_cuda:
        dgate = torch.ops.aten.silu_backward(dact, x)
    else:
        sig = 1.0 / _one_plus_exp(x, codes)
        dgate = (dact * sig) * (1.0 + x * (1.0 - sig))
    return dgate.to(lp), (d * silu).to(lp)


@operator("rpadiag::swiglu")
def _op(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    """Like gate, contiguous."""
    return reference_forward(gate, up, from_string(contract)).contiguous()


@_op.register_kernel("cuda")
def _(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    from rpadiag_kernels.gpu import swiglu as gpu

    return gpu.forward(gate, up, from_string(contract))


@_op.register_fake
def _(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    return gate.new_empty(gate.shape)


@operator("rpadiag::swiglu_backward")
def _backward_op(dy: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    """(dgate, dup), contiguous."""
    dgate, dup = reference_backward(dy, gate, up, from_string(contract))
    return dgate.contiguous(), dup.contiguous()


@_backward_op.register_kernel("cuda")
def _(dy: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    from rpadiag_kernels.gpu import swiglu as gpu

    return gpu.backward(dy, gate, up, from_string(contract))


@_backward_op.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.contract = inputs
    ctx.save_for_backward(gate, up)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    dgate, dup = _backward_op(dy, *ctx.saved_tensors, ctx.contract)
    return dgate, dup, None


_op.register_autograd(_autograd, setup_context=_setup_context)
