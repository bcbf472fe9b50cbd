"""What a verdict is decided from, and the limits that tell rounding from a mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rpadiag.compare.aggregate import Aggregate
from rpadiag.findings import Finding
from rpadiag.sites import split_site

# An operation in FP32 on identical input repeats to about 1e-7 (relative L2); accumulation order of a long product
# and another exp reach a few 1e-6. The smallest planted mistake (epsilon 1e-6 for 1e-5) gives 1e-4 at the first norm.
FP32_LOCAL_REL_L2 = 2e-5
# FP32 logprobs of two correct stacks agree to about 1e-5 nats; planted mistakes start at 4e-4.
FP32_MEAN_ABS_D = 1e-4
# A 16-bit operation with a few rounding points stays within a few half steps (2^-9 = 2e-3 for bfloat16).
LP_LOCAL_REL_L2 = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": FP32_LOCAL_REL_L2}
ROPE_POINTS = ("q_rope", "k_rope")


@dataclass(frozen=True, kw_only=True)
class PositionCheck:
    """Positions the two stacks used: equal, shifted by a constant, or different in another way."""

    kind: str  # "equal" | "shifted" | "different" | "unobserved"
    offset: int = 0
    uniform: bool = True
    prompt: int | None = None
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Control:
    """FP32 control: per-site statistics and the end-to-end difference, both in FP32.

    mean_abs_d: nats, None where not scored. reason: why there is no control.
    explained: what kind of fault the most suspicious operation has, with its parameter solved, where the data says.
    """

    aggregate: Aggregate | None = None
    mean_abs_d: float | None = None
    num_tokens: int = 0
    reason: str | None = None
    explained: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything the verdict is decided from.

    num_generated: of num_tokens, those that the rollout sampled; the others belong to prompts.
    causes: what the stacks' manifests name (:mod:`rpadiag.compare.causes`). no_local: why local divergence was not measured,
    where neither stack's operations are at hand; sites whose inputs are equal to the bit have it all the same.
    """

    dtype: str
    aggregate: Aggregate
    control: Control
    mean_abs_d: float
    max_abs_d: float
    num_tokens: int
    rollout: str
    num_generated: int = 0
    num_nonfinite: int = 0
    weights_differing: Sequence[str] = ()
    positions: PositionCheck = field(default_factory=lambda: PositionCheck(kind="equal"))
    floors: Mapping[str, float] = field(default_factory=dict)
    causes: Sequence[Finding] = ()
    no_local: str | None = None

    @property
    def counted(self) -> str:
        """``n = 216 tokens: 184 of prompts, 32 generated``: what a mean is over."""
        parts = f": {self.num_tokens - self.num_generated:,} of prompts, {self.num_generated:,} generated"
        return f"n = {self.num_tokens:,} tokens{parts if self.num_generated else ''}"


def most_suspicious(aggregate: Aggregate) -> str | None:
    """Site of an FP32 aggregate whose operation is furthest off on identical input, if any is beyond rounding."""
    found = suspects(aggregate, FP32_LOCAL_REL_L2, positions=PositionCheck(kind="equal"))
    return found[0][0] if found else None


def suspects(aggregate: Aggregate, limit: float, *, positions: PositionCheck) -> list[tuple[str, float]]:
    """Sites whose local relative L2 is above the limit, the worst of each point, the largest first."""
    found = [
        (site, stats.rel_l2)
        for site, stats in aggregate.locals()
        if stats.rel_l2 > limit
        and split_site(site)[1] != "logprob"
        and not (positions.kind == "shifted" and split_site(site)[1] in ROPE_POINTS)
    ]
    if not found:
        return []
    by_point: dict[str, tuple[str, float]] = {}
    for site, rel in found:
        point = split_site(site)[1]
        if point not in by_point or rel > by_point[point][1]:
            by_point[point] = (site, rel)
    return sorted(by_point.values(), key=lambda item: -item[1])


def first_beyond(aggregate: Aggregate, limit: float) -> tuple[str, float] | None:
    """The first site in execution order whose propagated relative L2 is above the limit."""
    for site, entry in aggregate.sites.items():
        if entry.total is not None and entry.total.rel_l2 > limit and split_site(site)[1] != "logprob":
            return site, entry.total.rel_l2
    return None
