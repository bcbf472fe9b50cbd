"""What the logprob metrics of :mod:`rpadiag.compare.metrics` are computed from: sums that can be added up.

Ten million tokens need not be in memory for their metrics to be known. Tokens go in by the chunk, two sums of disjoint
tokens merge with ``+``, and means and variances merge by Chan, Golub and LeVeque's pairwise update, so that the order
of chunks changes the last digits at most. Sums by sequence are kept as seven numbers for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpadiag.errors import NotComparableError

CLIP_RANGE = (0.8, 1.2)  # the usual PPO clipping range of rho
SERIES_BELOW = 1e-3  # |d| under which exp(d) - 1 - d loses digits and its series is used

Floats = NDArray[np.float64]


def k3(d: Floats, excess: Floats | None = None) -> Floats:
    """exp(d) - 1 - d without cancellation: its own series where |d| < 1e-3 (truncation below 1e-15 relative).

    excess: exp(d) - 1 where that is known already.
    """
    with np.errstate(over="ignore"):
        direct = (np.expm1(d) if excess is None else excess) - d
    series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    return np.where(np.abs(d) < SERIES_BELOW, series, direct)


@dataclass(kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of one number per token; ``+`` merges disjoint tokens."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, x: Floats) -> Moments:
        if not x.size:
            return cls()
        mean = float(np.mean(x))
        return cls(n=int(x.size), mean=mean, squares=float(np.sum((x - mean) ** 2)))

    def __add__(self, other: Moments) -> Moments:
        n = self.n + other.n
        if not self.n or not other.n:
            return other if not self.n else self
        step = other.mean - self.mean
        return Moments(
            n=n,
            mean=self.mean + step * other.n / n,
            squares=self.squares + other.squares + step * step * self.n * other.n / n,
        )


@dataclass(kw_only=True)
class SequenceSums:
    """Sums over the tokens of each sequence, one row a sequence, in the order of ``ids`` (which do not repeat).

    ids [S]; num_tokens [S]; sum_p, sum_q, sum_d, sum_abs_d, sum_k3, max_abs_d [S] in nats. ``sum_d`` is of d itself,
    not a difference of sums.
    """

    ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    sum_p: Floats
    sum_q: Floats
    sum_d: Floats
    sum_abs_d: Floats
    sum_k3: Floats
    max_abs_d: Floats

    @classmethod
    def of(cls, ids: NDArray[np.int64], p: Floats, q: Floats, d: Floats, abs_d: Floats, d_k3: Floats) -> SequenceSums:
        if not len(ids):
            none = np.zeros(0)
            count = np.zeros(0, np.int64)
            return cls(ids=count, num_tokens=count, sum_p=none, sum_q=none, sum_d=none, sum_abs_d=none, sum_k3=none, max_abs_d=none)  # fmt: skip
        if np.any(ids[1:] < ids[:-1]):
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            p, q, d, abs_d, d_k3 = (x[order] for x in (p, q, d, abs_d, d_k3))
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        return cls(
            ids=ids[starts],
            num_tokens=np.diff(np.concatenate((starts, [len(ids)]))),
            sum_p=np.add.reduceat(p, starts),
            sum_q=np.add.reduceat(q, starts),
            sum_d=np.add.reduceat(d, starts),
            sum_abs_d=np.add.reduceat(abs_d, starts),
            sum_k3=np.add.reduceat(d_k3, starts),
            max_abs_d=np.maximum.reduceat(abs_d, starts),
        )

    @classmethod
    def joined(cls, parts: Sequence[SequenceSums]) -> SequenceSums:
        """One table of several; a sequence that several of them hold becomes one row."""
        every = np.concatenate([part.ids for part in parts])
        counts = np.concatenate([part.num_tokens for part in parts])
        columns = {n: np.concatenate([getattr(part, n) for part in parts]) for n in (*_SUMMED, "max_abs_d")}
        ids, inverse = np.unique(every, return_inverse=True)
        if len(ids) == len(every):
            order = np.argsort(every, kind="stable")
            return cls(ids=ids, num_tokens=counts[order], **{n: x[order] for n, x in columns.items()})
        largest = np.zeros(len(ids))
        np.maximum.at(largest, inverse, columns["max_abs_d"])

        def total(x: NDArray[Any]) -> Floats:
            return np.bincount(inverse, weights=x, minlength=len(ids)).astype(np.float64)

        return cls(
            ids=ids,
            num_tokens=total(counts).astype(np.int64),
            max_abs_d=largest,
            **{n: total(columns[n]) for n in _SUMMED},
        )


_SUMMED = ("sum_p", "sum_q", "sum_d", "sum_abs_d", "sum_k3")


@dataclass(kw_only=True)
class MetricSums:
    """Everything the metrics need of the tokens seen so far. Add chunks with :meth:`add`, other sums with ``+``.

    num_nonfinite: tokens left out because p or q is NaN or infinite. excess: moments of rho - 1, and ratio of rho
    itself: the first keeps its digits where rho is close to 1, the second where it is close to 0. gap: moments of
    |exp(p) - exp(q)|. prob_p, prob_q: moments of exp(p) and exp(q), prob_pq: sum of the products of their deviations.
    """

    num_nonfinite: int = 0
    num_exact: int = 0
    num_outside: int = 0
    num_argmax: int = 0
    num_flips: int = 0
    abs_d: Moments = field(default_factory=Moments)
    sum_sq_d: float = 0.0
    sum_d: float = 0.0
    sum_k3: float = 0.0
    sum_chi2: float = 0.0
    max_d: float = -math.inf
    min_d: float = math.inf
    max_gap: float = 0.0
    excess: Moments = field(default_factory=Moments)
    ratio: Moments = field(default_factory=Moments)
    gap: Moments = field(default_factory=Moments)
    prob_p: Moments = field(default_factory=Moments)
    prob_q: Moments = field(default_factory=Moments)
    prob_pq: float = 0.0
    parts: list[SequenceSums] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.abs_d.n

    def add(
        self,
        p: ArrayLike,
        q: ArrayLike,
        *,
        sequence_ids: ArrayLike,
        p_argmax: ArrayLike | None = None,
        q_argmax: ArrayLike | None = None,
    ) -> MetricSums:
        """Add tokens; arguments as in :func:`rpadiag.compare.metrics.logprob_metrics`. Returns itself."""
        p64, q64 = np.asarray(p, np.float64).reshape(-1), np.asarray(q, np.float64).reshape(-1)
        ids = np.asarray(sequence_ids).reshape(-1).astype(np.int64, copy=False)
        if not len(p64) == len(q64) == len(ids):
            raise NotComparableError(
                f"trainer scored {len(p64)} tokens and the rollout engine {len(q64)} ({len(ids)} sequence ids)"
            )
        finite = np.isfinite(p64) & np.isfinite(q64)
        self._add_flips(p_argmax, q_argmax, finite)
        if not finite.all():
            self.num_nonfinite += int(np.count_nonzero(~finite))
            p64, q64, ids = p64[finite], q64[finite], ids[finite]
        if p64.size:
            with np.errstate(over="ignore", invalid="ignore"):
                self._add_finite(p64, q64, ids)
        return self

    def _add_finite(self, p: Floats, q: Floats, ids: NDArray[np.int64]) -> None:
        d = p - q
        abs_d, excess, prob_q = np.abs(d), np.expm1(d), np.exp(q)
        d_k3, prob_p = k3(d, excess), np.exp(p)
        gap = np.abs(prob_q * excess)
        low, high = np.log(CLIP_RANGE)
        self.num_exact += int(np.count_nonzero(d == 0))
        self.num_outside += int(np.count_nonzero((d < low) | (d > high)))
        self.sum_sq_d += float(d @ d)
        self.sum_d += float(np.sum(d))
        self.sum_k3 += float(np.sum(d_k3))
        self.sum_chi2 += float(np.sum(excess * (excess + 2)))
        self.max_d, self.min_d = max(self.max_d, float(d.max())), min(self.min_d, float(d.min()))
        self.max_gap = max(self.max_gap, float(gap.max()))
        self.abs_d += Moments.of(abs_d)
        self.excess += Moments.of(excess)
        self.ratio += Moments.of(np.exp(d))
        self.gap += Moments.of(gap)
        self._add_probabilities(prob_p, prob_q)
        self.parts.append(SequenceSums.of(ids, p, q, d, abs_d, d_k3))

    def _add_probabilities(self, prob_p: Floats, prob_q: Floats) -> None:
        of_p, of_q = Moments.of(prob_p), Moments.of(prob_q)
        cross = float((prob_p - of_p.mean) @ (prob_q - of_q.mean))
        self._merge_probabilities(of_p, of_q, cross)

    def _merge_probabilities(self, of_p: Moments, of_q: Moments, cross: float) -> None:
        n, m = self.prob_p.n, of_p.n
        if n and m:
            cross += (of_p.mean - self.prob_p.mean) * (of_q.mean - self.prob_q.mean) * n * m / (n + m)
        self.prob_pq += cross
        self.prob_p += of_p
        self.prob_q += of_q

    def _add_flips(self, p_argmax: ArrayLike | None, q_argmax: ArrayLike | None, finite: NDArray[np.bool_]) -> None:
        if p_argmax is None or q_argmax is None:
            return
        a, b = np.asarray(p_argmax).reshape(-1), np.asarray(q_argmax).reshape(-1)
        if not len(a) == len(b) == len(finite):
            raise NotComparableError(f"{len(a)} and {len(b)} most likely tokens for {len(finite)} scored tokens")
        self.num_argmax += int(np.count_nonzero(finite))
        self.num_flips += int(np.count_nonzero(a[finite] != b[finite]))

    def __add__(self, other: MetricSums) -> MetricSums:
        """Sums over both, which must be of different tokens. Neither is changed."""
        out = MetricSums(
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
            num_exact=self.num_exact + other.num_exact,
            num_outside=self.num_outside + other.num_outside,
            num_argmax=self.num_argmax + other.num_argmax,
            num_flips=self.num_flips + other.num_flips,
            abs_d=self.abs_d + other.abs_d,
            sum_sq_d=self.sum_sq_d + other.sum_sq_d,
            sum_d=self.sum_d + other.sum_d,
            sum_k3=self.sum_k3 + other.sum_k3,
            sum_chi2=self.sum_chi2 + other.sum_chi2,
            max_d=max(self.max_d, other.max_d),
            min_d=min(self.min_d, other.min_d),
            max_gap=max(self.max_gap, other.max_gap),
            excess=self.excess + other.excess,
            ratio=self.ratio + other.ratio,
            gap=self.gap + other.gap,
            prob_p=self.prob_p,
            prob_q=self.prob_q,
            prob_pq=self.prob_pq,
            parts=[*self.parts, *other.parts],
        )
        out._merge_probabilities(other.prob_p, other.prob_q, other.prob_pq)
        return out

    def sequences(self) -> SequenceSums:
        """Sums by sequence, in order of sequence id."""
        if len(self.parts) != 1:
            none = np.zeros(0)
            empty = SequenceSums.of(np.zeros(0, np.int64), none, none, none, none, none)
            self.parts = [SequenceSums.joined(self.parts or [empty])]
        return self.parts[0]
