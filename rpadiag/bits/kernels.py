"""The loops behind :mod:`rpadiag.bits.stats`, compiled by numba when this module is first imported and called.

Each function scans flat arrays block by block, so that a block is read from memory once and everything after that
comes from the first-level cache. Loops are written so that LLVM turns them into SIMD code: 32-bit integers are cast
back after every operation (numba widens them otherwise), and there are no branches on the data.

Float sums are float64, added in the order of the SIMD lanes: their last bits may differ between CPU types. All
other results are exact integers.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np

BLOCK = 2048  # elements
NUM_COUNTS = 27  # 0-15: finite pairs 2^k ULP or more apart; 16-19: non-finite; 20-26: see _add_line_counts
_MIN_FREE_BYTES = 64 << 20


def cache_directory() -> Path | None:
    """Where compiled code is kept: the user's own cache directory, or None where that is not safe or possible.

    numba loads what it finds there as pickles, so a directory that another user can write to is not used.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        where = (Path(base) if base else Path.home() / ".cache") / "rpadiag" / "numba"
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = where.stat()
        if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        if not os.access(where, os.W_OK | os.X_OK):
            return None
        room = os.statvfs(where)
        return where if room.f_bavail * room.f_frsize > _MIN_FREE_BYTES else None
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None


@contextlib.contextmanager
def _numba_cache_directory(where: Path) -> Iterator[None]:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(where)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


_CACHE = cache_directory()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Release the GIL; let float sums be reordered and fused (nothing may assume that NaN is absent)."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract"}, "error_model": "numpy"}
    if _CACHE is None:
        return numba.njit(**options)(function)
    with _numba_cache_directory(_CACHE):
        return numba.njit(cache=True, **options)(function)


@_compiled
def _set_aside_nonfinite(a, b, magnitude_mask, infinity, delta, growth, values_a, values_b, counts):  # type: ignore[no-untyped-def]
    """Count the non-finite elements of one block and zero their pairs, so that the sums below skip them.

    counts 16-19: non-finite in a, in b, pairs that are not the same value (all NaNs are), pairs.
    """
    for i in range(a.size):
        mag_a, mag_b = np.int64(a[i]) & magnitude_mask, np.int64(b[i]) & magnitude_mask
        if mag_a >= infinity or mag_b >= infinity:
            counts[16] += mag_a >= infinity
            counts[17] += mag_b >= infinity
            counts[18] += not (a[i] == b[i] or (mag_a > infinity and mag_b > infinity))
            counts[19] += 1
            delta[i] = 0
            growth[i] = 0
            values_a[i] = 0.0
            values_b[i] = 0.0


@_compiled
def _line_16(a, b, delta, growth):  # type: ignore[no-untyped-def]
    """Distances of one block on the ordered line; returns the largest magnitude pattern.

    delta: b - a; growth: |b| - |a|, 0 for opposite signs. Meaningless where a side is not finite.
    """
    zero, top = np.int32(0), np.int32(0)
    for i in range(a.size):
        x, y = np.int32(a[i]), np.int32(b[i])
        mag_a, mag_b = np.int32(x & np.int32(0x7FFF)), np.int32(y & np.int32(0x7FFF))
        neg_a, neg_b = np.int32(x >> np.int32(15)), np.int32(y >> np.int32(15))
        line_a = np.int32(np.int32(mag_a ^ np.int32(-neg_a)) + neg_a)
        line_b = np.int32(np.int32(mag_b ^ np.int32(-neg_b)) + neg_b)
        top = max(top, max(mag_a, mag_b))
        flip = (neg_a != neg_b) & (min(mag_a, mag_b) > zero)
        delta[i] = np.int32(line_b - line_a)
        growth[i] = zero if flip else np.int32(mag_b - mag_a)
    return top


@_compiled
def _line_32(a, b, delta, growth):  # type: ignore[no-untyped-def]
    """As _line_16 for 32-bit patterns; distances need 64-bit integers."""
    top = np.int64(0)
    for i in range(a.size):
        mag_a, mag_b = np.int64(a[i] & np.uint32(0x7FFFFFFF)), np.int64(b[i] & np.uint32(0x7FFFFFFF))
        neg_a, neg_b = np.int64(a[i] >> np.uint32(31)), np.int64(b[i] >> np.uint32(31))
        line_a, line_b = (mag_a ^ -neg_a) + neg_a, (mag_b ^ -neg_b) + neg_b
        top = max(top, max(mag_a, mag_b))
        flip = (neg_a != neg_b) & (min(mag_a, mag_b) > 0)
        delta[i] = line_b - line_a
        growth[i] = 0 if flip else mag_b - mag_a
    return top


@_compiled
def _widen(pattern, shift, bits):  # type: ignore[no-untyped-def]
    """Patterns as int32, shifted up."""
    for i in range(pattern.size):
        bits[i] = np.int32(np.int32(pattern[i]) << shift)


