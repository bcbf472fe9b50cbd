"""Runs an attribution: asks a scorer for replicates, round by round, and makes estimates, checks and decisions of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.against import AgainstRollout, against_rollout
from rpadiag.attribution.checks import (
    Additivity,
    Confirmation,
    LocalAgreement,
    Naive,
    NoiseCheck,
    check_additivity,
    check_noise,
    compare_with_local,
    confirm,
    end_to_end_of,
    naive_ranking,
    self_control_holds,
)
from rpadiag.attribution.decide import LEVEL, LEVEL_OF_LOOKS, SATURATED, Decision, decide, precise_enough
from rpadiag.attribution.design import Replicate, Score, Variant
from rpadiag.attribution.effects import Effect, MetricSums, effects_of, metrics_of
from rpadiag.attribution.estimate import Estimate, estimate, share_of
from rpadiag.attribution.factorial import Contrast, contrasts
from rpadiag.attribution.plan import Collected, Plan
from rpadiag.attribution.resample import Measured, Sequences
from rpadiag.errors import EngineError

Floats = NDArray[np.float64]
OnScored = Callable[[Replicate, Floats], None]
UNESTIMATED = ("reference", "factorial", "rollout")  # designs that are not held against the reference one by one


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Everything an attribution found. Part names are those of ``plan.parts``.

    estimates: of every variant but the reference. shares: of the total's systematic part; empty where the total is not above zero.
    effects: what aligning a part alone does to each metric, and ``all`` what aligning everything does. floor: the same metrics of the
    reference against itself under other noise: what no alignment removes. local_differing: share of elements that a part's operations
    move when fed the same input. ranked is False when the self-control failed and nothing may be ranked. stopped_early: the precision asked for was reached.
    num_forwards: forwards asked of the scorer in this process. against: the same held against the rollout engine, where it was replicated too.
    """

    plan: Plan
    estimates: Mapping[Variant, Estimate]
    decisions: Mapping[str, Decision]
    shares: Mapping[str, Measured]
    effects: Mapping[str, list[Effect]]
    floor: Mapping[str, Measured]
    naive: Mapping[str, Naive]
    additivity: Additivity
    noise: tuple[NoiseCheck, ...]
    confirmations: tuple[Confirmation, ...]
    interactions: tuple[Contrast, ...]
    local: Mapping[str, LocalAgreement]
    local_differing: Mapping[str, float]
    ranked: bool
    level: float
    num_replicates: int
    num_nonfinite: int
    stopped_early: bool
    num_forwards: int
    against: AgainstRollout | None = None

    @property
    def replicated(self) -> tuple[str, ...]:
        """The stacks whose forwards were repeated under noise."""
        return ("trainer",) if self.against is None else ("trainer", "rollout")

    def by_design(self, design: str) -> dict[str, Estimate]:
        """Part -> estimate of one design, in the order of the plan."""
        return {v.name: e for v, e in self.estimates.items() if v.design == design}

    @property
    def control(self) -> Estimate:
        return self.by_design("self")["self"]

    @property
    def total(self) -> Estimate:
        return self.by_design("all")["all"]

    @property
    def saturated(self) -> bool:
        """Mean |d| of single forwards ranks nothing: several parts alone give nearly the whole gap."""
        return any(d.end_to_end == SATURATED for d in self.decisions.values())

    def main_effect(self, part: str) -> Contrast | None:
        """The part's main effect, where a factorial design was asked for."""
        return next((c for c in self.interactions if c.parts == (part,)), None)

    def systematic(self, part: str) -> Measured:
        """The mean square that the decision on a part rests on: of its main effect, or of it alone."""
        main = self.main_effect(part)
        return self.by_design("each")[part].systematic_sq if main is None else main.systematic_sq

    def strongest_first(self) -> list[tuple[str, Estimate]]:
        """Parts by systematic part, largest first."""
        return sorted(self.by_design("each").items(), key=lambda item: -self.systematic(item[0]).value)

    def effect(self, part: str, metric: str) -> Effect:
        return next(e for e in self.effects[part] if e.metric == metric)


def attribute(
    score: Score,
    plan: Plan,
    sequence_ids: NDArray[np.int64],
    *,
    done: Iterable[tuple[Replicate, Floats]] = (),
    on_scored: OnScored | None = None,
    local_differing: Mapping[str, float] | None = None,
    local_effects: Mapping[str, Floats] | None = None,
) -> Attribution:
    """Score the plan's replicates and say what each part is responsible for.

    sequence_ids: sequence of each token, ``[N]``. done: replicates that an earlier, interrupted attribution scored; they are not asked for
    again. on_scored: called with each answer as it comes. local_differing: share of elements each part's operations move when fed the
    same input. local_effects: first-order change of each logprob when a part is not aligned, nats, by part name: ``[N]``, or better
    several draws of it ``[D, N]`` (see :func:`compare_with_local`).
    """
    collected = Collected(done)
    asked, stopped, used = 0, False, 0
    sequences = Sequences(sequence_ids)

    def ask(replicates: Iterable[Replicate]) -> int:
        missing = collected.missing(replicates)
        for replicate, logprobs in score(missing) if missing else ():
            collected.add(replicate, logprobs)
            if on_scored is not None:
                on_scored(replicate, collected.logprobs(replicate))
        return len(missing)

    for numbers in plan.rounds:
        asked += ask(plan.of_round(numbers))
        used = numbers.stop
        if plan.precision is not None and used < plan.num_replicates and used > 1:
            each = _each_estimate(collected, plan, used, sequences)
            by_name = {v.name: e for v, e in each.items()}
            if precise_enough(by_name, plan.precision, num_looks=len(plan.rounds)):
                stopped = True
                break
    asked += ask(plan.confirmations(used))
    return _conclude(
        collected,
        plan,
        sequence_ids,
        used,
        local_differing=dict(local_differing or {}),
        local_effects=dict(local_effects or {}),
        stopped_early=stopped,
        num_forwards=asked,
    )


