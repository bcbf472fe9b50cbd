"""Distances between floating-point numbers of one dtype, counted in units in the last place (ULP).

All finite values of a dtype, ordered, form a line of integers: the magnitude bits, negative for a set sign bit.
+0 and -0 share the point 0, neighbours are 1 apart, and the distance of two values is the difference of their
points. NaN and infinity are not on the line: they are counted and never enter a distance or a mean.

``a`` is the reference and ``b`` what is compared with it, in rpadiag the trainer and the rollout engine: signed
numbers are b - a. One pass over the inputs, no temporaries that grow with them, the GIL released.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.errors import UsageError, unknown_name

if TYPE_CHECKING:
    import torch

NUM_BINS = 17
CLIP_ULP = 8

# name -> (bits of the pattern, magnitude pattern of infinity)
_FORMATS: dict[str, tuple[int, int]] = {
    "bfloat16": (16, 0x7F80),
    "float16": (16, 0x7C00),
    "float32": (32, 0x7F800000),
}


@dataclass(frozen=True, kw_only=True)
class UlpStats:
    """How far tensor b is from tensor a. Statistics of parts add up: ``ulp_stats(a1, b1) + ulp_stats(a2, b2)``.

    n:                        elements compared, non-finite ones included.
    num_differing:            pairs at least 1 ULP apart, plus non-finite pairs that are not the same value.
    max_ulp:                  largest distance of a finite pair.
    hist:                     NUM_BINS counts of finite pairs: bin 0 is 0 ULP, bin k is [2^(k-1), 2^k) ULP, the last
                              is open above.
    sum_signed_clip8:         sum of b - a in ULP over finite pairs, each clipped to +-8.
    sum_magnitude_clip8:      the same of |b| - |a|; pairs of opposite sign count as 0. Positive: b lies further from 0.
    num_up, num_down:         finite pairs with b > a, b < a.
    num_away, num_toward:     finite pairs of the same sign (or one of them 0) with |b| > |a|, |b| < |a|.
    sum_sq_diff, sum_sq_a, sum_sq_b, dot: sums over finite pairs of (b-a)^2, a^2, b^2, a*b, in float64.
    num_nonfinite_a, num_nonfinite_b: NaN and infinities on each side.
    num_nonfinite_mismatch:   pairs with a non-finite side that are not the same value (all NaNs are the same).
    """

    n: int = 0
    num_differing: int = 0
    max_ulp: int = 0
    hist: tuple[int, ...] = (0,) * NUM_BINS
    sum_signed_clip8: int = 0
    sum_magnitude_clip8: int = 0
    num_up: int = 0
    num_down: int = 0
    num_away: int = 0
    num_toward: int = 0
    sum_sq_diff: float = 0.0
    sum_sq_a: float = 0.0
    sum_sq_b: float = 0.0
    dot: float = 0.0
    num_nonfinite_a: int = 0
    num_nonfinite_b: int = 0
    num_nonfinite_mismatch: int = 0

    def __add__(self, other: UlpStats) -> UlpStats:
        if not isinstance(other, UlpStats):
            return NotImplemented
        merged: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)
        }
        merged["max_ulp"] = max(self.max_ulp, other.max_ulp)
        merged["hist"] = tuple(x + y for x, y in zip(self.hist, other.hist, strict=True))
        return UlpStats(**merged)

    @property
    def num_finite(self) -> int:
        """Pairs with both sides finite."""
        return sum(self.hist)

    @property
    def differing(self) -> float:
        """Share of elements that differ; NaN for no elements."""
        return _ratio(self.num_differing, self.n)

    @property
    def mean_signed_ulp(self) -> float:
        """Mean of b - a over finite pairs, in ULP, each clipped to +-8."""
        return _ratio(self.sum_signed_clip8, self.num_finite)

    @property
    def mean_magnitude_ulp(self) -> float:
        """Mean of |b| - |a| over finite pairs, in ULP, each clipped to +-8, sign flips as 0."""
        return _ratio(self.sum_magnitude_clip8, self.num_finite)

    @property
    def sign_balance(self) -> float:
        """(up - down) / (up + down): 0 for no bias, NaN when nothing differs."""
        return _ratio(self.num_up - self.num_down, self.num_up + self.num_down)

    @property
    def magnitude_balance(self) -> float:
        """(away - toward) / (away + toward): -1 when every difference is toward zero, as truncation makes them."""
        return _ratio(self.num_away - self.num_toward, self.num_away + self.num_toward)

    @property
    def rel_l2(self) -> float:
        """|b - a|_2 / |a|_2; 0 for equal tensors, infinity when only a is all zero."""
        if self.sum_sq_diff == 0.0:
            return 0.0 if self.num_finite else math.nan
        return math.sqrt(self.sum_sq_diff / self.sum_sq_a) if self.sum_sq_a else math.inf

    @property
    def cosine(self) -> float:
        """Cosine of a and b; NaN when one of them is all zero."""
        norms = math.sqrt(self.sum_sq_a) * math.sqrt(self.sum_sq_b)
        return max(-1.0, min(1.0, self.dot / norms)) if norms else math.nan

    def columns(self, prefix: str = "") -> dict[str, Any]:
        """The ULP columns of a run's ``sites`` table, with a as trainer and b as rollout; NaN becomes None."""
        values: dict[str, Any] = {
            "n": self.n,
            "num_differing": self.num_differing,
            "differing": _none_if_nan(self.differing),
            "max_ulp": self.max_ulp,
            "mean_signed_ulp": _none_if_nan(self.mean_signed_ulp),
            "mean_magnitude_ulp": _none_if_nan(self.mean_magnitude_ulp),
            "sign_balance": _none_if_nan(self.sign_balance),
            "magnitude_balance": _none_if_nan(self.magnitude_balance),
            "ulp_hist": list(self.hist),
            "rel_l2": _none_if_nan(self.rel_l2),
            "cosine": _none_if_nan(self.cosine),
            "num_nonfinite_trainer": self.num_nonfinite_a,
            "num_nonfinite_rollout": self.num_nonfinite_b,
            "num_nonfinite_mismatch": self.num_nonfinite_mismatch,
        }
        return {f"{prefix}{name}": value for name, value in values.items()}


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else math.nan


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def ulp_stats(a: Any, b: Any, *, dtype: str | None = None) -> UlpStats:
    """Statistics of b against a, element by element; shapes and dtypes must be equal.

    a, b: torch CPU tensors (bfloat16, float16, float32), numpy float16 or float32 arrays, or uint16/int16 bit
    patterns, which are bfloat16 unless ``dtype`` says float16. Any shape; arrays that are not contiguous are copied a
    block of rows at a time. Raises UsageError for anything else. ``a`` and ``b`` are not modified.
    """
    bits_a, name_a = _patterns(a, dtype)
    bits_b, name_b = _patterns(b, dtype)
    if name_a != name_b:
        raise UsageError(
            f"ULP distance of {name_a} and {name_b} is undefined", hint="round both to one dtype, then compare"
        )
    if bits_a.shape != bits_b.shape:
        raise UsageError(f"ULP distance of arrays of shape {bits_a.shape} and {bits_b.shape} is undefined")
    from rpadiag.bits import kernels  # compiles on first use

    width, infinity = _FORMATS[name_a]
    counts = np.zeros(kernels.NUM_COUNTS, np.int64)
    sums = np.zeros(4, np.float64)
    for flat_a, flat_b in _contiguous_parts(bits_a, bits_b):
        if width == 16:
            kernels.scan_16(flat_a, flat_b, infinity, name_a == "float16", counts, sums)
        else:
            kernels.scan_32(flat_a, flat_b, infinity, counts, sums)
    return _stats(counts, sums, bits_a.size)


