"""What is kept of the sequences while they stream past, so that their faults can be recognised afterwards.

A few numbers for each sequence, sums over all tokens, and the few sequences furthest apart whole. Shape legend: S sequences, M scored
tokens of a batch.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.rollouts.batch import Batch, Misfit

LAGS = (-2, -1, 1, 2)
EARLY = 64  # tokens of a sequence whose mean |d| is kept by their place in it
WORST_KEPT = 24
MIN_WORST_TOKENS = 12
FAR = 0.3  # nats: mean |d| of a sequence worth keeping whole
# Middle of p and q, in nats, that tokens are sorted by for signs: certain, likely, unlikely. The middle, because sorting by
# either side alone would make the other look higher or lower than it is.
BINS = (-0.1, -2.0)
ABOVE_ZERO = 0.1  # nats; a log-softmax taken in bfloat16 ends up a few hundredths above 0
CERTAIN = (1e-4, 0.3)  # probability that is left to other tokens, of tokens that say what temperature is

Floats = NDArray[np.float64]


@dataclass(kw_only=True)
class Line:
    """Sums of a straight line through points (x, y)."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: Floats, y: Floats) -> None:
        self.n += len(x)
        self.x += float(x.sum())
        self.y += float(y.sum())
        self.xx += float(x @ x)
        self.yy += float(y @ y)
        self.xy += float(x @ y)

    def slope(self) -> tuple[float, float]:
        """(slope, correlation); NaN where there are too few points.

        Between the two regressions, of y on x and of x on y, the one that is closer to 1 is taken: scatter makes the other too steep.
        """
        if self.n < 3:
            return float("nan"), float("nan")
        xx, yy = self.xx - self.x**2 / self.n, self.yy - self.y**2 / self.n
        xy = self.xy - self.x * self.y / self.n
        if xx <= 0 or yy <= 0:
            return float("nan"), float("nan")
        return float(min(xy / xx, yy / xy, key=lambda b: abs(np.log(abs(b))))) if xy else 0.0, float(
            xy / np.sqrt(xx * yy)
        )


@dataclass(kw_only=True)
class Bin:
    """Tokens of one range of probability: how many have q above p, how many below, and the sum of q - p."""

    n: int = 0
    above: int = 0
    below: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, up: Floats) -> None:
        self.n += len(up)
        self.above += int(np.count_nonzero(up > 0))
        self.below += int(np.count_nonzero(up < 0))
        self.total += float(up.sum())
        self.squares += float(up @ up)

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else float("nan")

    @property
    def deviations(self) -> float:
        """The mean in its own standard errors."""
        if self.n < 2:
            return 0.0
        variance = self.squares / self.n - self.mean**2
        return self.mean / float(np.sqrt(max(variance, 1e-300) / self.n))


@dataclass(kw_only=True)
class Extent:
    """How far one side's values reach, and how many are above 0 by more than rounding."""

    num_above: int = 0
    least: float = float("inf")
    largest: float = float("-inf")

    def add(self, values: Floats) -> None:
        self.num_above += int(np.count_nonzero(values > ABOVE_ZERO))
        self.least = min(self.least, float(values.min()))
        self.largest = max(self.largest, float(values.max()))


@dataclass(frozen=True, kw_only=True)
class Worst:
    """A sequence far apart, whole: scored tokens only."""

    sequence: int
    p: Floats
    q: Floats


