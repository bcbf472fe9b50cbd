"""ULP statistics of two tensors: every number that ``rpadiag.bits.UlpStats`` holds, under the same names.

All values of a dtype, ordered, form a line of integers; +0 and -0 share the point 0. ``a`` is the reference; signed
numbers are b - a. NaN and infinity are counted and enter nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpadiag_kernels.axes import check_same, lp_code
from rpadiag_kernels.operators import operator

NUM_BINS = 17
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
BLOCK = 1 << 20  # elements of one step on the CPU


def ulp_stats(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Statistics of ``b`` against ``a``, two tensors of one shape, dtype (bf16, fp16, fp32) and device.

    Keys, as in ``rpadiag.bits.UlpStats``: n, num_differing, max_ulp, hist (17 counts), sum_signed_clip8,
    sum_magnitude_clip8, num_up, num_down, num_away, num_toward, sum_sq_diff, sum_sq_a, sum_sq_b, dot, num_nonfinite_a,
    num_nonfinite_b, num_nonfinite_mismatch. Waits for the device. Errors: TypeError or ValueError for inputs that do
    not fit together.
    """
    lp_code(a, "ulp_stats")
    check_same("ulp_stats", a=a, b=b)
    counts, sums = _op(a, b)
    return _named(counts.tolist(), sums.tolist(), a.numel())


def _named(counts: list[int], sums: list[float], n: int) -> dict[str, Any]:
    at_least, (up, away, flipped, signed, magnitude, largest) = counts[:16], counts[16:22]
    bad_a, bad_b, mismatched, pairs = counts[22:]
    cumulative = [n - pairs, *at_least, 0]
    return {
        "n": n,
        "num_differing": at_least[0] + mismatched,
        "max_ulp": largest,
        "hist": tuple(cumulative[k] - cumulative[k + 1] for k in range(NUM_BINS)),
        "sum_signed_clip8": signed,
        "sum_magnitude_clip8": magnitude,
        "num_up": up,
        "num_down": at_least[0] - up,
        "num_away": away,
        "num_toward": at_least[0] - away - flipped,
        "sum_sq_diff": sums[0],
        "sum_sq_a": sums[1],
        "sum_sq_b": sums[2],
        "dot": sums[3],
        "num_nonfinite_a": bad_a,
        "num_nonfinite_b": bad_b,
        "num_nonfinite_mismatch": mismatched,
    }


def reference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What the operator returns, in plain PyTorch: (counts int64 [26], sums float64 [4]).

    counts: pairs 2^k ULP or more apart (0-15); b above a, |b| above |a| without a change of sign, changes of sign
    between non-zero values (16-18); sums of b - a and of |b| - |a| clipped to 8, the latter 0 where the sign changes
    (19, 20); largest distance (21); non-finite in a, in b, pairs of different value, pairs (22-25). sums: (b-a)^2, a^2, b^2, a*b.
    """
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    bits_a, bits_b = (t.contiguous().view(integer).long() for t in (a, b))
    sign_bit = -(2**31) if a.dtype == torch.float32 else -(2**15)
    mag_a, mag_b = bits_a & ~sign_bit, bits_b & ~sign_bit
    top = INFINITY[a.dtype]
    bad = (mag_a >= top) | (mag_b >= top)
    mismatched = bad & (bits_a != bits_b) & ~((mag_a > top) & (mag_b > top))
    line_a, line_b = torch.where(bits_a < 0, -mag_a, mag_a), torch.where(bits_b < 0, -mag_b, mag_b)
    distance = torch.where(bad, 0, line_b - line_a)
    flipped = ~bad & ((bits_a < 0) != (bits_b < 0)) & (mag_a > 0) & (mag_b > 0)
    growth = torch.where(bad | flipped, 0, mag_b - mag_a)
    u = distance.abs()
    largest = u.max() if u.numel() else torch.zeros((), dtype=torch.int64)
    counts = [(u >= 2**k).sum() for k in range(16)]
    counts += [
        (distance > 0).sum(),
        (growth > 0).sum(),
        flipped.sum(),
        distance.clamp(-8, 8).sum(),
        growth.clamp(-8, 8).sum(),
    ]
    counts += [largest, (mag_a >= top).sum(), (mag_b >= top).sum(), mismatched.sum(), bad.sum()]
    x, y = (torch.where(bad, 0.0, t.double()) for t in (a, b))
    return torch.stack(counts), torch.stack([((y - x) ** 2).sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()])


@operator("rpadiag::ulp_counts")
def _op(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`reference`."""
    return _in_blocks(a, b)


def _in_blocks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    counts, sums = a.new_zeros(26, dtype=torch.int64), a.new_zeros(4, dtype=torch.float64)
    for start in range(0, flat_a.numel(), BLOCK):
        part, part_sums = reference(flat_a[start : start + BLOCK], flat_b[start : start + BLOCK])
        largest = torch.maximum(counts[21], part[21])
        counts, sums = counts + part, sums + part_sums
        counts[21] = largest
    return counts, sums


@_op.register_kernel("cuda")
def _(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    from rpadiag_kernels.gpu import ulp as gpu

    if a.numel() == 0:
        return a.new_zeros(26, dtype=torch.int64), a.new_zeros(4, dtype=torch.float64)
    if torch.cuda.get_device_capability(a.device) < (9, 0):  # the kernel's packed instructions came with Hopper
        return _in_blocks(a, b)
    return gpu.ulp_counts(a, b)


@_op.register_fake
def _(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(26, dtype=torch.int64), a.new_empty(4, dtype=torch.float64)
