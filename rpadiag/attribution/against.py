"""Trainers held against the rollout engine itself, both stacks replicated under the same noise.

Without these replicates the trainer with every part aligned stands for the engine. With them, what aligning gains is measured against the
engine, and what the parts do not cover shows: the systematic part that is left with all of them aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.design import ROLLOUT, Variant
from rpadiag.attribution.effects import Effect, MetricSums, effects_of
from rpadiag.attribution.estimate import Estimate, estimate
from rpadiag.attribution.plan import Plan
from rpadiag.attribution.resample import Measured, Sequences

Floats = NDArray[np.float64]
AS_IS, ALIGNED = "all", "reference"  # nothing aligned, everything aligned


@dataclass(frozen=True, kw_only=True)
class AgainstRollout:
    """estimates: of each trainer against the engine: ``all`` as it is, ``reference`` with every part aligned, a part's name with that part
    alone aligned. effects: part, or ``reference``, -> what aligning it changes of each metric against the engine.
    floor: mean |d| of the engine against itself under other noise, nats."""

    estimates: Mapping[str, Estimate]
    effects: Mapping[str, list[Effect]]
    floor: float

    def change(self, name: str, metric: str = "systematic_sq") -> Measured:
        """What aligning a part, or ``reference`` for every part, adds to a metric."""
        return next(e for e in self.effects[name] if e.metric == metric).change

    def to_dict(self) -> dict[str, Any]:
        """What the rows of ``attribution.parquet`` do not hold: changes with their joint errors."""
        changes = {name: self.change(name) for name in self.effects}
        gained = {name: {"systematic_sq": m.value, "systematic_sq_se": m.se} for name, m in changes.items()}
        return {"change_by_aligning": gained, "floor_mean_abs_d": self.floor}


def against_rollout(data: Callable[[Variant], Floats], plan: Plan, sequences: Sequences) -> AgainstRollout:
    """``data``: logprobs ``[K, N]`` of a variant, nats."""
    engine = data(ROLLOUT)
    parts = {p.name: plan.named("only", p.name) for p in plan.parts if len(plan.parts) > 1}
    trainers = {AS_IS: plan.named("all"), **parts, ALIGNED: plan.named("reference")}
    as_is = MetricSums(data(trainers[AS_IS]), engine, sequences)
    return AgainstRollout(
        estimates={name: estimate(data(v), engine, sequences) for name, v in trainers.items()},
        effects={
            name: effects_of(as_is, MetricSums(data(v), engine, sequences))
            for name, v in trainers.items()
            if name != AS_IS
        },
        floor=float(np.abs(engine - np.roll(engine, 1, axis=0)).mean()),
    )
