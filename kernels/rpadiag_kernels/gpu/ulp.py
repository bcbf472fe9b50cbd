"""ULP statistics of two tensors in one pass, in Triton.

A 32-bit word holds two 16-bit elements (``WIDE``: one float32), and the work is done on whole words. Per word: the
larger and the smaller magnitude, their distance u on the ordered line, and its thermometer code (a bit per k, set when
u >= 2^k). Codes are counted bit-sliced: a carry-save adder takes two words for four logic operations and counts
all their bit positions. Directions and clipped distances add up in the tensor's own 16-bit floats, where they are small
integers and exact (a distance k as the subnormal with pattern k). The logic unit is the bottleneck: that is why
codes are built with left shifts, which the multiplier does, and directions with float operations.
Float sums are float32 per thread and float64 from there on.

A program whose float sums are not finite, too small for float32, or cancelled, does its part again the careful way
(``CAREFUL``): non-finite pairs are counted and set to zero, and the sums are float64 throughout.
Every number but the four float sums is exact; all are independent of timing. Proof: tests/kernels/test_gpu_bits.py and
tests/kernels/test_interpreter.py, against ``rpadiag.bits``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpadiag_kernels.axes import LP_CODES
from rpadiag_kernels.gpu.device import INTERPRETING, on_device

NUM_PROGRAMS = 396
WARPS = 4
MAX_REGISTERS = 168  # three programs on a multiprocessor
THREADS = 32 * WARPS
TILE = 4 * THREADS  # words of one load
CHUNK = 8 * TILE  # words between two ripples
CHUNKS_PER_DRAIN = 31  # ten bit slices count to 1023 words of a thread: 31 chunks of 32, and 31 more
NUM_COUNTS = 26  # as in rpadiag_kernels.ulp.reference
NUM_SUMS = 4
SMALL_SUM = 2.0**-60


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


@triton.jit
def _set_aside(counts, a, b, shift: tl.constexpr, MAGNITUDE: tl.constexpr, INFINITY: tl.constexpr):
    """Count non-finite elements of one position of the words and clear their pairs."""
    bad_a, bad_b, mismatched, pairs = counts
    mag_a, mag_b = (a >> shift) & MAGNITUDE, (b >> shift) & MAGNITUDE
    field: tl.constexpr = -1 if MAGNITUDE != 0x7FFF else (-0x10000 if shift == 16 else 0xFFFF)
    others: tl.constexpr = 0 if MAGNITUDE != 0x7FFF else (0xFFFF if shift == 16 else -0x10000)
    is_bad_a, is_bad_b = mag_a >= INFINITY, mag_b >= INFINITY
    same = (((a ^ b) & field) == 0) | ((mag_a > INFINITY) & (mag_b > INFINITY))
    bad = is_bad_a | is_bad_b
    keep = tl.where(bad, others, -1)
    counts = (
        bad_a + is_bad_a.to(tl.int32), bad_b + is_bad_b.to(tl.int32),
        mismatched + (bad & ~same).to(tl.int32), pairs + bad.to(tl.int32),
    )  # fmt: skip
    return counts, a & keep, b & keep


@triton.jit
def _full_adder(a, b, c, INTERPRET: tl.constexpr):
    """(sum bit, carry bit) of three bits, in every bit position."""
    if INTERPRET:
        return a ^ b ^ c, (a & b) | (c & (a ^ b))
    else:
        one = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x96;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
        carry = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xE8;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
        return one, carry


@triton.jit
def _quarters(x, THREADS: tl.constexpr):
    """The four words of each thread, apart."""
    even, odd = tl.split(tl.reshape(x, [THREADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _count_load(low, x, THREADS: tl.constexpr, INTERPRET: tl.constexpr):
    """Take the four words of each thread into the slices of weight 1 and 2; returns them and the carry of weight 4."""
    ones, twos = low
    first, second, third, fourth = _quarters(x, THREADS)
    ones, carry = _full_adder(ones, first, second, INTERPRET)
    ones, carry_2 = _full_adder(ones, third, fourth, INTERPRET)
    twos, carry = _full_adder(twos, carry, carry_2, INTERPRET)
    return (ones, twos), carry


@triton.jit
def _ripple(slices, carry):
    """Add a carry of weight 32 to the slices of weight 32 to 512."""
    s0, s1, s2, s3, s4 = slices
    carry_1 = s0 & carry
    carry_2 = s1 & carry_1
    carry_3 = s2 & carry_2
    carry_4 = s3 & carry_3
    return s0 ^ carry, s1 ^ carry_1, s2 ^ carry_2, s3 ^ carry_3, s4 ^ carry_4


@triton.jit
def _count_of_bit(low, middle, high, bit: tl.constexpr, WIDE: tl.constexpr):
    """How many elements of the program had this bit set."""
    one: tl.constexpr = 1 if WIDE else 0x10001
    total = ((low[0] >> bit) & one) + (((low[1] >> bit) & one) << 1)
    for i in tl.static_range(3):
        total += ((middle[i] >> bit) & one) << (2 + i)
    for i in tl.static_range(5):
        total += ((high[i] >> bit) & one) << (5 + i)
    if not WIDE:
        total = (total & 0xFFFF) + (total >> 16)
    return tl.sum(total, axis=0)


@triton.jit
def _bit_of(k: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr) -> tl.constexpr:
    """Position of the bit of threshold 2^k in a code."""
    return k if INTERPRET else (31 - k if WIDE else 15 - k)


@triton.jit
def _flush(total, words, LP: tl.constexpr, PLAIN: tl.constexpr, THREADS: tl.constexpr):
    """float32 totals [THREADS] plus the small integers of ``words`` [4 * THREADS], which the caller sets to zero."""
    first, second, third, fourth = _quarters(words, THREADS)
    if PLAIN:
        return total + ((first + second) + (third + fourth)).to(tl.float32)
    else:
        x = _add_packed(_add_packed(first, second, LP), _add_packed(third, fourth, LP), LP)
        low, high = _values(x, LP)
        return total + (low + high)


@triton.jit
def _scan(
    a_ptr, b_ptr, num_words, LP: tl.constexpr, CAREFUL: tl.constexpr, THREADS: tl.constexpr, DRAIN: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """(counts [32] int64, four sums float64) of this program's part."""
    WIDE: tl.constexpr = LP == 2
    TILE: tl.constexpr = 4 * THREADS
    PLAIN: tl.constexpr = WIDE or INTERPRET
    rest: tl.constexpr = 0x7FFFFFFF if WIDE else 0x7FFF7FFF
    infinity: tl.constexpr = 0x7F80 if LP == 0 else 0x7C00
    index = tl.arange(0, 32)
    totals = tl.zeros([32], tl.int64)
    none = tl.zeros([THREADS], tl.int32)
    largest = tl.zeros([TILE], tl.int32)
    float_type: tl.constexpr = tl.float64 if CAREFUL else tl.float32
    no_sum = tl.zeros([TILE], float_type)
    sums = (no_sum, no_sum, no_sum, no_sum)
    zero = tl.zeros([TILE], tl.int32)
    bad = (zero, zero, zero, zero)
    num_chunks = tl.cdiv(num_words, 8 * TILE)
    stride = tl.num_programs(0).to(tl.int64)
    for first in range(tl.program_id(0).to(tl.int64), num_chunks, stride * DRAIN):
        code_low, code_middle, code_high = (none, none), (none, none, none), (none, none, none, none, none)
        none_f = tl.zeros([THREADS], tl.float32)
        directions = (none_f, none_f, none_f, none_f, none_f, none_f, none_f)
        for chunk in range(first, tl.minimum(first + stride * DRAIN, num_chunks), stride):
            words = (zero, zero, zero, zero, zero, zero, zero)
            code_four, code_eight, code_sixteen = none, none, none
            for step in tl.static_range(8):
                offsets = chunk * (8 * TILE) + step * TILE + tl.arange(0, TILE)
                mask = offsets < num_words
                a = tl.load(a_ptr + offsets, mask=mask, other=0)
                b = tl.load(b_ptr + offsets, mask=mask, other=0)
                if CAREFUL:
                    if WIDE:
                        bad, a, b = _set_aside(bad, a, b, 0, 0x7FFFFFFF, 0x7F800000)
                    else:
                        bad, a, b = _set_aside(bad, a, b, 0, 0x7FFF, infinity)
                        bad, a, b = _set_aside(bad, a, b, 16, 0x7FFF, infinity)
                sums = _add_words(sums, a, b, LP, CAREFUL)
                hi, lo, flipped, grown, up = _compare(a, b, LP, INTERPRET)
                u = (hi - lo) + ((lo & flipped & rest) << 1)
                largest = _maximum(largest, u, WIDE, INTERPRET)
                clipped = _minimum(u, 8, WIDE, INTERPRET)
                words = _add_directions(words, clipped, flipped, grown, up, LP, PLAIN)
                code_low, carry = _count_load(code_low, _thermometer(u, WIDE, INTERPRET), THREADS, INTERPRET)
                fours, eights, sixteens = code_middle
                if step % 2 == 0:
                    code_four = carry
                else:
                    fours, carry = _full_adder(fours, code_four, carry, INTERPRET)
                    if step % 4 == 1:
                        code_eight = carry
                    else:
                        eights, carry = _full_adder(eights, code_eight, carry, INTERPRET)
                        if step == 3:
                            code_sixteen = carry
                        else:
                            sixteens, carry = _full_adder(sixteens, code_sixteen, carry, INTERPRET)
                            code_high = _ripple(code_high, carry)
                code_middle = (fours, eights, sixteens)
            d0, d1, d2, d3, d4, d5, d6 = directions
            directions = (
                _flush(d0, words[0], LP, PLAIN, THREADS), _flush(d1, words[1], LP, PLAIN, THREADS),
                _flush(d2, words[2], LP, PLAIN, THREADS), _flush(d3, words[3], LP, PLAIN, THREADS),
                _flush(d4, words[4], LP, PLAIN, THREADS), _flush(d5, words[5], LP, PLAIN, THREADS),
                _flush(d6, words[6], LP, PLAIN, THREADS),
            )  # fmt: skip
        for k in tl.static_range(16):
            count = _count_of_bit(code_low, code_middle, code_high, _bit_of(k, WIDE, INTERPRET), WIDE)
            totals += tl.where(index == k, count, 0)
        num_up, sum_up, num_away, sum_away = directions[0], directions[1], directions[2], directions[3]
        num_flipped, sum_flipped, sum_all = directions[4], directions[5], directions[6]
        totals += tl.where(index == 16, tl.sum(num_up, axis=0).to(tl.int64), 0)
        totals += tl.where(index == 17, tl.sum(num_away, axis=0).to(tl.int64), 0)
        totals += tl.where(index == 18, tl.sum(-num_flipped, axis=0).to(tl.int64), 0)
        signed = tl.sum(2 * sum_up - sum_all, axis=0)
        magnitude = tl.sum(2 * sum_away - sum_all - sum_flipped, axis=0)
        if not PLAIN:  # patterns of subnormals: 2^-133 of bfloat16, 2^-24 of float16
            scale: tl.constexpr = 2.0**67 if LP == 0 else 2.0**12
            signed, magnitude = signed * scale, magnitude * scale
            signed, magnitude = (
                signed * (scale * 0.5 if LP == 0 else scale),
                magnitude * (scale * 0.5 if LP == 0 else scale),
            )
        totals += tl.where(index == 19, signed.to(tl.int64), 0)
        totals += tl.where(index == 20, magnitude.to(tl.int64), 0)
    if WIDE:
        furthest = tl.max(largest.to(tl.int64) & 0xFFFFFFFF, axis=0)
    else:
        furthest = tl.max(tl.maximum(largest & 0xFFFF, (largest >> 16) & 0xFFFF), axis=0).to(tl.int64)
    totals += tl.where(index == 21, furthest, 0)
    if CAREFUL:
        for i in tl.static_range(4):
            totals += tl.where(index == 22 + i, tl.sum(bad[i], axis=0).to(tl.int64), 0)
    sq_diff, sq_a = tl.sum(sums[0].to(tl.float64), axis=0), tl.sum(sums[1].to(tl.float64), axis=0)
    third, dot = tl.sum(sums[2].to(tl.float64), axis=0), tl.sum(sums[3].to(tl.float64), axis=0)
    if not CAREFUL:
        dot = sq_a + third
        third = dot + third + sq_diff
    return totals, sq_diff, sq_a, third, dot


