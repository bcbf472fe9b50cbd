"""From estimates to a decision per part, the number of replicates that would settle it, and when to stop.

A part is ``responsible`` when it has a systematic effect: its mean square is above zero, or its mean shift is not zero. The two are tested apart,
because a small bias of one sign shows in the mean long before it shows in the square, and paid for by doubling the smaller p value; then
Holm's adjusted p value has to be at most the level. Where a factorial design was asked for, its main effects are what is tested: the same question, averaged
over the state of the other parts, with a fraction of the error. Otherwise the question is
what could have been missed. Effects below a tenth of the total are not worth a replicate, so a part whose upper limit is below that is
``not distinguishable from zero``; for any other, the error is extrapolated to more replicates, and the answer is how many
would show an effect of that size four times out of five.

The stopping rule looks at the data after every round, and every look is a chance of a false alarm. It may stop only on overwhelming
evidence: looks are paid for with 0.01 of the level, divided by the number of looks and parts (Bonferroni), and the decision after
the last replicate with the remaining 0.04. A run without ``--precision`` looks once and decides at 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rpadiag.attribution.estimate import Estimate
from rpadiag.attribution.resample import Measured, holm, student_quantile

LEVEL = 0.05
LEVEL_OF_LOOKS = 0.01
POWER = 0.8
RELEVANT_SHARE = 0.1
MAX_MORE = 10_000

RESPONSIBLE = "responsible"
NOT_DISTINGUISHABLE = "not distinguishable from zero"
NEEDS_MORE = "needs about {} more replicates"
NOT_RANKED = "not ranked: a control failed"
Tested = tuple[Measured, Measured]  # mean square and mean shift of an effect

SATURATED = "saturated, only systematic effects shown"
VISIBLE = "visible end to end"
NO_EFFECT = "no effect at all"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is said of one part.

    word: RESPONSIBLE, NOT_DISTINGUISHABLE, NEEDS_MORE with its number, or NOT_RANKED. end_to_end: SATURATED, VISIBLE or NO_EFFECT: what mean |d| of
    single forwards could have shown. p, p_adjusted: one-sided p value of "not above zero", alone and after Holm. upper_limit: one-sided 95 %
    limit of the systematic part, nats^2. more_replicates: about how many more would settle it; None where it is settled, or where they would not.
    """

    word: str
    end_to_end: str
    p: float
    p_adjusted: float
    upper_limit: float
    evidence: str = "square"
    more_replicates: int | None = None

    @property
    def responsible(self) -> bool:
        return self.word == RESPONSIBLE


def decide(
    each: Mapping[str, Estimate],
    total: Estimate,
    control: Estimate,
    *,
    ranked: bool,
    end_to_end: Mapping[str, str],
    level: float = LEVEL,
    mains: Mapping[str, Tested] | None = None,
) -> dict[str, Decision]:
    """A decision per part. each: part -> estimate with this part alone not aligned; total: none aligned; control: the reference against itself.

    mains: part -> (systematic_sq, mean shift) of its main effect, which is then what is tested.
    """
    tested = mains or {name: (e.systematic_sq, e.mean_shift) for name, e in each.items()}
    p_values = {name: p_of_no_effect(*tested[name]) for name in each}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    relevant = RELEVANT_SHARE * total.systematic_sq.value if total.systematic_sq.p_above <= level else math.inf
    half = level / 2 / len(each)  # what one test of one part has, Holm's first step
    out = {}
    for name, e in each.items():
        square, shift = tested[name]
        more = None
        if not ranked:
            word = NOT_RANKED
        elif adjusted[name] <= level:
            word = RESPONSIBLE
        else:
            word, more = _undecided(square, e, control, relevant, half)
        evidence = "shift" if shift.p_two_sided < square.p_above else "square"
        out[name] = Decision(
            word=word,
            end_to_end=end_to_end[name],
            p=p_values[name],
            p_adjusted=adjusted[name],
            upper_limit=square.upper(),
            evidence=f"main {evidence}" if mains else evidence,
            more_replicates=more,
        )
    return out