@dataclass(kw_only=True)
class Observed:
    """Everything the faults are recognised from; see :mod:`rpadiag.rollouts.faults`."""

    num_sequences: int = 0
    num_tokens: int = 0
    misfits: list[Misfit] = field(default_factory=list)
    other_ids: list[tuple[int, str, str]] = field(default_factory=list)  # sequence, kind, words
    num_compared_ids: int = 0
    starts_twice: dict[int, int] = field(default_factory=dict)  # token -> sequences that start with it twice
    positions_count_padding: list[tuple[int, int]] = field(default_factory=list)  # sequence, padding
    num_padded: int = 0
    parts: list[dict[str, NDArray[Any]]] = field(default_factory=list)  # columns by sequence
    prompts: list[bytes] = field(default_factory=list)
    early_abs: Floats = field(default_factory=lambda: np.zeros(EARLY + 1))
    early_n: Floats = field(default_factory=lambda: np.zeros(EARLY + 1))
    certain: Line = field(default_factory=Line)
    bins: tuple[Bin, Bin, Bin] = field(default_factory=lambda: (Bin(), Bin(), Bin()))
    sampled_away: Bin = field(default_factory=Bin)  # tokens with q exactly 0: p of them
    least_p_of_zero_q: float = 0.0
    zero_q: list[tuple[int, int]] = field(
        default_factory=list
    )  # sequence, position of tokens whose q is 0 and p is far below
    extents: dict[str, Extent] = field(default_factory=lambda: {"trainer": Extent(), "rollout": Extent()})
    num_zero_q: int = 0
    num_zero_p: int = 0
    worst: list[tuple[float, int, Worst]] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        self.num_sequences += batch.num_sequences
        self.misfits += batch.misfits
        self._add_ids(batch)
        self.prompts += [_digest(batch.prompt_ids(i)) for i in range(batch.num_sequences)]
        if batch.p is None:
            return
        p, q = batch.p.astype(np.float64), batch.q.astype(np.float64)
        finite = np.isfinite(p) & np.isfinite(q)
        row = batch.row[finite]
        self._add_scored(batch, row, batch.position[finite], p[finite], q[finite])

    def _add_ids(self, batch: Batch) -> None:
        starts, ids = batch.starts, batch.ids
        long = np.flatnonzero(np.diff(starts) >= 2)
        twice = long[ids[starts[long]] == ids[starts[long] + 1]]
        for token, count in zip(*np.unique(ids[starts[twice]], return_counts=True), strict=True):
            self.starts_twice[int(token)] = self.starts_twice.get(int(token), 0) + int(count)
        for i, other in enumerate(batch.rollout_ids):
            if other is not None:
                self.num_compared_ids += 1
                found = _other_ids(ids[starts[i] : starts[i + 1]], other)
                if found is not None:
                    self.other_ids.append((batch.first + i, *found))
        if batch.first_position is not None:
            padded = np.flatnonzero(batch.padding > 0)
            self.num_padded += len(padded)
            counting = padded[batch.first_position[padded] == batch.padding[padded]]
            self.positions_count_padding += [(batch.first + int(i), int(batch.padding[i])) for i in counting[:1000]]

    def _add_scored(
        self, batch: Batch, row: NDArray[np.int64], position: NDArray[np.int64], p: Floats, q: Floats
    ) -> None:
        if not len(p):
            return
        self.extents["trainer"].add(p)
        self.extents["rollout"].add(q)
        d = p - q
        abs_d = np.abs(d)
        starts = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
        rows = row[starts]
        n = np.diff(np.concatenate((starts, [len(row)])))
        with np.errstate(over="ignore"):
            excess = np.expm1(np.minimum(d, 20.0))
        part: dict[str, NDArray[Any]] = {
            "sequence": batch.first + rows, "n": n, "padding": batch.padding[rows],
            "d": np.add.reduceat(d, starts), "abs_d": np.add.reduceat(abs_d, starts), "sq_d": np.add.reduceat(d * d, starts),
            "excess": np.add.reduceat(excess, starts),
            **{k: v[rows] for k, v in batch.scalars.items()},
        }  # fmt: skip
        for lag in LAGS:
            total, count = _lagged(p, q, starts, n, lag)
            part[f"lag{lag}"], part[f"lag_n{lag}"] = total, count
        self.parts.append(part)
        self.num_tokens += len(p)
        self._add_early(abs_d, starts, n)
        self._add_signs(row + batch.first, position, p, q, d)
        self._keep_worst(part, starts, p, q)

    def _add_early(self, abs_d: Floats, starts: NDArray[np.int64], n: NDArray[np.int64]) -> None:
        index = np.minimum(np.arange(len(abs_d)) - np.repeat(starts, n), EARLY)
        self.early_abs += np.bincount(index, weights=abs_d, minlength=EARLY + 1)
        self.early_n += np.bincount(index, minlength=EARLY + 1)

    def _add_signs(
        self, sequence: NDArray[np.int64], position: NDArray[np.int64], p: Floats, q: Floats, d: Floats
    ) -> None:
        middle = (p + q) / 2
        chosen = np.where(middle > BINS[0], 0, np.where(middle > BINS[1], 1, 2))
        for k, one in enumerate(self.bins):
            one.add(-d[chosen == k])
        self.num_zero_p += int(np.count_nonzero(p == 0))
        zero = q == 0
        if zero.any():
            self.num_zero_q += int(np.count_nonzero(zero))
            below = zero & (p < -1e-3)
            self.sampled_away.add(-d[below])
            missing = np.flatnonzero(zero & (p < -3.0))
            self.zero_q += [(int(sequence[i]), int(position[i])) for i in missing[:1000]]
            known = p[below & (p >= -3.0)]
            self.least_p_of_zero_q = (
                min(self.least_p_of_zero_q, float(known.min())) if len(known) else self.least_p_of_zero_q
            )
        left_p, left_q = -np.expm1(p), -np.expm1(q)
        certain = (np.minimum(left_p, left_q) > CERTAIN[0]) & (np.maximum(left_p, left_q) < CERTAIN[1])
        if certain.any():
            self.certain.add(np.log(left_q[certain]), np.log(left_p[certain]))

    def _keep_worst(self, part: dict[str, NDArray[Any]], starts: NDArray[np.int64], p: Floats, q: Floats) -> None:
        mean = part["abs_d"] / part["n"]
        for i in np.flatnonzero((mean > FAR) & (part["n"] >= MIN_WORST_TOKENS)):
            if len(self.worst) == WORST_KEPT and mean[i] <= self.worst[0][0]:
                continue
            at = slice(int(starts[i]), int(starts[i] + part["n"][i]))
            sequence = int(part["sequence"][i])
            kept = (float(mean[i]), -sequence, Worst(sequence=sequence, p=p[at].copy(), q=q[at].copy()))
            if len(self.worst) < WORST_KEPT:
                heapq.heappush(self.worst, kept)
            else:
                heapq.heapreplace(self.worst, kept)

    def columns(self) -> dict[str, Floats]:
        """Columns by sequence, over all batches; empty arrays before any token."""
        if not self.parts:
            names = (
                "sequence",
                "n",
                "padding",
                "d",
                "abs_d",
                "sq_d",
                "excess",
                *(f"lag{k}" for k in LAGS),
                *(f"lag_n{k}" for k in LAGS),
            )
            return {name: np.zeros(0) for name in names}
        return {k: np.concatenate([part[k] for part in self.parts]).astype(np.float64) for k in self.parts[0]}


