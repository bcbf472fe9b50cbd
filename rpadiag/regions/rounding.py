"""Rounding float32 to the low-precision dtype ``lp``, and float32 operations with one rounding.

``lp`` is bfloat16 or float16; with float32 every rounding is the identity, so that a contract applied to a float32
model is the float32 control. Bit-exact on CPU and CUDA: only IEEE operations and integer views are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

LP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def to_lp(x: Tensor, lp: torch.dtype) -> Tensor:
    """float32 ``x`` rounded to the nearest lp value, ties to even; still float32."""
    return x if lp == torch.float32 else x.to(lp).to(torch.float32)


def store(x: Tensor, lp: torch.dtype, mode: str = "rne") -> Tensor:
    """float32 ``x`` as an lp tensor. ``mode``: ``rne`` to nearest even, ``truncate`` toward zero (NaN stays NaN,
    infinity stays infinity, and finite values never become infinite)."""
    near = x.to(lp)
    if mode == "rne" or lp == torch.float32:
        return near
    grown = near.to(torch.float32).abs() > x.abs()
    return (near.view(torch.int16) - grown.to(torch.int16)).view(lp)


def odd_to_fp32(total: Tensor, lost: Tensor) -> Tensor:
    """float64 ``total`` plus its exact rounding error ``lost``, as the float32 nearest to the exact value.

    The sum is first rounded to odd, which a later rounding to a narrower format cannot tell from the exact value
    (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Transactions on Computers 57(4), 2008).
    """
    return _round_odd(total, lost).to(torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of float32 tensors with one rounding to float32, as a fused multiply-add gives."""
    total, lost = _exact_fma(a, b, c)
    return odd_to_fp32(total, lost)


def fma_lp(a: Tensor, b: Tensor, c: Tensor, lp: torch.dtype, mode: str = "rne") -> Tensor:
    """``a * b + c`` of float32 tensors rounded once to lp, as fma.rn.bf16 does for lp operands. Returns lp."""
    return store(fma_before_lp(a, b, c, lp), lp, mode)


def fma_before_lp(a: Tensor, b: Tensor, c: Tensor, lp: torch.dtype) -> Tensor:
    """float32 whose rounding to lp, in either mode, is the one rounding of the exact ``a * b + c``."""
    total, lost = _exact_fma(a, b, c)
    return odd_to_fp32(total, lost) if lp == torch.float32 else _fp64_to_odd_fp32(_round_odd(total, lost))


def _exact_fma(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """float64 sum and its error; the product of two float32 is exact in float64."""
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    back = total - product
    return total, (product - (total - back)) + (addend - back)


def _round_odd(total: Tensor, lost: Tensor) -> Tensor:
    """float64 nearest ``total`` turned into the one rounded to odd."""
    bits = total.view(torch.int64)
    inexact = (lost != 0) & ((bits & 1) == 0) & total.isfinite()
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64)


def _fp64_to_odd_fp32(x: Tensor) -> Tensor:
    """float64 as float32 rounded to odd, so that rounding on to lp is one rounding of ``x``."""
    near = x.to(torch.float32)
    error = x - near.to(torch.float64)
    bits = near.view(torch.int32)
    inexact = (error != 0) & ((bits & 1) == 0) & near.isfinite()
    step = torch.where((error > 0) == (x > 0), 1, -1).to(torch.int32)  # x, as near may have underflowed to 0
    return torch.where(inexact, bits + step, bits).view(torch.float32)