def to_numpy_bits(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a numpy array over the same memory: bfloat16 as its uint16 pattern, float16 and float32 as
    numpy's own dtypes. Shape and strides are kept. Raises UsageError for other dtypes and for tensors on a device.
    """
    import torch

    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise UsageError(f"tensor is on {tensor.device}, not in host memory", hint="call .cpu() first")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype in (torch.float16, torch.float32):
        return tensor.numpy()
    raise _unsupported(str(tensor.dtype).removeprefix("torch."))


def _unsupported(name: str) -> UsageError:
    return UsageError(f"ULP distance is not defined for {name}", detail=f"known dtypes: {', '.join(_FORMATS)}")


def _patterns(x: Any, dtype: str | None) -> tuple[np.ndarray, str]:
    """(uint16 or uint32 patterns over x's memory, dtype name)."""
    if dtype is not None and dtype not in _FORMATS:
        raise unknown_name("dtype", dtype, _FORMATS)
    array = x if isinstance(x, np.ndarray) else to_numpy_bits(x) if hasattr(x, "detach") else None
    if array is None:
        raise UsageError(f"ULP distance needs arrays or tensors, not {type(x).__name__}")
    native = array.dtype.name
    if not array.dtype.isnative:
        raise UsageError(f"array of dtype {array.dtype.str} is not in this machine's byte order")
    if native in ("uint16", "int16"):
        name = dtype or "bfloat16"
    else:
        name = native
    if name not in _FORMATS:
        raise _unsupported(name)
    width, _ = _FORMATS[name]
    if array.dtype.itemsize * 8 != width or (dtype is not None and dtype != name):
        raise UsageError(f"array of dtype {native} does not hold {dtype or name}")
    return array.view(np.uint16 if width == 16 else np.uint32), name


def _contiguous_parts(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Flat contiguous pieces of both arrays in the same order; views where the memory allows it."""
    if a.size == 0:
        return
    if (a.flags.c_contiguous and b.flags.c_contiguous) or a.ndim == 0:
        yield a.reshape(-1), b.reshape(-1)
        return
    if a.ndim == 1:
        step = 1 << 20
    else:
        step = max(1, (1 << 20) // (a.size // a.shape[0]))
    for start in range(0, a.shape[0], step):
        part_a, part_b = a[start : start + step], b[start : start + step]
        yield np.ascontiguousarray(part_a).reshape(-1), np.ascontiguousarray(part_b).reshape(-1)


def _stats(counts: np.ndarray, sums: np.ndarray, n: int) -> UlpStats:
    at_least = [int(c) for c in counts[:16]]  # finite pairs with a distance of 2^k ULP or more
    nonfinite_a, nonfinite_b, mismatch, nonfinite_pairs = (int(c) for c in counts[16:20])
    signed, magnitude, up, down, away, toward, largest = (int(c) for c in counts[20:27])
    cumulative = [n - nonfinite_pairs, *at_least, 0]
    return UlpStats(
        n=n,
        num_differing=at_least[0] + mismatch,
        max_ulp=largest,
        hist=tuple(cumulative[k] - cumulative[k + 1] for k in range(NUM_BINS)),
        sum_signed_clip8=signed,
        sum_magnitude_clip8=magnitude,
        num_up=up,
        num_down=down,
        num_away=away,
        num_toward=toward,
        sum_sq_diff=float(sums[0]),
        sum_sq_a=float(sums[1]),
        sum_sq_b=float(sums[2]),
        dot=float(sums[3]),
        num_nonfinite_a=nonfinite_a,
        num_nonfinite_b=nonfinite_b,
        num_nonfinite_mismatch=mismatch,
    )
