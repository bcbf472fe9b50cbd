"""The all-reduce of tensor parallelism as an operation of its own: the ranks' partial products against the sum that the engine gave.

*Local* divergence of an all-reduce is the partial products added in FP32 in the order of ranks and rounded once, against what came
out. Beside it every other precision and order that engines use is tried on the same elements, so that a finding can name the one
that reproduces them. Plain numpy on bit patterns: neither torch nor an engine is needed.

Shape legend: T tokens, W width of the sum; partial products are [T, ranks * W], the ranks side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rpadiag.errors import CaptureError
from rpadiag.findings import Finding

REFERENCE = "in FP32 in the order of ranks, rounded once"
_Round = Callable[[np.ndarray], np.ndarray]


@dataclass(kw_only=True)
class Reductions:
    """All-reduces of one precision, pooled. wrong: elements that a way of adding does not reproduce, by its name."""

    num_ranks: int = 0
    num_elements: int = 0
    points: list[str] = field(default_factory=list)
    wrong: dict[str, int] = field(default_factory=dict)

    def add(self, point: str, partials: np.ndarray, given: np.ndarray, *, dtype: str) -> np.ndarray:
        """Take one all-reduce; returns the reference, as bits like ``given`` [T, W]. dtype: of both, by torch's name.

        Raises CaptureError for partial products that do not make a whole number of ranks.
        """
        width = given.shape[1]
        if partials.shape[0] != given.shape[0] or partials.shape[1] % width or partials.shape[1] == width:
            raise CaptureError(
                f"the partial products of {point} have shape {partials.shape}, their sum {given.shape}",
                detail="they are the ranks' products side by side, one sum wide each",
            )
        ranks = [widened(p, dtype) for p in np.split(partials, partials.shape[1] // width, axis=1)]
        wanted = _patterns(given)
        reference = None
        for name, total in _sums(ranks, dtype):
            if reference is None:
                reference = total
            self.wrong[name] = self.wrong.get(name, 0) + int((total != wanted).sum())
        assert reference is not None
        self.num_ranks = len(ranks)
        self.num_elements += wanted.size
        if point not in self.points:
            self.points.append(point)
        return reference.view(given.dtype)

    def merge(self, other: Reductions) -> None:
        """Add the all-reduces of other sequences."""
        self.num_ranks = max(self.num_ranks, other.num_ranks)
        self.num_elements += other.num_elements
        self.points += [p for p in other.points if p not in self.points]
        for name, count in other.wrong.items():
            self.wrong[name] = self.wrong.get(name, 0) + count

    def finding(self) -> list[Finding]:
        """One sentence: what the all-reduce rounds, and which way of adding reproduces it; empty without an all-reduce."""
        if not self.num_elements:
            return []
        name, left = min(
            self.wrong.items(), key=lambda item: item[1]
        )  # the first of equals, and the reference is first
        differing = self.wrong[REFERENCE]
        what = f"The all-reduce over {self.num_ranks} ranks ({', '.join(_given(p) for p in self.points)}) "
        if differing == 0:
            text = (
                what
                + f"adds the ranks' partial products {REFERENCE}: all {self.num_elements:,} elements agree with that to the "
                "last bit. Beyond it, tensor parallelism rounds each rank's partial product."
            )
        else:
            text = what + (
                f"rounds otherwise than {REFERENCE} in {differing / self.num_elements:.2%} of {self.num_elements:,} elements; "
                + (
                    f"added {name}, every element is reproduced."
                    if left == 0
                    else f"no order and precision that was tried reproduces it: added {name}, {left:,} elements are left."
                )
            )
        numbers = {
            "num_ranks": self.num_ranks, "num_elements": self.num_elements, "num_differing": differing,
            "reproduced_by": name if left == 0 else None, "num_left": dict(self.wrong),
        }  # fmt: skip
        return [Finding(code="all-reduce", severity="info", text=text, region="all_reduce", numbers=numbers, rank=6)]


def _given(point: str) -> str:
    return {"o_reduce": "o_proj", "down_reduce": "down_proj"}.get(point, point)


# -- ways to add -----------------------------------------------------------------------------------


def _sums(ranks: Sequence[np.ndarray], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bits of the sum) of every way that is tried, the reference first; ``ranks`` are FP32 [T, W]."""
    num = len(ranks)
    nearest, truncated = (lambda x: narrowed(x, dtype)), (lambda x: narrowed(x, dtype, truncate=True))
    fp32 = _in_order(ranks)
    yield REFERENCE, nearest(fp32)
    if dtype == "bfloat16":
        yield "in FP32 in the order of ranks, truncated once", truncated(fp32)
    if num > 2:
        yield "in FP32 in the reverse order of ranks, rounded once", nearest(_in_order(ranks[::-1]))
    if num > 3:
        yield "in FP32 in pairs of ranks, rounded once", nearest(_in_pairs(list(ranks)))
    if num > 2:
        if dtype != "float32":
            yield "and rounded after each addition, in the order of ranks", _step_by_step(ranks, nearest, dtype)
            if dtype == "bfloat16":
                yield "and truncated after each addition, in the order of ranks", _step_by_step(ranks, truncated, dtype)
        for first in range(1, num):
            turned = [*ranks[first:], *ranks[:first]]
            yield (
                f"and rounded after each addition, around the ring from rank {first}",
                _step_by_step(turned, nearest, dtype),
            )


def _in_order(ranks: Sequence[np.ndarray]) -> np.ndarray:
    total = ranks[0]
    for partial in ranks[1:]:
        total = total + partial
    return total


def _in_pairs(ranks: list[np.ndarray]) -> np.ndarray:
    while len(ranks) > 1:
        ranks = [_in_order(ranks[i : i + 2]) for i in range(0, len(ranks), 2)]
    return ranks[0]


def _step_by_step(ranks: Sequence[np.ndarray], step: _Round, dtype: str) -> np.ndarray:
    total = step(ranks[0])
    for partial in ranks[1:]:
        total = step(widened(total, dtype) + partial)
    return total


# -- bit patterns ----------------------------------------------------------------------------------


def widened(bits: np.ndarray, dtype: str) -> np.ndarray:
    """FP32 values of elements; of bfloat16 from their patterns."""
    if dtype != "bfloat16":
        return bits.astype(np.float32) if bits.dtype.kind == "f" else bits.view(_FLOATS[dtype]).astype(np.float32)
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrowed(values: np.ndarray, dtype: str, *, truncate: bool = False) -> np.ndarray:
    """Unsigned patterns of FP32 values in ``dtype``, rounded to nearest even, or (bfloat16) truncated. A NaN stays one."""
    if dtype != "bfloat16":
        return _patterns(values.astype(_FLOATS[dtype]))
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if truncate:
        return (bits >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _patterns(values: np.ndarray) -> np.ndarray:
    """The same elements as unsigned patterns, so that signed zeros and NaN are compared by their bits."""
    return np.ascontiguousarray(values).view(np.uint16 if values.itemsize == 2 else np.uint32)


_FLOATS = {"float16": np.float16, "float32": np.float32}
