"""What has to hold before an attribution is believed: the control, the noise, the sum of the parts, a second kind of noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.decide import NO_EFFECT, SATURATED, VISIBLE
from rpadiag.attribution.estimate import Estimate, unbiased_square
from rpadiag.attribution.resample import Measured, Sequences, jackknife, mean_over_tokens

CONTROL_P = 0.0027  # three standard errors of a normal distribution
SATURATED_SHARE = 0.7
ENOUGH_SPREAD = (
    0.9  # m distinct draws have 1 - 1/m of the variance of many: below this the second kind has fewer than ten
)

Floats = NDArray[np.float64]


def self_control_holds(control: Estimate) -> bool:
    """The reference against itself under other noise must be zero, in square and in mean, within three standard errors; and there must be one."""
    known = bool(np.isfinite(control.systematic_sq.se))
    return known and all(m.p_two_sided > CONTROL_P for m in (control.systematic_sq, control.mean_shift))


def end_to_end_of(each: Mapping[str, Estimate], total: Estimate) -> dict[str, str]:
    """What mean |d| of single forwards could show of each part.

    It is saturated where leaving out one part, whichever of several, gives nearly the whole gap: any difference moves every logprob as far as all together.
    """
    limit = SATURATED_SHARE * total.mean_abs_d.value
    large = [name for name, e in each.items() if not e.is_zero and e.mean_abs_d.value >= limit]
    words = {}
    for name, e in each.items():
        if e.is_zero:
            words[name] = NO_EFFECT
        else:
            words[name] = SATURATED if name in large and len(large) > 1 else VISIBLE
    return words


@dataclass(frozen=True, kw_only=True)
class NoiseCheck:
    """Whether the perturbation itself moves logprobs one way: the perturbed trainer's mean against the same trainer unperturbed.

    mean_shift: mean over tokens of (mean over replicates - unperturbed), nats. spread_ratio: mean square of that difference over
    what the spread of the replicates predicts; 1 where the unperturbed forward is one draw like the others.
    """

    variant: str
    mean_shift: Measured
    spread_ratio: Measured

    @property
    def holds(self) -> bool:
        return self.mean_shift.p_two_sided > CONTROL_P


def check_noise(name: str, perturbed: Floats, unperturbed: Floats, sequences: Sequences) -> NoiseCheck:
    """perturbed: ``[K, N]``, unperturbed: ``[N]``, logprobs of one trainer."""
    away = perturbed.mean(axis=0) - unperturbed
    expected = perturbed.var(axis=0, ddof=1) * (1 + 1 / len(perturbed))
    both = np.stack([sequences.sums(np.square(away)), sequences.sums(expected)])
    return NoiseCheck(
        variant=name,
        mean_shift=mean_over_tokens(away, sequences),
        spread_ratio=jackknife(lambda s: (s[0] / s[1])[None], both)[0],
    )


@dataclass(frozen=True, kw_only=True)
class Additivity:
    """Whether the parts make the whole. ``gap`` is the sum of the parts less the whole, with its joint error.

    of squares: systematic_sq, which add up where the parts' effects on a token are unrelated. of shifts: mean_shift, which add up where
    effects on a token do. beyond: unbiased mean square of b_all - sum of b_part over tokens, nats^2: what no part has alone.
    """

    sum_of_squares: Measured
    whole_square: Measured
    gap_of_squares: Measured
    gap_of_shifts: Measured
    beyond: Measured

    @property
    def holds(self) -> bool:
        return all(m.p_two_sided > CONTROL_P for m in (self.gap_of_squares, self.gap_of_shifts))


def check_additivity(
    each: Mapping[str, Floats], everything: Floats, reference: Floats, sequences: Sequences
) -> Additivity:
    """each: part -> logprobs ``[K, N]`` with this part alone not aligned; everything: none aligned."""
    differences = [x - reference for x in each.values()]
    whole = everything - reference
    rows = [
        sum(sequences.sums(unbiased_square(d)) for d in differences),
        sequences.sums(unbiased_square(whole)),
        sum(sequences.sums(d.mean(axis=0)) for d in differences),
        sequences.sums(whole.mean(axis=0)),
        sequences.sums(unbiased_square(whole - np.sum(differences, axis=0))),
    ]

    def results(s: Floats) -> Floats:
        n = s[-1]
        return np.stack([s[0] / n, s[1] / n, (s[0] - s[1]) / n, (s[2] - s[3]) / n, s[4] / n])

    found = jackknife(results, np.stack([*rows, sequences.counts]))
    names = ("sum_of_squares", "whole_square", "gap_of_squares", "gap_of_shifts", "beyond")
    return Additivity(**dict(zip(names, found, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The same part under the second kind of noise.

    first, second: systematic_sq under each. shared: mean over tokens of the product of the two systematic differences, which both kinds
    have in common; equal to ``first`` when they see the same thing. Noise of few distinct draws leaves chaos unaveraged, which
    raises ``second`` and not ``shared``; spread, the variance of the second kind over that of the first, is then below 1.
    gap: shared less first. rest: second less shared. correlation: shared / sqrt(first * second), NaN where one is not above zero.
    changes_nothing: the second kind moves no logprob of this part or of the reference, so it confirms nothing.
    """

    name: str
    first: Measured
    second: Measured
    shared: Measured
    gap: Measured
    rest: Measured
    correlation: Measured
    spread: float
    changes_nothing: bool

    @property
    def agrees(self) -> bool:
        """What the first kind sees is shared; and the second sees nothing more, unless its draws are too few to tell."""
        more = self.rest.p_two_sided <= CONTROL_P and self.spread >= ENOUGH_SPREAD
        return not self.changes_nothing and self.gap.p_two_sided > CONTROL_P and not more


