"""The finding about trainers held against the replicated rollout engine."""

from __future__ import annotations

from rpadiag.attribution.against import ALIGNED, AS_IS, AgainstRollout
from rpadiag.attribution.verdict_checks import pm, squares
from rpadiag.findings import Finding


def rollout_finding(found: AgainstRollout, *, level: float) -> Finding:
    """What aligning gains against the engine itself, and whether anything systematic is left."""
    before, after = found.estimates[AS_IS], found.estimates[ALIGNED]
    gained = found.change(ALIGNED)
    alone = ", ".join(f"{name} {squares(found.change(name))}" for name in found.effects if name != ALIGNED)
    sentences = [
        f"Against the rollout engine itself, both stacks under the same noise: the trainer as it is has a systematic part of {squares(before.systematic_sq)} nats², "
        f"with every part aligned {squares(after.systematic_sq)} (change {squares(gained)})"
        + (f"; a part alone changes it by {alone}." if alone else ".")
    ]
    if after.is_zero:
        sentences.append("Aligned, the trainer gives the engine's logprobs to the last bit in every replicate.")
    elif after.systematic_sq.p_above <= level:
        sentences.append(
            "What is left with every part aligned is above zero: it belongs to what was not named with --regions, or to the engine."
        )
    else:
        sentences.append("What is left with every part aligned cannot be told from zero.")
    sentences.append(
        f"Single forwards still differ by {pm(after.mean_abs_d.value, after.mean_abs_d.se)} nats (mean |d|); the engine differs from itself under other noise by {found.floor:.3f}."
    )
    return Finding(
        code="against-rollout",
        severity="info",
        text=" ".join(sentences),
        numbers={
            "as_is_sq": before.systematic_sq.value,
            "as_is_sq_se": before.systematic_sq.se,
            "aligned_sq": after.systematic_sq.value,
            "aligned_sq_se": after.systematic_sq.se,
            "change_sq": gained.value,
            "change_sq_se": gained.se,
            "mean_abs_d_as_is": before.mean_abs_d.value,
            "mean_abs_d_aligned": after.mean_abs_d.value,
            "floor_mean_abs_d": found.floor,
        },
        rank=9,
    )
