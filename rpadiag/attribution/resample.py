"""Standard errors by leaving out one sequence at a time, and what a value and its error say about zero.

Tokens of a sequence share their context and their noise, so the sequence is the unit that is resampled, never the token. Everything
estimated here is a function of sums over sequences; leaving one out is then a subtraction, and several estimates that use the same
sums share their error as they must (the *joint* jackknife). With G sequences an error has G - 1 degrees of freedom, and Student's
distribution with as many decides what can be told from zero.

Shape legend: M rows of numbers, G sequences, R results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW_SEQUENCES = 8  # below this the errors themselves are uncertain by a quarter or more, and the report says so

Floats = NDArray[np.float64]
# Sums over sequences [M] or [M, G] in, results [R] or [R, G] out; element by element along the last axis.
OfSums = Callable[[Floats], Floats]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A value, its standard error in the same unit, and the error's degrees of freedom (sequences less one)."""

    value: float
    se: float
    dof: int

    @property
    def t(self) -> float:
        """Value over error: 0 where both vanish, and where the error is not known."""
        if self.se == 0.0:
            return 0.0 if self.value == 0.0 else math.copysign(math.inf, self.value)
        return self.value / self.se if math.isfinite(self.se) else 0.0

    @property
    def p_above(self) -> float:
        """One-sided p value of "not above zero"; 1 for an exact zero, and where the error is not known."""
        if not math.isfinite(self.se) or (self.se == 0.0 and self.value <= 0.0):
            return 1.0
        return student_tail(self.t, self.dof)

    @property
    def p_two_sided(self) -> float:
        """Two-sided p value of "is zero"."""
        return min(1.0, 2 * student_tail(abs(self.t), self.dof)) if self.t else 1.0

    def upper(self, level: float = 0.95) -> float:
        """One-sided upper confidence limit."""
        return self.value + student_quantile(level, self.dof) * self.se if math.isfinite(self.se) else math.inf


class Sequences:
    """Which sequence each token belongs to. sequence_ids: ``[num_tokens]``, any integers in any order."""

    def __init__(self, sequence_ids: NDArray[np.int64]) -> None:
        _, self._label, counts = np.unique(sequence_ids, return_inverse=True, return_counts=True)
        self._label = self._label.reshape(-1)
        self.num_tokens = len(self._label)
        self.counts: Floats = counts.astype(np.float64)

    def __len__(self) -> int:
        return len(self.counts)

    def sums(self, values: Floats) -> Floats:
        """Sum over the tokens of each sequence: ``[N]`` to ``[G]``, ``[K, N]`` to ``[K, G]``."""
        rows = np.atleast_2d(values)
        out: Floats = np.stack(
            [np.bincount(self._label, weights=row, minlength=len(self)).astype(np.float64) for row in rows]
        )
        return out[0] if values.ndim == 1 else out


def jackknife(function: OfSums, per_sequence: Floats) -> list[Measured]:
    """Results of ``function`` at the sums of ``per_sequence`` ``[M, G]``, each with its delete-one-sequence standard error.

    With one sequence the error is infinite. Cancellation in ``total - one`` is harmless: sums are of float64.
    """
    num = per_sequence.shape[1]
    total = per_sequence.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.atleast_1d(function(total))
        if num < 2:
            return [Measured(value=float(v), se=math.inf, dof=0) for v in value]
        left = np.atleast_2d(function(total[:, None] - per_sequence))
        spread = np.square(left - left.mean(axis=1, keepdims=True)).sum(axis=1)
    error = np.sqrt((num - 1) / num * spread)
    return [Measured(value=float(v), se=float(e), dof=num - 1) for v, e in zip(value, error, strict=True)]


def mean_over_tokens(values: Floats, sequences: Sequences) -> Measured:
    """Mean of ``values`` ``[N]`` over tokens, with its error over sequences."""
    return jackknife(lambda s: (s[0] / s[1])[None], np.stack([sequences.sums(values), sequences.counts]))[0]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values: at most ``level`` is the chance of any false alarm when parts at or below it are named.

    Family-wise, because one region named wrongly costs an engineer a day; and Holm, because it holds under any dependence, and the
    parts depend on one another (they share the reference forwards). The false discovery rate of Benjamini and Hochberg pays off
    for hundreds of parts, not for three to eighteen.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = np.ones(len(p_values))
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, (len(p_values) - rank) * p_values[i])
        adjusted[i] = min(1.0, running)
    return [float(a) for a in adjusted]


def student_tail(t: float, dof: int) -> float:
    """P(T > t) of Student's distribution with ``dof`` degrees of freedom; 0.5 at 0."""
    if dof < 1:
        return 1.0
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    half = 0.5 * _incomplete_beta(dof / 2, 0.5, dof / (dof + t * t))
    return half if t >= 0 else 1.0 - half


def student_quantile(level: float, dof: int) -> float:
    """t with P(T <= t) = ``level``, by bisection to 1e-10 relative."""
    if dof < 1:
        return math.inf
    if level < 0.5:
        return -student_quantile(1 - level, dof)
    low, high = 0.0, 1.0
    while student_tail(high, dof) > 1 - level:
        low, high = high, 2 * high
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, dof) > 1 - level else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b) by its continued fraction (DLMF 8.17.22, modified Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    tiny, c, d = 1e-300, 1.0, 0.0
    fraction = 1.0
    for i in range(1000):
        m = i // 2
        if i == 0:
            numerator = 1.0
        elif i % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 + numerator * d
        d = 1.0 / (d if abs(d) > tiny else tiny)
        c = 1.0 + numerator / (c if abs(c) > tiny else tiny)
        fraction *= c * d
        if abs(1.0 - c * d) < 1e-14:
            break
    return front * (fraction - 1.0) / a