@_compiled
def _half_bits(pattern, bits, offsets):  # type: ignore[no-untyped-def]
    """float16 patterns as the bits of float32 numbers from which offsets must be subtracted; exact with subnormals."""
    for i in range(pattern.size):
        x = np.int32(pattern[i])
        mag = np.int32(np.int32(x & np.int32(0x7FFF)) << np.int32(13))
        negative = (x & np.int32(0x8000)) != np.int32(0)
        subnormal = mag < np.int32(1 << 23)
        bias = np.int32(113 << 23) if subnormal else np.int32(112 << 23)
        sign = np.int32(-0x80000000) if negative else np.int32(0)
        offset = np.float32(2.0**-14) if subnormal else np.float32(0.0)
        bits[i] = np.int32(np.int32(mag + bias) | sign)
        offsets[i] = -offset if negative else offset


@_compiled
def _subtract(values, offsets):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        values[i] -= offsets[i]


@_compiled
def _add_line_counts(delta, growth, counts):  # type: ignore[no-untyped-def]
    """Clipped sums (20, 21), up, down, away, toward (22-25), the largest distance (26) and the 16 thresholds."""
    one, low, high = delta.dtype.type(1), delta.dtype.type(-8), delta.dtype.type(8)
    zero = delta.dtype.type(0)
    signed, magnitude, up, down, away, toward, largest = zero, zero, zero, zero, zero, zero, zero
    for i in range(delta.size):
        d = delta[i]
        signed = delta.dtype.type(signed + min(max(d, low), high))
        up = delta.dtype.type(up + (one if d > zero else zero))
        down = delta.dtype.type(down + (one if d < zero else zero))
        largest = max(largest, delta.dtype.type(abs(d)))
    for i in range(growth.size):
        g = growth[i]
        magnitude = delta.dtype.type(magnitude + min(max(g, low), high))
        away = delta.dtype.type(away + (one if g > zero else zero))
        toward = delta.dtype.type(toward + (one if g < zero else zero))
    counts[20] += signed
    counts[21] += magnitude
    counts[22] += up
    counts[23] += down
    counts[24] += away
    counts[25] += toward
    counts[26] = max(counts[26], np.int64(largest))
    for k in range(16):
        threshold = delta.dtype.type(1 << k)
        if threshold > largest:
            break
        reached = zero
        for i in range(delta.size):
            far = delta.dtype.type(abs(delta[i])) >= threshold
            reached = delta.dtype.type(reached + (one if far else zero))
        counts[k] += reached


@_compiled
def _add_sums(values_a, values_b, sums):  # type: ignore[no-untyped-def]
    sq_diff, sq_a, sq_b, dot = 0.0, 0.0, 0.0, 0.0
    for i in range(values_a.size):
        x, y = np.float64(values_a[i]), np.float64(values_b[i])
        d = y - x
        sq_diff += d * d
        sq_a += x * x
        sq_b += y * y
        dot += x * y
    sums[0] += sq_diff
    sums[1] += sq_a
    sums[2] += sq_b
    sums[3] += dot


@_compiled
def scan_16(a, b, infinity, is_half, counts, sums):  # type: ignore[no-untyped-def]
    """Add the statistics of two flat uint16 arrays to counts [NUM_COUNTS] int64 and sums [4] float64.

    infinity: the magnitude pattern of infinity; is_half: float16 rather than bfloat16 patterns.
    """
    delta_, growth_ = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    bits_a_, bits_b_, offsets_ = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32), np.empty(BLOCK, np.float32)
    for start in range(0, a.size, BLOCK):
        m = min(BLOCK, a.size - start)
        part_a, part_b = a[start : start + m], b[start : start + m]
        delta, growth, bits_a, bits_b = delta_[:m], growth_[:m], bits_a_[:m], bits_b_[:m]
        values_a, values_b = bits_a.view(np.float32), bits_b.view(np.float32)
        top = _line_16(part_a, part_b, delta, growth)
        if is_half:
            _half_bits(part_a, bits_a, offsets_[:m])
            _subtract(values_a, offsets_[:m])
            _half_bits(part_b, bits_b, offsets_[:m])
            _subtract(values_b, offsets_[:m])
        else:
            _widen(part_a, np.int32(16), bits_a)
            _widen(part_b, np.int32(16), bits_b)
        if top >= infinity:
            _set_aside_nonfinite(part_a, part_b, 0x7FFF, infinity, delta, growth, values_a, values_b, counts)
        _add_line_counts(delta, growth, counts)
        _add_sums(values_a, values_b, sums)


@_compiled
def scan_32(a, b, infinity, counts, sums):  # type: ignore[no-untyped-def]
    """As scan_16 for uint32 patterns of float32."""
    delta_, growth_ = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    bits_a_, bits_b_ = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for start in range(0, a.size, BLOCK):
        m = min(BLOCK, a.size - start)
        part_a, part_b = a[start : start + m], b[start : start + m]
        delta, growth, bits_a, bits_b = delta_[:m], growth_[:m], bits_a_[:m], bits_b_[:m]
        values_a, values_b = bits_a.view(np.float32), bits_b.view(np.float32)
        top = _line_32(part_a, part_b, delta, growth)
        _widen(part_a, np.int32(0), bits_a)
        _widen(part_b, np.int32(0), bits_b)
        if top >= infinity:
            _set_aside_nonfinite(part_a, part_b, 0x7FFFFFFF, infinity, delta, growth, values_a, values_b, counts)
        _add_line_counts(delta, growth, counts)
        _add_sums(values_a, values_b, sums)
