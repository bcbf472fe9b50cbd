"""Log-probabilities of another definition on one side: temperature, a truncated support, another distribution than was sampled from."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rpadiag.findings import Finding
from rpadiag.rollouts.fault import MIN_SEQUENCES, fault
from rpadiag.rollouts.observed import Observed

MIN_CERTAIN = 30  # tokens for a temperature
SLOPE = 0.04  # |log| of the slope that is a temperature
LEAST_CORRELATION = 0.8
ONE_SIDED = 0.9  # of the certain tokens that differ, in one direction
MIN_BIN = 30  # tokens of a range of probability for its mean to count
MIN_ALONE = 5  # tokens with q exactly 0 and p clearly below
DEVIATIONS = 6.0  # standard errors
RATIO_OFF = 0.02  # mean ratio away from 1


def definitions(seen: Observed) -> Iterator[Finding]:
    """At most one: they exclude one another."""
    for test in (_top_p, _temperature, _truncated, _not_sampled):
        found = test(seen)
        if found is not None:
            yield found
            return


def _top_p(seen: Observed) -> Finding | None:
    """Where one token alone reaches top-p its renormalised log-probability is exactly 0, whatever the other side says."""
    if seen.sampled_away.n < MIN_ALONE or seen.least_p_of_zero_q >= 0:
        return None
    solved = math.exp(seen.least_p_of_zero_q)
    mass, error = mean_ratio(seen)
    return fault(
        "truncated-support",
        f"Truncated support: the rollout's log-probabilities are renormalised over what top-p with p of about {solved:.2f} kept, the trainer's over the whole vocabulary. "
        f"{seen.sampled_away.n:,} of {seen.num_tokens:,} tokens have exactly 0 there, because they alone reach p. The mean ratio, which is the kept mass, is {mass:.3f} +- {2 * error:.3f}.",
        side="rollout",
        top_p=solved,
        kept_mass=mass,
    )


def _temperature(seen: Observed) -> Finding | None:
    """Where one competitor has most of what is left, log(1 - exp p) is proportional to 1/T: the slope of one side against the other is the ratio of
    temperatures. The sharper side has certain tokens higher, all of them, and unlikely ones lower.
    """
    slope, correlation = seen.certain.slope()
    if seen.certain.n < MIN_CERTAIN or not slope > 0 or correlation < LEAST_CORRELATION or abs(math.log(slope)) < SLOPE:
        return None
    certain, _, unlikely = seen.bins
    sign = -1 if slope > 1 else 1  # of q - p at certain tokens
    agreeing = certain.above if sign > 0 else certain.below
    if agreeing < ONE_SIDED * (certain.above + certain.below) or sign * certain.deviations < DEVIATIONS:
        return None
    if unlikely.n >= MIN_BIN and sign * unlikely.deviations > DEVIATIONS / 2:
        return None  # higher everywhere: renormalised, not sharpened
    ratio = 1 / slope  # T of the trainer over T of the rollout
    return fault(
        "temperature",
        f"Temperature on one side: T(trainer) / T(rollout) is about {ratio:.2f}, solved from {seen.certain.n:,} near-certain tokens (correlation {correlation:.3f}; good to "
        f"some 5 %). Either the trainer divides its logits by {ratio:.2f} and the rollout's log-probabilities are raw, or the rollout divides by {1 / ratio:.2f} and the trainer does not.",
        ratio=ratio,
        correlation=correlation,
        num_tokens=seen.certain.n,
    )


def _truncated(seen: Observed) -> Finding | None:
    """Renormalised over fewer tokens, so higher where anything was removed and lower nowhere; the mean ratio is the mass that was kept."""
    mean, error = mean_ratio(seen)
    for side, sign in (("rollout", 1.0), ("trainer", -1.0)):
        counted = [b for b in seen.bins[1:] if b.n >= MIN_BIN]
        higher = [sign * b.deviations for b in counted]
        off = sign * (1 - mean)
        if not counted or min(higher) < 0 or max(higher) < DEVIATIONS:
            continue
        if off > RATIO_OFF / 4 and off > DEVIATIONS * error:
            kept = mean if sign > 0 else 1 / mean
            return fault(
                "truncated-support",
                f"Truncated support: the {side}'s log-probabilities are higher at likely and unlikely tokens alike, as those are that are renormalised over what top-k, top-p or min-p "
                f"kept while the other side has the whole vocabulary. The mean ratio is {mean:.3f} +- {2 * error:.3f}, so about {100 * kept:.0f} % of the mass was kept (n = {seen.num_tokens:,}).",
                side=side,
                kept_mass=kept,
            )
    return None


def _not_sampled(seen: Observed) -> Finding | None:
    mean, error = mean_ratio(seen)
    if not math.isfinite(error) or len(seen.columns()["n"]) < MIN_SEQUENCES:
        return None
    if abs(mean - 1) <= RATIO_OFF or abs(mean - 1) <= DEVIATIONS * error:
        return None
    return fault(
        "not-sampled-from",
        f"Not sampled from: the mean ratio exp(p - q) is {mean:.3f} +- {2 * error:.3f}, and it is 1 for tokens that were sampled from the distribution whose "
        "log-probabilities the rollout recorded. These are raw where sampling was processed, or the other way round, or of another step.",
        mean_ratio=mean,
        error=2 * error,
    )


def mean_ratio(seen: Observed) -> tuple[float, float]:
    """(mean of exp(p - q), its standard error over sequences). It is 1 where the tokens were sampled from q."""
    rows = seen.columns()
    n, total = rows["n"], rows["excess"]
    if len(n) < 2:
        return (1 + float(total.sum() / n.sum()) if len(n) else float("nan")), math.inf
    mean = float(total.sum() / n.sum())
    residual = total - mean * n
    error = math.sqrt(float(residual @ residual) * len(n) / (len(n) - 1)) / float(n.sum())
    return 1 + mean, error
