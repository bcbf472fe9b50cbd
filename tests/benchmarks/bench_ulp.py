"""Speed of the ULP comparison on one core, beside numpy reading the same bytes.

    python tests/benchmarks/bench_ulp.py [--mib 64] [--repeats 15]

Prints the median rate in GB/s of input (both arrays), and the ratio of the medians of paired runs, alternated so
that a busy machine slows both alike. Seconds are CPU time of the one thread: on an idle machine the same as wall time,
on a busy one not inflated by waiting for the core. Leaves with 1 when BF16 is below 1 GB/s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from rpadiag.bits import ulp_stats

FLOOR_GB_PER_S = 1.0


def inputs(dtype: str, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of normal values, half of the elements 1 to 3 ULP apart; bfloat16 as uint16 patterns."""
    rng = np.random.default_rng(0)
    single = rng.standard_normal(num_bytes // (4 if dtype == "float32" else 2), dtype=np.float32)
    if dtype == "bfloat16":
        a = (single.view(np.uint32) >> 16).astype(np.uint16)
    else:
        a = single.astype(dtype)
    b = a.copy()
    patterns = b.view(np.uint32 if dtype == "float32" else np.uint16)
    moves = np.where(rng.random(b.size) < 0.5, rng.integers(1, 4, b.size), 0)
    np.add(patterns, moves.astype(patterns.dtype), out=patterns)
    return a, b


def seconds(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return time.thread_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of each array")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    slow = False
    for dtype in ("bfloat16", "float16", "float32"):
        a, b = inputs(dtype, options.mib << 20)
        target_a, target_b = np.empty_like(a), np.empty_like(b)

        def copy(a: np.ndarray = a, b: np.ndarray = b, x: np.ndarray = target_a, y: np.ndarray = target_b) -> None:
            np.copyto(x, a)
            np.copyto(y, b)

        ulp_stats(a[:8], b[:8])  # compile
        copy()
        ulp_s, copy_s, equal_s = [], [], []
        c, d = a.view(np.uint8), a.view(np.uint8).copy()
        for _ in range(options.repeats):
            ulp_s.append(seconds(lambda a=a, b=b: ulp_stats(a, b)))  # type: ignore[misc]
            copy_s.append(seconds(copy))
            equal_s.append(seconds(lambda c=c, d=d: np.array_equal(c, d)))  # type: ignore[misc]
        median = statistics.median(ulp_s)
        rate = (a.nbytes + b.nbytes) / median / 1e9
        slow |= dtype == "bfloat16" and rate < FLOOR_GB_PER_S
        print(
            f"{dtype:9s} {rate:5.2f} GB/s of input, 1 core; time = "
            f"{median / statistics.median(copy_s):.1f}x copying both arrays, "
            f"{median / statistics.median(equal_s):.1f}x np.array_equal of the same bytes "
            f"({options.mib} MiB each, median of {options.repeats})"
        )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
