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
from rpadiag_kernels.gpu.words import (
    _add_directions,
    _add_packed,
    _add_words,
    _compare,
    _maximum,
    _minimum,
    _thermometer,
    _values,
)

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
