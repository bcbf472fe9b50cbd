"""Arithmetic on words of two 16-bit elements, or one float32, for the ULP statistics kernel.

A word is an int32. Every function takes both halves at once and keeps them apart; see ``gpu/ulp.py`` for what is counted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _asm(code: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(code, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _halves(x):
    """(low, high) halves of each word as unsigned numbers in int32."""
    return x & 0xFFFF, (x >> 16) & 0xFFFF


@triton.jit
def _minimum(x, limit: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Unsigned minimum of each element and a constant below 2^15."""
    if WIDE:
        return tl.minimum(x.to(tl.uint32, bitcast=True), limit).to(tl.int32, bitcast=True)
    elif INTERPRET:
        low, high = _halves(x)
        return tl.minimum(low, limit) | (tl.minimum(high, limit) << 16)
    else:
        return _asm("min.u16x2 $0, $1, $2;", x, tl.full(x.shape, limit * 0x10001, tl.int32))


@triton.jit
def _maximum(x, y, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Unsigned maximum of each element."""
    if WIDE:
        return tl.maximum(x.to(tl.uint32, bitcast=True), y.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    elif INTERPRET:
        x_low, x_high = _halves(x)
        y_low, y_high = _halves(y)
        return tl.maximum(x_low, y_low) | (tl.maximum(x_high, y_high) << 16)
    else:
        return _asm("max.u16x2 $0, $1, $2;", x, y)


@triton.jit
def _compare_scalar(a, b, SIGN: tl.constexpr):
    """As :func:`_compare` for one element per number, in plain integer operations. SIGN: the mask of the sign bit."""
    mag_a, mag_b, differ = a & ~SIGN, b & ~SIGN, (a ^ b) & SIGN
    low = tl.minimum(mag_a, mag_b)
    line_a, line_b = tl.where((a & SIGN) != 0, -mag_a, mag_a), tl.where((b & SIGN) != 0, -mag_b, mag_b)
    flipped = tl.where((differ != 0) & (low != 0), -1, 0)
    grown, up = tl.where(mag_b > mag_a, -1, 0), tl.where(line_b > line_a, -1, 0)
    return tl.maximum(mag_a, mag_b) | differ, low | differ, flipped, grown, up


@triton.jit
def _compare(a, b, LP: tl.constexpr, INTERPRET: tl.constexpr):
    """Per element: the larger and the smaller magnitude, each with the sign bit set where the signs differ; a mask: the
    signs differ and neither is zero; then |b| > |a| and b > a, as 16-bit floats 1 or 0 (masks where not packed)."""
    if LP == 2:
        return _compare_scalar(a, b, -0x80000000)
    elif INTERPRET:
        a_low, a_high = _halves(a)
        b_low, b_high = _halves(b)
        hi, lo, flipped, grown, up = _compare_scalar(a_low, b_low, 0x8000)
        hi_2, lo_2, flipped_2, grown_2, up_2 = _compare_scalar(a_high, b_high, 0x8000)
        return (
            hi | (hi_2 << 16), lo | (lo_2 << 16), (flipped & 0xFFFF) | (flipped_2 << 16),
            (grown & 0xFFFF) | (grown_2 << 16), (up & 0xFFFF) | (up_2 << 16),
        )  # fmt: skip
    else:
        if LP == 0:
            hi = _asm("max.xorsign.abs.bf16x2 $0, $1, $2;", a, b)
            lo = _asm("min.xorsign.abs.bf16x2 $0, $1, $2;", a, b)
            flipped = _asm("set.lt.u32.bf16x2 $0, $1, $2;", lo, tl.zeros(a.shape, tl.int32))
            grown = _asm("{.reg .b32 x, y; abs.bf16x2 x, $1; abs.bf16x2 y, $2; set.gt.bf16x2.bf16x2 $0, x, y;}", b, a)
            up = _asm("set.gt.bf16x2.bf16x2 $0, $1, $2;", b, a)
        else:
            hi = _asm("max.xorsign.abs.f16x2 $0, $1, $2;", a, b)
            lo = _asm("min.xorsign.abs.f16x2 $0, $1, $2;", a, b)
            flipped = _asm("set.lt.u32.f16x2 $0, $1, $2;", lo, tl.zeros(a.shape, tl.int32))
            grown = _asm("{.reg .b32 x, y; abs.f16x2 x, $1; abs.f16x2 y, $2; set.gt.f16x2.f16x2 $0, x, y;}", b, a)
            up = _asm("set.gt.f16x2.f16x2 $0, $1, $2;", b, a)
        return hi, lo, flipped, grown, up


@triton.jit
def _add_packed(x, y, LP: tl.constexpr):
    """Sum of words of two 16-bit floats."""
    return _asm("add.rn.bf16x2 $0, $1, $2;" if LP == 0 else "add.rn.f16x2 $0, $1, $2;", x, y)


@triton.jit
def _fma_packed(x, y, z, LP: tl.constexpr):
    """x * y + z of words of two 16-bit floats."""
    code: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if LP == 0 else "fma.rn.f16x2 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(code, "=r,r,r,r", [x, y, z], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _both(x, WIDE: tl.constexpr):
    """The elements of each word added as integers."""
    if WIDE:
        return x
    else:
        return (x & 0xFFFF) + ((x >> 16) & 0xFFFF)


@triton.jit
def _add_directions(directions, clipped, flipped, grown, up, LP: tl.constexpr, PLAIN: tl.constexpr):
    """Count b > a, |b| > |a| without a change of sign, and changes of sign; add up the clipped distances of each and of
    all. In packed 16-bit floats, the changes of sign negative; ``PLAIN``: from masks, as integers."""
    num_up, sum_up, num_away, sum_away, num_flipped, sum_flipped, sum_all = directions
    if PLAIN:
        wide: tl.constexpr = LP == 2
        one: tl.constexpr = 1 if LP == 2 else 0x10001
        away = grown & ~flipped
        return (
            num_up + _both(up & one, wide), sum_up + _both(clipped & up, wide),
            num_away + _both(away & one, wide), sum_away + _both(clipped & away, wide),
            num_flipped - _both(flipped & one, wide), sum_flipped - _both(clipped & flipped, wide),
            sum_all + _both(clipped, wide),
        )  # fmt: skip
    else:
        minus_one: tl.constexpr = -0x407F4080 if LP == 0 else -0x43FF4400
        minus_flipped = flipped & minus_one
        away = _fma_packed(grown, minus_flipped, grown, LP)
        return (
            _add_packed(num_up, up, LP), _fma_packed(clipped, up, sum_up, LP),
            _add_packed(num_away, away, LP), _fma_packed(clipped, away, sum_away, LP),
            _add_packed(num_flipped, minus_flipped, LP), _fma_packed(clipped, minus_flipped, sum_flipped, LP),
            _add_packed(sum_all, clipped, LP),
        )  # fmt: skip


@triton.jit
def _thermometer(u, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """A bit per k in each element, set when u >= 2^k; in reversed order (see :func:`_bit_of`)."""
    if INTERPRET:
        field: tl.constexpr = -1 if WIDE else 0x7FFF7FFF
        u = u | ((u >> 1) & (0x7FFFFFFF if WIDE else 0x7FFF7FFF) & field)
        u = u | ((u >> 2) & (0x3FFFFFFF if WIDE else 0x3FFF3FFF))
        u = u | ((u >> 4) & (0x0FFFFFFF if WIDE else 0x0FFF0FFF))
        u = u | ((u >> 8) & (0x00FFFFFF if WIDE else 0x00FF00FF))
        if WIDE:
            u = u | ((u >> 16) & 0x0000FFFF)
        return u
    else:
        u = tl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [u], dtype=tl.int32, is_pure=True, pack=1)
        u = u | ((u << 1) & (-1 if WIDE else -0x10002))
        u = u | ((u << 2) & (-1 if WIDE else -0x30004))
        u = u | ((u << 4) & (-1 if WIDE else -0xF0010))
        u = u | ((u << 8) & (-1 if WIDE else -0xFF0100))
        if WIDE:
            u = u | (u << 16)
        return u


@triton.jit
def _values(x, LP: tl.constexpr):
    """The elements of each word as float32; one array twice for float32, whose second copy nobody reads."""
    if LP == 0:
        return (x << 16).to(tl.float32, bitcast=True), (x & -0x10000).to(tl.float32, bitcast=True)
    elif LP == 1:
        low = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float32, bitcast=True), x.to(tl.float32, bitcast=True)


@triton.jit
def _add_sums(sums, a, b, CAREFUL: tl.constexpr):
    """(b-a)^2, a^2, b^2, a*b in float64; otherwise (b-a)^2, a^2, a*(b-a), from which the others follow."""
    sq_diff, sq_a, third, dot = sums
    if CAREFUL:
        a, b = a.to(tl.float64), b.to(tl.float64)
        return sq_diff + (b - a) * (b - a), sq_a + a * a, third + b * b, dot + a * b
    else:
        return sq_diff + (b - a) * (b - a), sq_a + a * a, third + a * (b - a), dot


@triton.jit
def _add_words(sums, a, b, LP: tl.constexpr, CAREFUL: tl.constexpr):
    """The float sums after the elements of words a and b."""
    a_low, a_high = _values(a, LP)
    b_low, b_high = _values(b, LP)
    sums = _add_sums(sums, a_low, b_low, CAREFUL)
    if LP != 2:
        sums = _add_sums(sums, a_high, b_high, CAREFUL)
    return sums
