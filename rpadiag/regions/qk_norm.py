"""The boundary between the per-head norm of queries and keys and RoPE. Shape legend: [..., D], D head size.

With mid=lp the normed query is rounded and RoPE reads it: two regions, nothing to do here. With mid=fp32 (a compiler
that fuses the two) it is not, and the two are one operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rpadiag.contracts import RmsNormContract, RopeContract
from rpadiag.regions import rmsnorm
from rpadiag.regions import rope as rotary
from rpadiag.regions.presets import known_contracts
from rpadiag.regions.rounding import store

# --- sites spanned -------------------------------------------------------------------------------------------------

SITES = ("q_norm", "k_norm", "q_rope", "k_rope")

# --- known contracts -----------------------------------------------------------------------------------------------

KNOWN = known_contracts("qk_norm")

# --- reference -----------------------------------------------------------------------------------------------------


def reference(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    norm: RmsNormContract,
    rope: RopeContract,
    mid: str = "fp32",
) -> Tensor:
    """RoPE of the normed ``x`` [..., D]; tables broadcast against [..., R/2]; weight [D].

    mid=fp32: the norm's output stays in float32 (all of ``norm`` but its store); mid=lp: it is rounded, as two calls
    would. Not differentiable: see :func:`aligned`. Errors: InputError as the two regions raise it.
    """
    rmsnorm.check_inputs(x, weight, None, norm)
    rotary.check_inputs(x, cos, sin, rope)
    lp = x.dtype
    value = rmsnorm.unrounded_output(rmsnorm.intermediates(x, None, eps, norm), weight, lp, norm)
    if mid == "lp":
        value = store(value, lp, norm.store).to(torch.float32)
    return rotary.rotate_values(value, cos, sin, lp=lp, contract=rope)


def reference_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    norm: RmsNormContract,
    rope: RopeContract,
) -> tuple[Tensor, Tensor | None]:
    """``(grad_x, grad_weight)`` for mid=fp32: the gradient between the two stays in float32 as well."""
    between = rotary.rotate_backward(grad, cos, sin, contract=rope, out=torch.float32)
    return rmsnorm.reference_backward(between, None, x, weight, eps=eps, contract=norm)


# --- aligned -------------------------------------------------------------------------------------------------------


def aligned(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    norm: RmsNormContract,
    rope: RopeContract,
) -> Tensor:
    """:func:`reference` with mid=fp32 as a differentiable operation."""
    from rpadiag.regions.ops import NormRopeOperation

    return NormRopeOperation(norm, rope)(x, weight, cos, sin, eps)
