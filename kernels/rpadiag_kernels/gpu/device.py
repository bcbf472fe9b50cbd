"""Rounding and elementary functions inside the kernels, and what every launch shares.

All arithmetic is float32. Kernels are launched with floating-point fusion off, so a product and a sum round twice
unless the code says fma. ``LP`` is a code of ``axes.LP_CODES``. ``INTERPRET`` is set under TRITON_INTERPRET=1: the
interpreter truncates float32 to bfloat16 and has no device functions, so rounding is done on the bits there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETING: bool = triton.knobs.runtime.interpret


@triton.jit
def to_lp(x, LP: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 rounded to the nearest lp value, ties to even; stays float32."""
    if LP == 2:
        return x
    elif LP == 1:
        return x.to(tl.float16).to(tl.float32)
    elif INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _toward_zero(x, near, LP: tl.constexpr):
    """``near``, or the 16-bit value before it when ``near`` lies further from zero than ``x``."""
    if LP == 0:
        lower = (near.to(tl.int32, bitcast=True) - 0x10000).to(tl.float32, bitcast=True)
    else:
        half_bits = near.to(tl.float16).to(tl.int16, bitcast=True)
        lower = (half_bits - 1).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(tl.abs(near) > tl.abs(x), lower, near)


@triton.jit
def store_lp(x, LP: tl.constexpr, TRUNCATE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 as an lp tensor ready to store: to nearest even, or toward zero."""
    if LP == 2:
        return x
    else:
        near = to_lp(x, LP, INTERPRET)
        if TRUNCATE:
            near = _toward_zero(x, near, LP)
        return near.to(tl.float16) if LP == 1 else near.to(tl.bfloat16)


@triton.jit
def negate(x):
    """-x with the sign of zero flipped too; Triton's unary minus is 0 - x, which is +0 for both zeros."""
    return x * -1.0


@triton.jit
def _exact_fma(a, b, c):
    """a * b + c of float32 values in float64, rounded to odd, so that a later rounding is the only one."""
    product = a.to(tl.float64) * b.to(tl.float64)
    addend = c.to(tl.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.to(tl.int64, bitcast=True)
    step = tl.where((lost > 0) == (total > 0), 1, -1).to(tl.int64)
    inexact = (lost != 0) & ((bits & 1) == 0) & (tl.abs(total) < float("inf"))
    return tl.where(inexact, bits + step, bits).to(tl.float64, bitcast=True)


@triton.jit
def fma(a, b, c, INTERPRET: tl.constexpr):
    """a * b + c of float32 with one rounding."""
    if INTERPRET:
        return _exact_fma(a, b, c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def fma_lp(a, b, c, LP: tl.constexpr, TRUNCATE: tl.constexpr, INTERPRET: tl.constexpr):
    """a * b + c of float32 values rounded once, to lp."""
    exact = _exact_fma(a, b, c)
    near = exact.to(tl.float32)
    if LP == 2:
        return near
    else:
        error = exact - near.to(tl.float64)
        bits = near.to(tl.int32, bitcast=True)
        step = tl.where((error > 0) == (exact > 0), 1, -1)
        inexact = (error != 0) & ((bits & 1) == 0) & (tl.abs(near) < float("inf"))
        odd = tl.where(inexact, bits + step, bits).to(tl.float32, bitcast=True)
        return store_lp(odd, LP, TRUNCATE, INTERPRET)


@triton.jit
def exp_negative(x, EXP: tl.constexpr, INTERPRET: tl.constexpr):
    """exp(-x): the accurate exponential (EXP 0, CUDA's expf) or 2^(-x * log2 e) (EXP 1)."""
    if EXP == 1:
        scaled = negate(x) * 1.4426950408889634
        if INTERPRET:
            return tl.exp2(scaled)
        else:
            return libdevice.exp2(scaled)
    elif INTERPRET:
        return tl.exp(negate(x))
    else:
        return libdevice.exp(negate(x))


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of ``x`` current, as a launch needs; nothing to do where it is, and for the interpreter."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