@triton.jit
def _ulp_stats(
    a_ptr, b_ptr, counts_ptr, sums_ptr, num_words, SMALL: tl.constexpr, LP: tl.constexpr, THREADS: tl.constexpr,
    DRAIN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    counts, sq_diff, sq_a, sq_b, dot = _scan(a_ptr, b_ptr, num_words, LP, False, THREADS, DRAIN, INTERPRET)
    size = sq_diff + sq_a
    if (size < SMALL) | ((size < float("inf")) == 0) | (sq_b < sq_a * 0.0625):
        counts, sq_diff, sq_a, sq_b, dot = _scan(a_ptr, b_ptr, num_words, LP, True, THREADS, DRAIN, INTERPRET)
    program = tl.program_id(0).to(tl.int64)
    tl.store(counts_ptr + program * 32 + tl.arange(0, 32), counts)
    tl.store(sums_ptr + program * 4, sq_diff)
    tl.store(sums_ptr + program * 4 + 1, sq_a)
    tl.store(sums_ptr + program * 4 + 2, sq_b)
    tl.store(sums_ptr + program * 4 + 3, dot)


def ulp_counts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(counts int64 [NUM_COUNTS], sums float64 [4]) of ``a`` and ``b`` of one shape; strided ones are copied."""
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    per_word = 4 // a.element_size()
    if a.numel() % per_word or a.data_ptr() % 16 or b.data_ptr() % 16:
        pad = -a.numel() % per_word
        a, b = (torch.nn.functional.pad(t, (0, pad)) if pad else t.clone() for t in (a, b))
    num_words = a.numel() // per_word
    programs = max(1, min(NUM_PROGRAMS, triton.cdiv(num_words, CHUNK)))
    counts = torch.empty(programs, 32, dtype=torch.int64, device=a.device)
    sums = torch.empty(programs, NUM_SUMS, dtype=torch.float64, device=a.device)
    with on_device(a):
        _ulp_stats[(programs,)](
            a.view(torch.int32), b.view(torch.int32), counts, sums, num_words,
            SMALL=SMALL_SUM, LP=LP_CODES[a.dtype], THREADS=THREADS, DRAIN=CHUNKS_PER_DRAIN, INTERPRET=INTERPRETING,
            num_warps=WARPS, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    total = counts.sum(0)
    total[21] = counts[:, 21].amax()
    return total[:NUM_COUNTS], sums.sum(0)