def confirm(
    name: str, first: tuple[Floats, Floats], second: tuple[Floats, Floats], sequences: Sequences
) -> Confirmation:
    """first, second: (variant, reference) logprobs ``[K, N]`` under each kind of noise."""
    a, b = first[0] - first[1], second[0] - second[1]
    rows = [unbiased_square(a), unbiased_square(b), a.mean(axis=0) * b.mean(axis=0)]

    def results(s: Floats) -> Floats:
        n = s[-1]
        scale = np.where((s[0] > 0) & (s[1] > 0), np.abs(s[0] * s[1]), np.nan)
        return np.stack([s[0] / n, s[1] / n, s[2] / n, (s[2] - s[0]) / n, (s[1] - s[2]) / n, s[2] / np.sqrt(scale)])

    found = jackknife(results, np.stack([*(sequences.sums(r) for r in rows), sequences.counts]))
    names = ("first", "second", "shared", "gap", "rest", "correlation")
    noise = [sum(float(x.var(axis=0, ddof=1).mean()) for x in pair) for pair in (first, second)]
    return Confirmation(
        name=name,
        **dict(zip(names, found, strict=True)),
        spread=noise[1] / noise[0] if noise[0] else float("nan"),
        changes_nothing=any(not np.ptp(x, axis=0).any() for x in second),
    )


@dataclass(frozen=True, kw_only=True)
class LocalAgreement:
    """The first-order effect g that local evidence predicts for a part, beside the systematic effect b that the replicates see.

    predicted_sq: E[g^2] over tokens, nats^2, unbiased where draws of g are given. seen: E[b^2]. shared: E[g b], which equals E[b^2] where the
    prediction is right, whatever noise of its own g has. gap: shared less seen. slope: E[g b] / E[g^2], the part of the prediction that the
    replicates see; noise in a single g lowers it. excess: E[g^2] less shared, None without draws.
    """

    name: str
    predicted_sq: Measured
    seen: Measured
    shared: Measured
    gap: Measured
    slope: Measured
    excess: Measured | None

    @property
    def agrees(self) -> bool:
        """What the replicates see is predicted, within three standard errors; with draws of g also that nothing more is predicted."""
        tests = [self.gap] if self.excess is None else [self.gap, self.excess]
        return all(m.p_two_sided > CONTROL_P for m in tests)


def compare_with_local(
    name: str, predicted: Floats, variant: Floats, reference: Floats, sequences: Sequences
) -> LocalAgreement:
    """predicted: first-order change of each logprob when the part is not aligned (variant less reference), nats, ``[N]``, or independent
    draws of it ``[D, N]``. The rounding of one forward is noise in g, and so it is, smaller, in the mean of few draws.
    """
    draws = np.atleast_2d(predicted)
    mean_g = draws.mean(axis=0)
    square_g = unbiased_square(draws) if len(draws) > 1 else np.square(mean_g)
    difference = variant - reference
    rows = [square_g, unbiased_square(difference), mean_g * difference.mean(axis=0)]

    def results(s: Floats) -> Floats:
        g, b, shared = s[:3] / s[-1]
        return np.stack([g, b, shared, shared - b, s[2] / s[0], g - shared])

    found = jackknife(results, np.stack([*(sequences.sums(r) for r in rows), sequences.counts]))
    names = ("predicted_sq", "seen", "shared", "gap", "slope", "excess")
    fields: dict[str, Any] = dict(zip(names, found, strict=True))
    return LocalAgreement(name=name, **fields | ({"excess": None} if len(draws) == 1 else {}))


@dataclass(frozen=True, kw_only=True)
class Naive:
    """The ranking that misleads: by how much mean |d| falls when a part alone is aligned, nats.

    As it is usually done: one forward of each trainer (replicate 0). Averaged over replicates it would find the same parts as the
    systematic square, of which it is a blunt function, with the error of a quantity twenty times larger.
    """

    name: str
    gain: Measured
    rank: int


def naive_ranking(
    only: Mapping[str, Floats], everything: Floats, reference: Floats, sequences: Sequences
) -> dict[str, Naive]:
    """only: part -> logprobs ``[N]`` of one forward with this part alone aligned; everything: with none. Rank 1 is the largest gain."""
    gap = sequences.sums(np.abs(everything - reference))
    gains = {}
    for name, logprobs in only.items():
        rows = np.stack([gap, sequences.sums(np.abs(logprobs - reference)), sequences.counts])
        gains[name] = jackknife(lambda s: ((s[0] - s[1]) / s[2])[None], rows)[0]
    order = sorted(gains, key=lambda n: -gains[n].value)
    return {name: Naive(name=name, gain=gains[name], rank=1 + order.index(name)) for name in only}
