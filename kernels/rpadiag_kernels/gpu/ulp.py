"""ULP statistics of two tensors in one pass, in Triton.

A 32-bit word holds two 16-bit elements (``WIDE``: one float32), and the work is done on whole words. Per word: the
larger and the smaller magnitude, their distance u on the ordered line, its thermometer code (a bit per k, set when
u >= 2^k), and masks of direction. The tensor cores count the bits of codes and masks and add up clipped distances and
float products (``fragments.py``): 32 instructions a word, where counting and adding in the threads took 50, which was the
bottleneck. A difference b - a of 16-bit floats is taken apart into two, s + e; e^2 <= 2^-18 s^2 is left out. Float sums
are float32 for the words of a group, then for a thread, and float64 from there on. Groups pass through shared memory,
STAGES - 1 of them ahead.

A program whose float sums are not finite, too small for float32, or cancelled, does its part again the careful way
(``_scan_carefully``): non-finite pairs are counted and set to zero, and the sums are float64 throughout. The words that
fill no group are done that way too.
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
from rpadiag_kernels.gpu.fragments import (
    _by_column,
    _column,
    _count_codes,
    _count_flags,
    _dot_bytes,
    _dot_floats,
    _position,
    _totals,
)
from rpadiag_kernels.gpu.words import (
    _add_words,
    _compare,
    _directions,
    _distance,
    _flags,
    _maximum,
    _minimum,
    _signed_difference,
    _thermometer,
)

NUM_PROGRAMS = 528
WARPS = 4
MAX_REGISTERS = 128  # four programs on a multiprocessor
STEPS = 4  # loads of a group
STAGES = 3  # groups in flight, in shared memory
NUM_COUNTS = 26  # as in rpadiag_kernels.ulp.reference
NUM_SUMS = 4
SMALL_SUM = 2.0**-80


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
def _start(TILE: tl.constexpr, INTERPRET: tl.constexpr):
    """Nothing counted yet: largest distance; clipped distances by direction; flags; codes."""
    zero = tl.zeros([TILE], tl.int32)
    eight = tl.zeros([8 if INTERPRET else TILE], tl.int32)
    return zero, (zero, zero), eight, (eight, eight)


@triton.jit
def _count(counts, a, b, LP: tl.constexpr, INTERPRET: tl.constexpr):
    """Take the words a, b into the counts; returns them, and (hi, lo, up) for the float sums."""
    WIDE: tl.constexpr = LP == 2
    largest, sums, flags, codes = counts
    hi, lo, flipped, grown, up = _compare(a, b, LP, INTERPRET)
    u = _distance(hi, lo, flipped, WIDE, INTERPRET)
    largest = _maximum(largest, u, WIDE, INTERPRET)
    clipped = _minimum(u, 8, WIDE, INTERPRET)
    directions = _directions(flipped, grown)
    sums = _dot_bytes(sums, up, directions, clipped, INTERPRET)
    flags = _count_flags(flags, _flags(clipped, up, directions, INTERPRET), WIDE, INTERPRET)
    codes = _count_codes(codes, _thermometer(u, WIDE, INTERPRET), WIDE, INTERPRET)
    return (largest, sums, flags, codes), hi, lo, up


@triton.jit
def _store_counts(counts, position, counts_ptr, stride, LP: tl.constexpr, INTERPRET: tl.constexpr):
    """Write the counts 0 to 21 of this program, ``stride`` apart; returns the largest distance."""
    largest, sums, flags, codes = counts
    k = tl.arange(0, 8)
    tl.store(counts_ptr + k * stride, _by_column(codes[0], position, INTERPRET).to(tl.int64))
    tl.store(counts_ptr + (8 + k) * stride, _by_column(codes[1], position, INTERPRET).to(tl.int64))
    numbers = _by_column(flags, position, INTERPRET)
    num_flipped = tl.sum(tl.where(k == 4, numbers, 0), axis=0)
    num_away = tl.sum(tl.where(k == 5, numbers, 0), axis=0) - num_flipped
    num_up = tl.sum(tl.where(k == 6, numbers, 0), axis=0)
    sum_all = tl.sum(tl.where(k < 4, numbers << k, 0), axis=0)
    # Both negative; the second is that of the changes of sign plus twice that of growing magnitudes.
    sum_up, sum_away = _totals(sums, position, INTERPRET)
    tl.store(counts_ptr + 16 * stride, num_up.to(tl.int64))
    tl.store(counts_ptr + 17 * stride, num_away.to(tl.int64))
    tl.store(counts_ptr + 18 * stride, num_flipped.to(tl.int64))
    tl.store(counts_ptr + 19 * stride, (-2 * sum_up - sum_all).to(tl.int64))
    tl.store(counts_ptr + 20 * stride, (-sum_away - sum_all).to(tl.int64))
    if LP == 2:
        furthest = tl.max(largest.to(tl.int64) & 0xFFFFFFFF, axis=0)
    else:
        furthest = tl.max(tl.maximum(largest & 0xFFFF, (largest >> 16) & 0xFFFF), axis=0).to(tl.int64)
    tl.store(counts_ptr + 21 * stride, furthest)
    return furthest


@triton.jit
def _store_sums(sums_ptr, stride, sq_diff, sq_a, sq_b, dot):
    tl.store(sums_ptr, sq_diff)
    tl.store(sums_ptr + stride, sq_a)
    tl.store(sums_ptr + 2 * stride, sq_b)
    tl.store(sums_ptr + 3 * stride, dot)


@triton.jit
def _sum_of_rows(acc, position, first, second):
    """Diagonal of a float accumulator, its two halves weighted, as one float64 number."""
    weight = tl.where((position & 2) == 0, first, second)
    return tl.sum(tl.where(_column(position) == (position >> 4), acc * weight, 0.0).to(tl.float64), axis=0)


@triton.jit
def _scan(
    a_ptr, b_ptr, counts_ptr, sums_ptr, first, num_groups, workers, stride, LP: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Store what this program finds in the groups first, first + workers, ...; returns (furthest distance, float sums)."""
    IN_THREADS: tl.constexpr = LP == 2 or INTERPRET
    counts = _start(TILE, INTERPRET)
    none = tl.zeros([TILE], tl.float32)
    total_0, total_1, total_2 = none, none, none
    for group in tl.range(first, num_groups, workers, num_stages=STAGES):
        sums = (none, none, none, none)
        for step in tl.static_range(STEPS):
            offsets = group * (STEPS * TILE) + step * TILE + tl.arange(0, TILE)
            a, b = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)
            counts, hi, lo, up = _count(counts, a, b, LP, INTERPRET)
            if IN_THREADS:
                sums = _add_words(sums, a, b, LP, False)
            else:
                x, s, e = _signed_difference(a, hi, lo, up, LP)
                by_x, by_s, by_e, _ = sums
                by_x = _dot_floats(by_x, x, s, x, LP)  # a^2 | a*s, which is in the next as well
                by_s = _dot_floats(by_s, x, s, s, LP)  # a*s | s^2
                by_e = _dot_floats(by_e, x, s, e, LP)  # a*e | s*e
                sums = (by_x, by_s, by_e, none)
        total_0, total_1, total_2 = total_0 + sums[0], total_1 + sums[1], total_2 + sums[2]
    position = counts[0] if INTERPRET else _position(counts[0])
    if IN_THREADS:
        sq_diff = tl.sum(total_0.to(tl.float64), axis=0)
        sq_a = tl.sum(total_1.to(tl.float64), axis=0)
        third = tl.sum(total_2.to(tl.float64), axis=0)
    else:
        sq_a = _sum_of_rows(total_0, position, 1.0, 0.0)
        third = _sum_of_rows(total_1 + total_2, position, 1.0, 0.0)
        sq_diff = _sum_of_rows(total_1 + 2.0 * total_2, position, 0.0, 1.0)
    furthest = _store_counts(counts, position, counts_ptr, stride, LP, INTERPRET)
    tl.store(counts_ptr + (22 + tl.arange(0, 4)) * stride, tl.zeros([4], tl.int64))
    dot = sq_a + third
    sq_b = dot + third + sq_diff
    _store_sums(sums_ptr, stride, sq_diff, sq_a, sq_b, dot)
    return furthest, sq_diff, sq_a, sq_b


