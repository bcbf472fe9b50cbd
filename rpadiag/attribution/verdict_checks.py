"""What the checks of an attribution say in plain words, and how its numbers are written."""

from __future__ import annotations

import numpy as np

from rpadiag.attribution.attribute import Attribution
from rpadiag.attribution.checks import CONTROL_P, ENOUGH_SPREAD
from rpadiag.attribution.design import CONFIRMING
from rpadiag.attribution.resample import FEW_SEQUENCES, Measured
from rpadiag.findings import Finding


def squares(m: Measured) -> str:
    """A mean square with its error; a plain 0 where nothing differs at all."""
    if m.value == m.se == 0.0:
        return "0"
    return f"{m.value:.1e} ± {m.se:.1e}"


def pm(value: float, se: float) -> str:
    """A value in nats with its error, to the digits that the error allows (two of the error)."""
    if not np.isfinite(se) or se == 0.0:
        return f"{value:.2g} ± {se:.1g}"
    digits = max(0, 1 - int(np.floor(np.log10(se))))
    return f"{value:.{digits}f} ± {se:.{digits}f}"


def share_words(result: Attribution, name: str) -> str:
    """``78 ± 4 % of the total, ``, or nothing where the total is not above zero."""
    share = result.shares.get(name)
    return "" if share is None else f"{100 * share.value:.0f} ± {100 * share.se:.0f} % of the total, "


def check_findings(result: Attribution) -> list[Finding]:
    """The control first; then whatever limits what the numbers can say."""
    out = [_control(result), _noise(result), _replicated(result), _replicates(result)]
    if result.num_nonfinite:
        out.append(
            Finding(
                code="nonfinite-logprobs",
                severity="warning",
                text=f"{result.num_nonfinite:,} tokens have a NaN or infinite logprob in some forward and are left out of every number.",
                numbers={"num_nonfinite": result.num_nonfinite},
                rank=3,
            )
        )
    num = result.total.num_sequences
    if 1 < num < FEW_SEQUENCES:
        out.append(
            Finding(
                code="few-sequences",
                severity="warning",
                text=f"Standard errors come from {num} sequences, which is few: they have {num - 1} degrees of freedom and are uncertain "
                f"themselves by about {100 / np.sqrt(2 * (num - 1)):.0f} %. Decisions allow for that; {FEW_SEQUENCES} prompts or more decide better.",
                numbers={"num_sequences": num},
                rank=9,
            )
        )
    out += _confirmation(result) + _local(result)
    return out


def _control(result: Attribution) -> Finding:
    control = result.control
    figures = f"{squares(control.systematic_sq)} nats², mean {pm(control.mean_shift.value, control.mean_shift.se)} nats (n = {control.num_tokens:,})"
    if result.ranked:
        text = f"Self-control holds: the aligned forward against itself under other noise gives {figures}."
    elif not np.isfinite(control.systematic_sq.se):
        text = (
            f"No standard error: {control.num_tokens:,} tokens make {control.num_sequences:,} sequence, and errors come from "
            "differences between sequences. Parts are not ranked; use more prompts."
        )
    else:
        text = (
            f"Self-control failed: the aligned forward against itself under other noise gives {figures}, not zero. "
            "Parts are not ranked; use more replicates or more prompts."
        )
    return Finding(
        code="self-control",
        severity="info" if result.ranked else "error",
        text=text,
        numbers={
            "systematic_sq": control.systematic_sq.value,
            "systematic_sq_se": control.systematic_sq.se,
            "mean_shift": control.mean_shift.value,
            "mean_shift_se": control.mean_shift.se,
        },
        rank=50 if result.ranked else 0,
    )


def _noise(result: Attribution) -> Finding:
    names = {"rollout": "the rollout engine", "reference": "the aligned trainer", "all": "the trainer as it is"}
    shown = ", ".join(f"{names[c.variant]} {pm(c.mean_shift.value, c.mean_shift.se)}" for c in result.noise)
    ratio = max(result.noise, key=lambda c: abs(np.log(c.spread_ratio.value)) if c.spread_ratio.value > 0 else 0.0)
    holds = all(c.holds for c in result.noise)
    unknown = not all(np.isfinite(c.mean_shift.se) for c in result.noise)
    text = (
        "Whether the noise itself shifts a mean cannot be judged without a standard error."
        if unknown
        else f"The noise itself shifts no mean: perturbed against unperturbed, {shown} nats."
        if holds
        else f"The noise itself shifts logprobs: perturbed against unperturbed, {shown} nats. Read mean shifts with that in mind, and confirm with --confirm."
    )
    off = Measured(value=ratio.spread_ratio.value - 1, se=ratio.spread_ratio.se, dof=ratio.spread_ratio.dof)
    if off.p_two_sided > CONTROL_P:
        where = "from the mean of the replicates as one draw among them would"
    else:
        where = f"{'closer to' if off.value < 0 else 'further from'} the mean of the replicates than one draw among them would"
    return Finding(
        code="noise-check",
        severity="info" if holds else "warning",
        text=f"{text} The unperturbed forward lies {where} (ratio of mean squares "
        f"{pm(ratio.spread_ratio.value, ratio.spread_ratio.se)}, 1 expected).",
        numbers={f"mean_shift_{c.variant}": c.mean_shift.value for c in result.noise}
        | {f"mean_shift_{c.variant}_se": c.mean_shift.se for c in result.noise}
        | {f"spread_ratio_{c.variant}": c.spread_ratio.value for c in result.noise},
        rank=51 if holds else 9,
    )