@dataclass(frozen=True)
class _Finite:
    """Logprobs of the tokens that are finite in every forward."""

    collected: Collected
    plan: Plan
    keep: NDArray[np.bool_]
    num: int
    cache: dict[tuple[Variant, str], Floats] = field(default_factory=dict)

    def of(self, variant: Variant, kind: str = "ulp") -> Floats:
        """``[K, N]`` nats."""
        if (variant, kind) not in self.cache:
            stacked = self.collected.stack(variant, self.num, seed=self.plan.seed, kind=kind)
            self.cache[variant, kind] = stacked[:, self.keep]
        return self.cache[variant, kind]


def _each_estimate(collected: Collected, plan: Plan, num: int, sequences: Sequences) -> dict[Variant, Estimate]:
    reference = collected.stack(plan.named("reference"), num, seed=plan.seed)
    return {
        v: estimate(collected.stack(v, num, seed=plan.seed), reference, sequences)
        for v in plan.variants
        if v.design == "each"
    }


def _conclude(
    collected: Collected,
    plan: Plan,
    sequence_ids: NDArray[np.int64],
    num: int,
    *,
    local_differing: Mapping[str, float],
    local_effects: Mapping[str, Floats],
    stopped_early: bool,
    num_forwards: int,
) -> Attribution:
    keep = collected.finite_tokens()
    if not keep.any():
        raise EngineError("no token has a finite logprob in every forward", hint="look for NaN with rpadiag compare")
    data, sequences = _Finite(collected, plan, keep, num), Sequences(sequence_ids[keep])
    reference = data.of(plan.named("reference"))
    estimates = {v: estimate(data.of(v), reference, sequences) for v in plan.variants if v.design not in UNESTIMATED}
    each = {v.name: e for v, e in estimates.items() if v.design == "each"}
    only = {v.name: data.of(v)[0] for v in estimates if v.design == "only"}
    total = next(e for v, e in estimates.items() if v.design == "all")
    control = next(e for v, e in estimates.items() if v.design == "self")
    ranked = self_control_holds(control)
    level = LEVEL if plan.precision is None else LEVEL - LEVEL_OF_LOOKS
    crossed = _crossed(data, sequences)
    mains = {c.parts[0]: (c.systematic_sq, c.shift) for c in crossed if len(c.parts) == 1}
    squares = {n: e.sums["systematic_sq"] for n, e in each.items()} | {
        c.parts[0]: c.sums for c in crossed if len(c.parts) == 1
    }
    variants_each = {v.name: v for v in estimates if v.design == "each"}
    return Attribution(
        plan=plan,
        estimates=estimates,
        decisions=decide(
            each, total, control, ranked=ranked, end_to_end=end_to_end_of(each, total), level=level, mains=mains
        ),
        shares={n: share_of(x, total.sums["systematic_sq"]) for n, x in squares.items()}
        if total.systematic_sq.p_above <= level
        else {},
        effects=_effects(data, reference, sequences),
        floor=metrics_of(MetricSums(data.of(plan.named("self")), reference, sequences)),
        naive=naive_ranking(only, data.of(plan.named("all"))[0], reference[0], sequences),
        additivity=check_additivity(
            {n: data.of(v) for n, v in variants_each.items()}, data.of(plan.named("all")), reference, sequences
        ),
        noise=tuple(
            check_noise(r.variant.design, data.of(r.variant), collected.logprobs(r)[keep], sequences)
            for r in plan.unperturbed()
        ),
        confirmations=_confirmations(data, variants_each, sequences),
        interactions=tuple(crossed),
        local={
            n: compare_with_local(n, g[..., keep], data.of(variants_each[n]), reference, sequences)
            for n, g in local_effects.items()
        },
        local_differing=local_differing,
        ranked=ranked,
        level=level,
        num_replicates=num,
        num_nonfinite=int(np.count_nonzero(~keep)),
        stopped_early=stopped_early,
        num_forwards=num_forwards,
        against=against_rollout(data.of, plan, sequences) if plan.rollout else None,
    )


def _crossed(data: _Finite, sequences: Sequences) -> list[Contrast]:
    """Main effects and interactions, where the plan has a factorial design."""
    points = {left: data.of(variant) for left, variant in data.plan.points.items()}
    return contrasts([p.name for p in data.plan.parts], points, sequences) if points else []


def _effects(data: _Finite, reference: Floats, sequences: Sequences) -> dict[str, list[Effect]]:
    """Aligning each part alone in the trainer as it is, and aligning all of them."""
    plan = data.plan
    as_is = MetricSums(data.of(plan.named("all")), reference, sequences)
    aligned = {p.name: plan.named("only", p.name) for p in plan.parts} | {"all": plan.named("reference")}
    return {name: effects_of(as_is, MetricSums(data.of(v), reference, sequences)) for name, v in aligned.items()}


def _confirmations(data: _Finite, each: Mapping[str, Variant], sequences: Sequences) -> tuple[Confirmation, ...]:
    if not data.plan.confirm:
        return ()
    reference = data.plan.named("reference")
    chosen = {**each, "all": data.plan.named("all")}
    return tuple(
        confirm(
            name,
            (data.of(v), data.of(reference)),
            (data.of(v, data.plan.confirm_kind), data.of(reference, data.plan.confirm_kind)),
            sequences,
        )
        for name, v in chosen.items()
    )
