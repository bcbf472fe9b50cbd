"""Rounding of float32 to the low-precision dtype ``lp``, and float32 operations with one rounding.

The same definitions as ``rpadiag.regions.rounding``, from IEEE operations and integer views only, so that the bits are
the same on every device. lp = float32 makes every rounding the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_lp(x: Tensor, lp: torch.dtype) -> Tensor:
    """Nearest lp value, ties to even (float32 in, float32 out)."""
    return x if lp == torch.float32 else x.to(lp).float()


def store(x: Tensor, lp: torch.dtype, *, toward_zero: bool) -> Tensor:
    """``x`` (float32) as lp, to nearest even or toward zero. NaN stays NaN, infinity stays infinity."""
    near = x.to(lp)
    if not toward_zero or lp == torch.float32:
        return near
    grown = near.float().abs() > x.abs()
    return (near.view(torch.int16) - grown.to(torch.int16)).view(lp)


def _exact_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in float64, rounded to odd: a later rounding to fewer bits is then the only one that counts.

    Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008. The product of two float32 is exact.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = (lost != 0) & ((bits & 1) == 0) & total.isfinite()
    return torch.where(inexact, bits + torch.where((lost > 0) == (total > 0), 1, -1), bits).view(torch.float64)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of float32 tensors with one rounding to float32."""
    return _exact_fma(a, b, c).float()


def fma_lp(a: Tensor, b: Tensor, c: Tensor, lp: torch.dtype, *, toward_zero: bool) -> Tensor:
    """``a * b + c`` of float32 tensors rounded once, to lp, as fma.rn.bf16 does for lp operands."""
    exact = _exact_fma(a, b, c)
    near = exact.float()
    if lp == torch.float32:
        return near
    error = exact - near.double()
    bits = near.view(torch.int32)
    inexact = (error != 0) & ((bits & 1) == 0) & near.isfinite()
    step = torch.where((error > 0) == (exact > 0), 1, -1).to(torch.int32)
    return store(torch.where(inexact, bits + step, bits).view(torch.float32), lp, toward_zero=toward_zero)