@triton.jit
def _scan_carefully(
    a_ptr, b_ptr, counts_ptr, sums_ptr, first, num_groups, num_words, workers, stride, LP: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """As :func:`_scan`, of any words."""
    infinity: tl.constexpr = 0x7F80 if LP == 0 else 0x7C00
    counts = _start(TILE, INTERPRET)
    zero = tl.zeros([TILE], tl.int32)
    bad = (zero, zero, zero, zero)
    none = tl.zeros([TILE], tl.float64)
    sums = (none, none, none, none)
    for group in range(first, num_groups, workers):
        for step in range(STEPS):
            offsets = group * (STEPS * TILE) + step * TILE + tl.arange(0, TILE)
            mask = offsets < num_words
            a = tl.load(a_ptr + offsets, mask=mask, other=0)
            b = tl.load(b_ptr + offsets, mask=mask, other=0)
            if LP == 2:
                bad, a, b = _set_aside(bad, a, b, 0, 0x7FFFFFFF, 0x7F800000)
            else:
                bad, a, b = _set_aside(bad, a, b, 0, 0x7FFF, infinity)
                bad, a, b = _set_aside(bad, a, b, 16, 0x7FFF, infinity)
            counts, _, _, _ = _count(counts, a, b, LP, INTERPRET)
            sums = _add_words(sums, a, b, LP, True)
    position = counts[0] if INTERPRET else _position(counts[0])
    _store_counts(counts, position, counts_ptr, stride, LP, INTERPRET)
    for i in tl.static_range(4):
        tl.store(counts_ptr + (22 + i) * stride, tl.sum(bad[i], axis=0).to(tl.int64))
    _store_sums(
        sums_ptr, stride, tl.sum(sums[0], axis=0), tl.sum(sums[1], axis=0), tl.sum(sums[2], axis=0),
        tl.sum(sums[3], axis=0),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_words", "has_rest"])
def _ulp_stats(
    a_ptr, b_ptr, counts_ptr, sums_ptr, num_words, has_rest, SMALL: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Partial counts [26, programs] and sums [4, programs]. The programs share the full groups of words; where words are
    left over (``has_rest`` 1), the first program takes those alone."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    workers = tl.maximum(programs - has_rest, 1).to(tl.int64)
    num_groups = (num_words // (STEPS * TILE)).to(tl.int64)
    on_rest = program < has_rest
    first = tl.where(on_rest, num_groups, (program - has_rest).to(tl.int64))
    furthest, sq_diff, sq_a, sq_b = _scan(
        a_ptr, b_ptr, counts_ptr + program, sums_ptr + program, first, num_groups, workers, programs, LP, TILE, STEPS,
        STAGES, INTERPRET,
    )  # fmt: skip
    size = sq_diff + sq_a
    doubtful = (size < SMALL) | ((furthest > 0) & (sq_diff < SMALL)) | ((size < float("inf")) == 0)
    if doubtful | (sq_b < sq_a * 0.0625) | on_rest:
        tl.debug_barrier()
        _scan_carefully(
            a_ptr, b_ptr, counts_ptr + program, sums_ptr + program, first, num_groups + on_rest.to(tl.int64), num_words,
            workers, programs, LP, TILE, STEPS, INTERPRET,
        )  # fmt: skip


@triton.jit
def _combine(partial_counts_ptr, partial_sums_ptr, counts_ptr, sums_ptr, programs, SIZE: tl.constexpr):
    """Add the partial results of one column; the largest of column 21."""
    column = tl.program_id(0)
    index = tl.arange(0, SIZE)
    if column < 26:
        numbers = tl.load(partial_counts_ptr + column * programs + index, mask=index < programs, other=0)
        tl.store(counts_ptr + column, tl.where(column == 21, tl.max(numbers, axis=0), tl.sum(numbers, axis=0)))
    else:
        column -= 26
        values = tl.load(partial_sums_ptr + column * programs + index, mask=index < programs, other=0.0)
        tl.store(sums_ptr + column, tl.sum(values, axis=0))


def ulp_counts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(counts int64 [NUM_COUNTS], sums float64 [4]) of ``a`` and ``b`` of one shape; strided ones are copied."""
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    per_word = 4 // a.element_size()
    if a.numel() % per_word or a.data_ptr() % 16 or b.data_ptr() % 16:
        pad = -a.numel() % per_word
        a, b = (torch.nn.functional.pad(t, (0, pad)) if pad else t.clone() for t in (a, b))
    num_words = a.numel() // per_word
    tile = 128 * WARPS  # four words a thread
    groups, rest = divmod(num_words, STEPS * tile)
    has_rest = int(rest > 0)
    programs = min(NUM_PROGRAMS, groups + has_rest)
    partial_counts = torch.empty(NUM_COUNTS, programs, dtype=torch.int64, device=a.device)
    partial_sums = torch.empty(NUM_SUMS, programs, dtype=torch.float64, device=a.device)
    counts = torch.empty(NUM_COUNTS, dtype=torch.int64, device=a.device)
    sums = torch.empty(NUM_SUMS, dtype=torch.float64, device=a.device)
    with on_device(a):
        _ulp_stats[(programs,)](
            a.view(torch.int32), b.view(torch.int32), partial_counts, partial_sums, num_words, has_rest,
            SMALL=SMALL_SUM, LP=LP_CODES[a.dtype], TILE=tile, STEPS=STEPS, STAGES=STAGES, INTERPRET=INTERPRETING,
            num_warps=WARPS, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        _combine[(NUM_COUNTS + NUM_SUMS,)](
            partial_counts, partial_sums, counts, sums, programs, SIZE=triton.next_power_of_2(programs), num_warps=4
        )
    return counts, sums