def _replicated(result: Attribution) -> Finding:
    text = (
        "Only the trainer was replicated. The rollout engine is represented by the trainer with every part aligned; "
        "what the engine does outside these parts, and its own noise, is not in these numbers (--rollout vllm replicates it too)."
        if result.against is None
        else "Both stacks were replicated, under the same noise. The parts are told apart by trainers alone, with every part aligned as the reference; "
        "the engine itself is what the line about the rollout engine is held against."
    )
    return Finding(
        code="replicated-stacks",
        severity="info",
        text=text,
        numbers={"replicated": list(result.replicated)},
        rank=52,
    )


def _replicates(result: Attribution) -> Finding:
    plan = result.plan
    engine = " and of the rollout engine" if plan.rollout else ""
    how = (
        f"{result.num_replicates} replicates of each of {len(plan.variants) - plan.rollout} trainers{engine}, scored on n = "
        f"{result.total.num_tokens:,} tokens: all of the prompts but the first of each, and none that a rollout generated"
    )
    over = f", counted over all {len(plan.parts)} parts" if len(plan.parts) > 1 else ""
    if plan.precision is None:
        text = f"{how}; a part is called responsible at the {100 * result.level:g} % level{over}."
    elif result.stopped_early:
        text = (
            f"{how}: the error of the strongest part is below {100 * plan.precision:g} % of it, so no more were made."
        )
    else:
        text = f"{how}, the most allowed: the error of the strongest part is still above {100 * plan.precision:g} % of it. Raise --replicates."
    return Finding(
        code="replicates",
        severity="info" if plan.precision is None or result.stopped_early else "notice",
        text=text,
        numbers={
            "num_replicates": result.num_replicates,
            "num_forwards": result.num_forwards,
            "level": result.level,
            "precision": plan.precision,
        },
        rank=53,
    )


def _confirmation(result: Attribution) -> list[Finding]:
    if not result.confirmations:
        return []
    second = CONFIRMING[result.plan.confirm_kind]
    idle = [c.name for c in result.confirmations if c.changes_nothing]
    told = [c for c in result.confirmations if not c.changes_nothing]
    if not told:
        text = (
            f"The second kind of noise, {second}, moves no logprob here: it is exact on this device, so it confirms nothing. "
            "Another sequence length, device or attention implementation may."
        )
        return [Finding(code="confirmation", severity="notice", text=text, rank=13)]
    differ = [c.name for c in told if not c.agrees]
    shown = "; ".join(f"{c.name} {squares(c.first)}, {squares(c.second)}, {squares(c.shared)}" for c in told)
    lead = (
        f"The second kind of noise, {second}, does not confirm {', '.join(differ)}"
        if differ
        else f"The second kind of noise, {second}, confirms the first"
    )
    few = (
        " Its draws are few, so it leaves chaos in its own square; what counts is what the two share."
        if min(c.spread for c in told) < ENOUGH_SPREAD
        else ""
    )
    rest = f" It moves no logprob of {', '.join(idle)}." if idle else ""
    return [
        Finding(
            code="confirmation",
            severity="warning" if differ else "info",
            text=f"{lead} (systematic nats² under the first, the second, and shared): {shown}.{few}{rest}",
            numbers={c.name: c.shared.value for c in told},
            rank=9 if differ else 13,
        )
    ]


def _local(result: Attribution) -> list[Finding]:
    if not result.local:
        return []
    differ = [a for a in result.local.values() if not a.agrees]
    shown = "; ".join(
        f"{a.name} {squares(a.predicted_sq)}, {squares(a.seen)}, {squares(a.shared)}"
        for a in result.local.values()
        if a.predicted_sq.value or a.seen.value
    )
    lead = (
        f"First-order local evidence does not account for what the replicates see of {', '.join(a.name for a in differ)}"
        if differ
        else "First-order local evidence accounts for what the replicates see"
    )
    return [
        Finding(
            code="local-evidence",
            severity="notice" if differ else "info",
            text=f"{lead} (nats² predicted, seen, and shared; shared equals seen where they agree): {shown or 'nothing'}.",
            numbers={a.name: a.slope.value for a in result.local.values()},
            rank=14,
        )
    ]
