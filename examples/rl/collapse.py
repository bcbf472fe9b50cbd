"""What counts as a collapse. Fixed before the first GPU run; see README.md for the words.

R[t] is the mean reward of the SMOOTH rounds that end with round t, and best[t] the largest R so far. A run has collapsed at round c when c is the first
round from which on, to the end of the run, R stays below LOST * best, for at least HOLD rounds, and best was at least SOMETHING: what
never learned cannot lose. A run whose last HOLD rounds or more had a loss that is not finite, or no finite gradient, has collapsed too, at the first
of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTH = 10  # rounds
LOST = 0.5
HOLD = 10  # rounds
SOMETHING = 0.1  # reward


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """round: first round of the collapse; None: none. why: ``reward``, ``not finite`` or empty. best: largest smoothed reward."""

    round: int | None
    why: str
    best: float


def smoothed(rewards: Sequence[float], width: int = SMOOTH) -> list[float]:
    """R[t] for t from width - 1 on; shorter runs give nothing."""
    return [math.fsum(rewards[t - width + 1 : t + 1]) / width for t in range(width - 1, len(rewards))]


def collapse(rewards: Sequence[float], finite: Sequence[bool] | None = None) -> Collapse:
    """rewards: one a round, in order. finite: whether the round had a finite loss and a finite gradient; all had by default."""
    finite = [True] * len(rewards) if finite is None else list(finite)
    if len(finite) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards, {len(finite)} flags")
    means = smoothed(rewards)
    best = max(means, default=math.nan)
    tail = _length_of_tail([not f for f in finite])
    if tail >= HOLD:
        return Collapse(round=len(rewards) - tail, why="not finite", best=best)
    top, below = -math.inf, []
    for mean in means:
        top = max(top, mean)
        below.append(top >= SOMETHING and mean < LOST * top)
    tail = _length_of_tail(below)
    if tail >= HOLD:
        return Collapse(round=len(rewards) - tail, why="reward", best=best)
    return Collapse(round=None, why="", best=best)


def _length_of_tail(flags: Sequence[bool]) -> int:
    """How many flags at the end are true without a break."""
    count = 0
    for flag in reversed(flags):
        if not flag:
            break
        count += 1
    return count
