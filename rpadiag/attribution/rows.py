"""An attribution as rows of ``attribution.parquet`` and ``effects.parquet``, and as the entry of ``metrics.json``."""

from __future__ import annotations

from typing import Any

from rpadiag.attribution.attribute import Attribution
from rpadiag.attribution.design import Variant
from rpadiag.attribution.effects import METRICS
from rpadiag.attribution.estimate import Estimate
from rpadiag.attribution.resample import Measured


def _with_error(name: str, m: Measured) -> dict[str, float]:
    return {name: m.value, f"{name}_se": m.se}


def attribution_rows(result: Attribution) -> list[dict[str, Any]]:
    """One row per variant, most systematic first; against the rollout engine; confirmations, main effects and interactions."""
    ordered = sorted(result.estimates.items(), key=lambda item: -item[1].systematic_sq.value)
    rows = [_row(variant, e, result) for variant, e in ordered]
    if result.against is not None:
        held = {Variant(design="rollout", name=n, aligned=()): e for n, e in result.against.estimates.items()}
        rows += [_row(variant, e, result) for variant, e in held.items()]
    base = {"num_replicates": result.num_replicates, "num_tokens": result.total.num_tokens}
    for c in result.confirmations:
        design = "all" if c.name == "all" else "each"
        rows.append(
            {
                "region": c.name,
                "design": design,
                "kind": result.plan.confirm_kind,
                "detectable": c.second.p_above <= result.level,
                **base,
            }
            | _with_error("systematic_sq", c.second)
        )
    for k in result.interactions:
        rows.append(
            {
                "region": " × ".join(k.parts),
                "design": "main" if len(k.parts) == 1 else "interaction",
                "kind": "ulp",
                "p_adjusted": k.p_adjusted,
                "detectable": k.p_adjusted <= result.level,
                **base,
            }
            | _with_error("systematic_sq", k.systematic_sq)
            | _with_error("mean_shift", k.shift)
        )
    return rows


def _row(variant: Variant, e: Estimate, result: Attribution) -> dict[str, Any]:
    name, each = variant.name, variant.design == "each"
    decision = result.decisions.get(name) if each else None
    row: dict[str, Any] = {
        "region": name,
        "design": variant.design,
        "kind": "ulp",
        "systematic_rms": e.systematic_rms,
        "chaotic_rms": e.chaotic_rms.value,
        "mean_abs_d": e.mean_abs_d.value,
        "k3_kl": e.k3_kl.value,
        "local_differing": result.local_differing.get(name) if variant.design in ("each", "only") else None,
        "num_replicates": e.num_replicates,
        "num_tokens": e.num_tokens,
        "num_sequences": e.num_sequences,
        "detectable": decision.responsible if decision else e.systematic_sq.p_above <= result.level,
    }
    for column, m in (
        ("systematic_sq", e.systematic_sq),
        ("mean_shift", e.mean_shift),
        ("k3_kl_systematic", e.k3_kl_systematic),
        ("k3_kl_chaotic", e.k3_kl_chaotic),
        ("weight_bias", e.weight_bias),
        ("weight_bias_sq", e.weight_bias_sq),
        ("sequence_log_ratio_sq", e.sequence_sq),
    ):
        row |= _with_error(column, m)
    row["sequence_log_ratio_chaotic_rms"] = e.sequence_chaotic_rms.value
    if decision is not None:
        row |= {
            "p_value": decision.p,
            "p_adjusted": decision.p_adjusted,
            "decision": decision.word,
            "end_to_end": decision.end_to_end,
            "upper_limit_sq": decision.upper_limit,
            "more_replicates": decision.more_replicates,
        }
        if name in result.shares:
            row |= _with_error("share", result.shares[name])
        if name in result.naive:
            row |= _with_error("naive_gain", result.naive[name].gain) | {"naive_rank": result.naive[name].rank}
        if name in result.local:
            row |= _with_error("local_slope", result.local[name].slope)
            row["local_predicted_sq"] = result.local[name].predicted_sq.value
    return row


def effect_rows(result: Attribution) -> list[dict[str, Any]]:
    """One row per part and metric: the trainer as it is, with the part aligned, the change, and the floor that chaos leaves."""
    return [
        {"region": part, "metric": e.metric, "floor": result.floor[e.metric].value}
        | _with_error("as_is", e.as_is)
        | _with_error("aligned", e.aligned)
        | _with_error("change", e.change)
        for part, effects in result.effects.items()
        for e in effects
    ]


def summary(result: Attribution) -> dict[str, Any]:
    """What the tables do not hold, for ``metrics.json``."""
    a = result.additivity
    return {
        "ranked": result.ranked,
        "saturated": result.saturated,
        "level": result.level,
        "correction": "Holm",
        "parts": [p.name for p in result.plan.parts],
        "num_replicates": result.num_replicates,
        "stopped_early": result.stopped_early,
        "num_forwards": result.num_forwards,
        "num_sequences": result.total.num_sequences,
        "num_nonfinite": result.num_nonfinite,
        "replicated": list(result.replicated),
        "against_rollout": None if result.against is None else result.against.to_dict(),
        "additivity": {
            "holds": a.holds,
            **_with_error("sum_of_parts_sq", a.sum_of_squares),
            **_with_error("whole_sq", a.whole_square),
            **_with_error("gap_sq", a.gap_of_squares),
            **_with_error("gap_of_shifts", a.gap_of_shifts),
            **_with_error("beyond_parts_sq", a.beyond),
        },
        "noise": [
            {"variant": c.variant, "holds": c.holds}
            | _with_error("mean_shift", c.mean_shift)
            | _with_error("spread_ratio", c.spread_ratio)
            for c in result.noise
        ],
        "confirmation": [
            {"part": c.name, "agrees": c.agrees, "changes_nothing": c.changes_nothing, "spread": c.spread}
            | _with_error("first_sq", c.first)
            | _with_error("second_sq", c.second)
            | _with_error("shared_sq", c.shared)
            | _with_error("correlation", c.correlation)
            for c in result.confirmations
        ],
        "local": [
            {"part": x.name, "agrees": x.agrees}
            | _with_error("predicted_sq", x.predicted_sq)
            | _with_error("seen_sq", x.seen)
            | _with_error("shared_sq", x.shared)
            | _with_error("slope", x.slope)
            for x in result.local.values()
        ],
        "metrics": list(METRICS),
    }