def p_of_no_effect(square: Measured, shift: Measured) -> float:
    """p value of "neither the mean square nor the mean is systematic": twice the smaller of the two, at most 1."""
    return min(1.0, 2 * min(square.p_above, shift.p_two_sided))


def _undecided(
    square: Measured, e: Estimate, control: Estimate, relevant: float, level: float
) -> tuple[str, int | None]:
    """The word for a part that is not above zero: settled, or so many more replicates. relevant: infinite where the total is not above zero."""
    if square.upper() < relevant < math.inf or (math.isinf(relevant) and square.value <= square.se):
        return NOT_DISTINGUISHABLE, None
    effect = square.value if math.isinf(relevant) else max(square.value, relevant)
    sharper = (
        e.systematic_sq.se / square.se if square.se else 1.0
    )  # a main effect has a smaller error than one part alone
    needed = replicates_to_show(effect * sharper, e, control, level=level)
    if needed is None or needed - e.num_replicates > MAX_MORE:
        return NOT_DISTINGUISHABLE, None
    more = max(1, needed - e.num_replicates)
    return NEEDS_MORE.format(more), more


def replicates_to_show(effect: float, e: Estimate, control: Estimate, *, level: float) -> int | None:
    """Replicates with which a systematic part of ``effect`` nats^2 would be found with probability POWER at ``level``.

    None where no number of replicates is enough, because the error is made of differences between sequences.
    """
    if effect <= 0.0 or e.num_sequences < 2:
        return None
    dof = e.systematic_sq.dof
    needed_t = student_quantile(1 - level, dof) + student_quantile(POWER, dof)
    error = _ErrorModel(e, control)
    if effect < needed_t * error.at(None):
        return None
    low, high = e.num_replicates, e.num_replicates
    while effect < needed_t * error.at(high):
        low, high = high, 2 * high
        if high > 100 * MAX_MORE:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if effect < needed_t * error.at(middle) else (low, middle)
    return high


class _ErrorModel:
    """Standard error of a systematic part as a function of the number of replicates.

    The estimator's variance over noise is ``4 b^2 s^2 / K + 2 s^4 / (K (K - 1))`` per token (s^2: variance of D over replicates). Tokens of a sequence
    share noise; the self-control, which has no effect, shows by which factor that raises the variance. What is left of the
    observed variance is between sequences, and stays.
    """

    def __init__(self, e: Estimate, control: Estimate) -> None:
        self._n = float(e.sums["tokens"].sum())
        self._linear = max(float(e.sums["noise_linear"].sum()) / self._n, 0.0)
        self._quadratic = float(e.sums["noise_quadratic"].sum()) / self._n
        own = control.num_replicates
        expected = float(control.sums["noise_quadratic"].sum()) / self._n / (own * (own - 1) * self._n)
        self._factor = max(1.0, control.systematic_sq.se**2 / expected) if expected > 0 else 1.0
        self._between = max(0.0, e.systematic_sq.se**2 - self._noise(e.num_replicates))

    def _noise(self, num: int) -> float:
        return self._factor * (self._linear / num + self._quadratic / (num * (num - 1))) / self._n

    def at(self, num: int | None) -> float:
        """Expected standard error with ``num`` replicates; None is infinitely many."""
        return math.sqrt(self._between + (0.0 if num is None else self._noise(num)))


def precise_enough(each: Mapping[str, Estimate], precision: float, *, num_looks: int) -> bool:
    """Whether the strongest part's error is at most ``precision`` of it, and its evidence is worth a look's share of the level."""
    strongest = max(each.values(), key=lambda e: e.systematic_sq.value).systematic_sq
    return (
        bool(np.isfinite(strongest.se))
        and strongest.se <= precision * strongest.value
        and 2 * strongest.p_above * num_looks * len(each) <= LEVEL_OF_LOOKS
    )