def _digest(ids: NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=8).digest()


def _lagged(
    p: Floats, q: Floats, starts: NDArray[np.int64], n: NDArray[np.int64], lag: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Sum of |p[t] - q[t + lag]| inside each sequence, and how many such pairs it has."""
    moved = np.zeros(len(p))
    if len(p) > abs(lag):
        if lag > 0:
            moved[:-lag] = np.abs(p[:-lag] - q[lag:])
        else:
            moved[-lag:] = np.abs(p[-lag:] - q[:lag])
    index = np.arange(len(p)) - np.repeat(starts, n)
    room = np.repeat(n, n)
    inside = (index + lag >= 0) & (index + lag < room)
    return np.add.reduceat(np.where(inside, moved, 0.0), starts), np.maximum(n - abs(lag), 0)


def _other_ids(ids: NDArray[np.int64], other: NDArray[np.int64]) -> tuple[str, str] | None:
    """(kind, words) of how the rollout engine's ids differ from the trainer's; None when they do not."""
    if np.array_equal(ids, other):
        return None
    for longer, shorter, who in ((other, ids, "rollout engine"), (ids, other, "trainer")):
        if (
            len(longer) == len(shorter) + 1
            and len(shorter)
            and np.array_equal(longer[1:], shorter)
            and longer[0] == longer[1]
        ):
            return "double-bos", f"the {who}'s tokens begin with {int(longer[0])} twice, the other side's once"
    size = min(len(ids), len(other))
    differing = np.flatnonzero(ids[:size] != other[:size])
    first = int(differing[0]) if len(differing) else size
    return (
        "retokenised",
        f"{len(ids)} tokens for the trainer, {len(other)} for the rollout engine, the first other one at index {first}",
    )
