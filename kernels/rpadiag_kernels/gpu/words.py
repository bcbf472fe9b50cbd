"""Arithmetic on words of two 16-bit elements, or one float32, for the ULP statistics kernel.

A word is an int32. Every function takes both halves at once and keeps them apart; see ``gpu/ulp.py`` for what is counted.
"""

from __future__ import annotations

import triton
import triton.language as tl

_DISTANCE = tl.constexpr("""{
.reg .b32 x, d;
lop3.b32 x, $2, $3, 0x7FFF7FFF, 0x80;
sub.s32 d, $1, $2;
mad.lo.s32 $0, x, 2, d;
}""")
_MAXIMUM = tl.constexpr("""{
.reg .b32 s, t;
max.u16x2 s, $4, $8;
max.u16x2 t, $5, $10;
mov.b32 $2, $6;
mov.b32 $3, $7;
max.u16x2 $0, s, $9;
max.u16x2 $1, t, $11;
}""")
_FLAGS = tl.constexpr("""{
.reg .b32 x;
lop3.b32 x, $2, $3, 0x04000400, 0xE4;
lop3.b32 $0, $1, x, 0x000F000F, 0xE4;
}""")
_ABS_BF16 = tl.constexpr("abs.bf16x2 $0, $1;")
_ABS_F16 = tl.constexpr("abs.f16x2 $0, $1;")
_DIFFERENCE = """{
.reg .b32 s, t;
sub.rn.TYPE s, $2, $3;
sub.rn.TYPE t, $2, s;
sub.rn.TYPE $1, t, $3;
mov.b32 $0, s;
}"""
_DIFFERENCE_BF16 = tl.constexpr(_DIFFERENCE.replace("TYPE", "bf16x2"))
_DIFFERENCE_F16 = tl.constexpr(_DIFFERENCE.replace("TYPE", "f16x2"))


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
    """Unsigned maximum of each element of ``y``, taken into ``x``; as whole tensors, not element by element."""
    if WIDE:
        return tl.maximum(x.to(tl.uint32, bitcast=True), y.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    elif INTERPRET:
        x_low, x_high = _halves(x)
        y_low, y_high = _halves(y)
        return tl.maximum(x_low, y_low) | (tl.maximum(x_high, y_high) << 16)
    else:  # maxima of three are one instruction
        return tl.inline_asm_elementwise(
            _MAXIMUM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=4
        )


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
def _magnitude(x, LP: tl.constexpr):
    """Both halves without their signs; as float operations, which leave the logic unit alone."""
    code: tl.constexpr = _ABS_BF16 if LP == 0 else _ABS_F16
    return tl.inline_asm_elementwise(code, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _compare(a, b, LP: tl.constexpr, INTERPRET: tl.constexpr):
    """Per element: the larger and the smaller magnitude, each with the sign bit set where the signs differ; then masks: the
    signs differ and neither is zero; |b| > |a|; b > a."""
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
            grown = _asm("set.gt.u32.bf16x2 $0, $1, $2;", _magnitude(hi, LP), _magnitude(a, LP))
            up = _asm("set.gt.u32.bf16x2 $0, $1, $2;", b, a)
        else:
            hi = _asm("max.xorsign.abs.f16x2 $0, $1, $2;", a, b)
            lo = _asm("min.xorsign.abs.f16x2 $0, $1, $2;", a, b)
            flipped = _asm("set.lt.u32.f16x2 $0, $1, $2;", lo, tl.zeros(a.shape, tl.int32))
            grown = _asm("set.gt.u32.f16x2 $0, $1, $2;", _magnitude(hi, LP), _magnitude(a, LP))
            up = _asm("set.gt.u32.f16x2 $0, $1, $2;", b, a)
        return hi, lo, flipped, grown, up


@triton.jit
def _distance(hi, lo, flipped, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Distance on the ordered line, of what :func:`_compare` gives."""
    if WIDE or INTERPRET:
        rest: tl.constexpr = 0x7FFFFFFF if WIDE else 0x7FFF7FFF
        return (hi - lo) + ((lo & flipped & rest) << 1)
    else:
        return tl.inline_asm_elementwise(_DISTANCE, "=r,r,r,r", [hi, lo, flipped], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _directions(flipped, grown):
    """Bytes per element: -1 where the sign changes; -2 where it does not and the magnitude grows; else 0."""
    return flipped | (grown & -0x01010102)


@triton.jit
def _flags(clipped, up, directions, INTERPRET: tl.constexpr):
    """Bits 0 to 3 of each element: the clipped distance; bit 8: the sign changes; 9: so, or the magnitude grows; 10: up."""
    if INTERPRET:
        return (clipped & 0x000F000F) | (directions & 0x03000300) | (up & 0x04000400)
    else:
        # Two three-input operations; the bits that nobody counts are noise.
        return tl.inline_asm_elementwise(
            _FLAGS, "=r,r,r,r", [clipped, up, directions], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _thermometer(u, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """A bit per k in each element, set when u >= 2^k: bit 31 - k of a float32, 15 - k of a half. (Halves change places.)

    In reversed order, that is every bit from the lowest set one up: x | -x, with -x = ~(x - 1)."""
    if INTERPRET:
        u = u | ((u >> 1) & (0x7FFFFFFF if WIDE else 0x7FFF7FFF))
        u = u | ((u >> 2) & (0x3FFFFFFF if WIDE else 0x3FFF3FFF))
        u = u | ((u >> 4) & (0x0FFFFFFF if WIDE else 0x0FFF0FFF))
        u = u | ((u >> 8) & (0x00FFFFFF if WIDE else 0x00FF00FF))
        if WIDE:
            u = u | ((u >> 16) & 0x0000FFFF)
        code = tl.zeros(u.shape, tl.int32)
        for k in tl.static_range(32 if WIDE else 16):
            code = code | (((u >> k) & (1 if WIDE else 0x10001)) << ((31 if WIDE else 15) - k))
        return code
    else:
        reversed_u = tl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [u], dtype=tl.int32, is_pure=True, pack=1)
        if WIDE:
            before = reversed_u - 1
        else:
            before = _asm("add.u16x2 $0, $1, $2;", reversed_u, tl.full(u.shape, -1, tl.int32))
        return reversed_u | ~before


@triton.jit
def _signed_difference(a, hi, lo, up, LP: tl.constexpr):
    """Words (x, s, e) of 16-bit floats with s + e = |b - a| and x * (s + e) = a * (b - a), exactly: s is the rounded
    difference of the magnitudes and e what the rounding lost."""
    code: tl.constexpr = _DIFFERENCE_BF16 if LP == 0 else _DIFFERENCE_F16
    s, e = tl.inline_asm_elementwise(
        code, "=r,=r,r,r", [_magnitude(hi, LP), lo], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return a ^ (~up & -0x7FFF8000), s, e


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
