"""Counting and adding on the tensor cores, for the ULP statistics kernel.

A thread's four words are handed to ``mma`` as they lie in its registers: as row g of one factor and column g of the other,
g = lane / 4. The product of rows g and columns g then holds, on its diagonal, sums over the four threads of
a quad; everything off the diagonal is thrown away at the end. One instruction multiplies and adds what takes 16 on the
other units. The two halves of the rows (g and g + 8) take two different factors, x and y, for one z.

Integers are bytes with int32 accumulators, and bits with population counts: exact. Products of 16-bit floats are exact; a
float32 sum of them loses up to 2^-23 of itself per instruction, toward zero, so those sums must stay short.

The interpreter has no tensor cores. There an accumulator of bytes is a pair of arrays [TILE], the products with x and
with y of each word, and an accumulator of bits has shape [8].
"""

from __future__ import annotations

import triton
import triton.language as tl

_INT8 = tl.constexpr("""{
.reg .b32 t<4>;
mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {t0,t1,t2,t3}, {$4,$8,$5,$9}, {$12,$13}, {$16,$17,$18,$19};
mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$6,$10,$7,$11}, {$14,$15}, {t0,t1,t2,t3};
}""")
# Bit k of the codes is counted in column k (mod 8) of the product with masks that let one bit of each element through.
_BITS = """{
.reg .b32 g, m;
mov.u32 g, %laneid;
shr.u32 g, g, 2;
shr.u32 m, MASK, g;
mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {$0,$1,$2,$3}, {$4,$5,$6,$7}, {m,m}, {$8,$9,$10,$11};
}"""
_BITS_LOW_16 = tl.constexpr(_BITS.replace("MASK", "0x80008000"))
_BITS_HIGH_16 = tl.constexpr(_BITS.replace("MASK", "0x00800080"))
_BITS_LOW_32 = tl.constexpr(_BITS.replace("MASK", "0x80000000"))
_BITS_HIGH_32 = tl.constexpr(_BITS.replace("MASK", "0x00800000"))
# The same of bits 0 to 3 and 8 to 11.
_FLAG_BITS = """{
.reg .b32 g, h, m;
mov.u32 g, %laneid;
shr.u32 g, g, 2;
and.b32 h, g, 4;
add.u32 g, g, h;
shl.b32 m, MASK, g;
mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {$0,$1,$2,$3}, {$4,$5,$6,$7}, {m,m}, {$8,$9,$10,$11};
}"""
_FLAG_BITS_16 = tl.constexpr(_FLAG_BITS.replace("MASK", "0x00010001"))
_FLAG_BITS_32 = tl.constexpr(_FLAG_BITS.replace("MASK", "1"))
_FLOAT = """{
.reg .f32 t<4>;
mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {t0,t1,t2,t3}, {$4,$8,$5,$9}, {$12,$13}, {$16,$17,$18,$19};
mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {$0,$1,$2,$3}, {$6,$10,$7,$11}, {$14,$15}, {t0,t1,t2,t3};
}"""
_FLOAT_BF16 = tl.constexpr(_FLOAT.replace("TYPE", "bf16"))
_FLOAT_F16 = tl.constexpr(_FLOAT.replace("TYPE", "f16"))
_POSITION = tl.constexpr("""{
.reg .b32 l;
mov.u32 l, %laneid;
shl.b32 l, l, 2;
mov.b32 $0, l;
add.u32 $1, l, 1;
add.u32 $2, l, 2;
add.u32 $3, l, 3;
}""")


@triton.jit
def _dot_bytes(acc, x, y, z, INTERPRET: tl.constexpr):
    """Add x * z to the first half of ``acc``, and y * z to the second, byte by byte, signed."""
    first, second = acc
    if INTERPRET:
        return first + _bytes_times(x, z), second + _bytes_times(y, z)
    else:
        first = tl.inline_asm_elementwise(
            _INT8, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [x, y, z, first], dtype=tl.int32, is_pure=True, pack=4
        )
        return first, second


@triton.jit
def _bytes_times(x, z):
    total = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(4):
        total += ((x << (24 - 8 * i)) >> 24) * ((z << (24 - 8 * i)) >> 24)
    return total


@triton.jit
def _elements(x):
    """Sum of the bytes of each word."""
    return (x & 0xFF) + ((x >> 8) & 0xFF) + ((x >> 16) & 0xFF) + ((x >> 24) & 0xFF)


@triton.jit
def _count_codes(acc, code, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Count the bits of ``code`` (see ``words._thermometer``) by position. The interpreter's accumulators have shape [8]."""
    low, high = acc
    if INTERPRET:
        top: tl.constexpr = 31 if WIDE else 15
        one: tl.constexpr = 1 if WIDE else 0x10001
        k = tl.arange(0, 8)[None, :]
        low += tl.sum(_elements((code[:, None] >> (top - k)) & one), axis=0)
        high += tl.sum(_elements((code[:, None] >> (top - 8 - k)) & one), axis=0)
    else:
        low = tl.inline_asm_elementwise(
            _BITS_LOW_32 if WIDE else _BITS_LOW_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [code, low],
            dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            _BITS_HIGH_32 if WIDE else _BITS_HIGH_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [code, high],
            dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def _count_flags(acc, flags, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Count the bits 0 to 3 and 8 to 11 of the elements, in columns 0 to 3 and 4 to 7."""
    if INTERPRET:
        one: tl.constexpr = 1 if WIDE else 0x10001
        k = tl.arange(0, 8)[None, :]
        return acc + tl.sum(_elements((flags[:, None] >> (k + (k & 4))) & one), axis=0)
    else:
        return tl.inline_asm_elementwise(
            _FLAG_BITS_32 if WIDE else _FLAG_BITS_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [flags, acc],
            dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _dot_floats(acc, x, y, z, LP: tl.constexpr):
    """Add the products x * z to rows g, y * z to rows g + 8 of ``acc`` [TILE], words of two 16-bit floats."""
    code: tl.constexpr = _FLOAT_BF16 if LP == 0 else _FLOAT_F16
    return tl.inline_asm_elementwise(
        code, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", [x, y, z, acc], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def _position(acc):
    """Where the elements of the int32 accumulator ``acc`` lie in the product: 4 * lane + register. Called impure, so that it
    is evaluated once, in the layout of ``acc``."""
    return tl.inline_asm_elementwise(_POSITION, "=r,=r,=r,=r,r,r,r,r", [acc], dtype=tl.int32, is_pure=False, pack=4)


@triton.jit
def _column(position):
    return 2 * ((position >> 2) & 3) + (position & 1)


@triton.jit
def _totals(acc, position, INTERPRET: tl.constexpr):
    """(sum over the program of the products with x, with y)."""
    first, second = acc
    if INTERPRET:
        return tl.sum(first, axis=0), tl.sum(second, axis=0)
    else:
        diagonal = tl.where(_column(position) == (position >> 4), first, 0)
        lower = (position & 2) == 0
        return tl.sum(tl.where(lower, diagonal, 0), axis=0), tl.sum(tl.where(lower, 0, diagonal), axis=0)


@triton.jit
def _by_column(acc, position, INTERPRET: tl.constexpr):
    """Sums over the program of the columns of ``acc`` [8]: how many elements had each bit."""
    if INTERPRET:
        return acc
    else:
        mine = _column(position)[:, None] == tl.arange(0, 8)[None, :]
        return tl.sum(tl.where(mine, acc[:, None], 0), axis=0)
