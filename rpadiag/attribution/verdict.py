"""The attribution in plain words: findings, most important first, and the sentence that answers the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rpadiag.attribution import verdict_checks
from rpadiag.attribution.attribute import Attribution
from rpadiag.attribution.decide import NOT_DISTINGUISHABLE, RELEVANT_SHARE, Decision
from rpadiag.attribution.estimate import Estimate
from rpadiag.attribution.resample import FEW_SEQUENCES
from rpadiag.attribution.verdict_checks import pm, share_words, squares
from rpadiag.attribution.verdict_rollout import rollout_finding
from rpadiag.findings import Finding, Verdict

WHAT_REMOVES_CHAOS = (
    "batch-invariant kernels on both stacks together with all parts aligned, or more mantissa bits: FP16 rounds eight times finer "
    "than BF16, and in FP32 what is left is of the order of 1e-5 nats"
)


_EVIDENCE = {
    "shift": "mean shift",
    "main square": "main effect over all combinations",
    "main shift": "mean shift over all combinations",
}


def findings(result: Attribution) -> list[Finding]:
    """Every statement, in order of rank."""
    out = verdict_checks.check_findings(result)
    if result.ranked:
        out += [_part_finding(name, e, result, rank=n) for n, (name, e) in enumerate(result.strongest_first())]
        out.append(_total_finding(result))
        out += _interaction_findings(result)
        if result.against is not None:
            out.append(rollout_finding(result.against, level=result.level))
    out.append(_chaos_finding(result))
    if result.saturated:
        out.append(_saturated_finding(result))
    if result.naive and result.ranked and not result.total.is_zero:
        out.append(_naive_finding(result))
    return sorted(out, key=lambda f: f.rank)


def verdict(result: Attribution, told: Sequence[Finding], *, not_asked: Sequence[str] = ()) -> Verdict:
    """``attributed``, or ``inconclusive`` when a control failed. not_asked: regions that could have been parts and were not."""
    if not result.ranked:
        return Verdict(kind="inconclusive", sentence=_no_answer(result), evidence=tuple(told))
    chaos = (
        f"Beside it every logprob moves by {result.total.chaotic_rms.value:.3f} nats rms of chaos, which belongs to no part and which "
        "aligning does not remove."
    )
    unasked = f" Not asked: {', '.join(not_asked)} (--regions)." if not_asked else ""
    return Verdict(kind="attributed", sentence=f"{_answer(result)} {chaos}{unasked}", evidence=tuple(told))


def _no_answer(result: Attribution) -> str:
    if not np.isfinite(result.control.systematic_sq.se):
        return "No answer: one sequence gives no standard error, so no part is ranked. Use more prompts."
    return "No answer: the self-control failed, so no part is ranked. Use more replicates or more prompts."


def _answer(result: Attribution) -> str:
    """Who is responsible, who is not, who is open."""
    decisions = result.decisions
    found = [(n, e) for n, e in result.strongest_first() if decisions[n].responsible]
    clear = [n for n, _ in result.strongest_first() if decisions[n].word == NOT_DISTINGUISHABLE]
    open_ = [(n, decisions[n].more_replicates) for n, _ in result.strongest_first() if decisions[n].more_replicates]
    parts = []
    if found:
        named = " and ".join(f"{n} ({_evidence(n, e, result)})" for n, e in found)
        verb = "is" if len(found) == 1 else "are"
        parts.append(f"{named} {verb} responsible for systematic divergence; {_first([n for n, _ in found], result)}.")
    else:
        parts.append(
            f"No part is found responsible with {result.num_replicates} replicates of {result.total.num_tokens:,} tokens "
            f"in {result.total.num_sequences:,} sequences."
        )
    if clear:
        parts.append(f"{', '.join(clear)} cannot be told from zero.")
    if open_:
        parts.append(f"Open: {', '.join(f'{n} (about {k} more replicates)' for n, k in open_)}.")
    return " ".join(parts)


def _first(names: list[str], result: Attribution) -> str:
    """Which of the responsible parts, strongest first, to align first; no order where the two strongest differ by less than their error."""
    if len(names) > 1:
        a, b = (result.systematic(n) for n in names[:2])
        if not a.value - b.value > math.hypot(a.se, b.se):
            return f"{names[0]} and {names[1]} differ by less than their error, so neither comes first"
    return f"align {names[0]} first"


def _evidence(name: str, e: Estimate, result: Attribution) -> str:
    """The figure that a part is responsible by."""
    evidence = result.decisions[name].evidence
    main = result.main_effect(name)
    if main is not None:
        figure = (
            f"{pm(main.shift.value, main.shift.se)} nats on average"
            if evidence == "main shift"
            else f"{squares(main.systematic_sq)} nats²"
        )
        return f"{share_words(result, name)}main effect {figure}"
    if evidence == "shift" and e.systematic_sq.p_above > result.level:
        return f"mean shift {pm(e.mean_shift.value, e.mean_shift.se)} nats"
    return f"{share_words(result, name)}{squares(e.systematic_sq)} nats²"


def _part_finding(name: str, e: Estimate, result: Attribution, *, rank: int) -> Finding:
    decision = result.decisions[name]
    sentences = [f"{name}: {_decision_words(name, e, decision, result)}."]
    if e.mean_shift.p_two_sided <= result.level / len(result.decisions):
        way = "raises" if e.mean_shift.value > 0 else "lowers"
        sentences.append(
            f"Left unaligned it {way} logprobs by {pm(abs(e.mean_shift.value), e.mean_shift.se)} nats on average."
        )
    made = result.local_differing.get(name)
    if made is not None:
        adds = ", residual adds left out," if name == "rmsnorm" else ""
        sentences.append(f"{100 * made:.1f} % of its elements{adds} differ when fed the same input.")
    if decision.responsible:
        sentences.append(_what_aligning_does(name, result))
    gain = result.effect(name, "systematic_sq").change
    return Finding(
        code="systematic-region",
        severity="notice" if decision.responsible else "info",
        text=" ".join(sentences),
        region=name,
        numbers={
            "systematic_sq": result.systematic(name).value,
            "systematic_sq_se": result.systematic(name).se,
            "p_adjusted": decision.p_adjusted,
            "mean_shift": e.mean_shift.value,
            "mean_shift_se": e.mean_shift.se,
            "chaotic_rms": e.chaotic_rms.value,
            "gain_of_aligning_sq": -gain.value,
            "gain_of_aligning_sq_se": gain.se,
            "local_differing": made,
            "more_replicates": decision.more_replicates,
        },
        rank=min(1 + rank, 9),
    )


def _decision_words(name: str, e: Estimate, decision: Decision, result: Attribution) -> str:
    figures = f"systematic {squares(result.systematic(name))} nats²"
    base = f"n = {e.num_tokens:,} tokens in {e.num_sequences:,} sequences, K = {e.num_replicates}"
    if e.is_zero:
        return f"switching it changes no logprob at all ({base})"
    if decision.responsible:
        how = "" if decision.evidence == "square" else f"by its {_EVIDENCE[decision.evidence]}, "
        return f"responsible, {how}{share_words(result, name)}{figures} (p = {decision.p_adjusted:.2g} after Holm's correction; {base})"
    if decision.more_replicates:
        sooner = ", more prompts sooner" if e.num_sequences < FEW_SEQUENCES else ""
        return f"open, {figures}; about {decision.more_replicates} more replicates would settle it{sooner} ({base})"
    limit = f"at most {decision.upper_limit:.1e} nats² with 95 % confidence"
    if decision.upper_limit > RELEVANT_SHARE * max(result.total.systematic_sq.value, 0.0):
        limit += ", which more prompts would lower"
    return f"not distinguishable from zero, {figures}, {limit} ({base})"


def _what_aligning_does(name: str, result: Attribution) -> str:
    square = result.effect(name, "systematic_sq")
    weight = result.effect(name, "weight_bias_sq")
    gap = result.effect(name, "mean_abs_d")
    return (
        f"Aligning it alone takes the systematic part from {square.as_is.value:.1e} to {square.aligned.value:.1e} nats² (change "
        f"{squares(square.change)}), the mean square bias of the policy-gradient weight from {weight.as_is.value:.1e} to "
        f"{weight.aligned.value:.1e}, and mean |d| from {gap.as_is.value:.3f} to {gap.aligned.value:.3f} nats (change {pm(gap.change.value, gap.change.se)})."
    )


def _total_finding(result: Attribution) -> Finding:
    a = result.additivity
    agree = "agree" if a.holds else "do not agree"
    beyond = (
        f" What only combinations do is {squares(a.beyond)} nats²."
        if a.beyond.p_above <= result.level or not a.holds
        else ""
    )
    return Finding(
        code="systematic-total",
        severity="info" if a.holds else "notice",
        text=f"All parts together: systematic {squares(a.whole_square)} nats²; the parts sum to {squares(a.sum_of_squares)}; the two {agree} "
        f"(difference {squares(a.gap_of_squares)}).{beyond}",
        numbers={
            "systematic_sq": a.whole_square.value,
            "systematic_sq_se": a.whole_square.se,
            "sum_of_parts_sq": a.sum_of_squares.value,
            "sum_of_parts_sq_se": a.sum_of_squares.se,
            "gap_sq": a.gap_of_squares.value,
            "gap_sq_se": a.gap_of_squares.se,
            "gap_of_shifts": a.gap_of_shifts.value,
            "gap_of_shifts_se": a.gap_of_shifts.se,
            "beyond_parts_sq": a.beyond.value,
            "beyond_parts_sq_se": a.beyond.se,
            "chaotic_rms": result.total.chaotic_rms.value,
        },
        rank=10,
    )


def _chaos_finding(result: Attribution) -> Finding:
    total, floor = result.total, result.floor["mean_abs_d"]
    if total.is_zero:
        text = "No part changes a logprob in these forwards."
    elif total.chaotic_rms.value == 0.0:
        text = "There is no chaos here: every replicate gives the same logprobs."
    else:
        text = (
            f"What aligning cannot remove: {total.chaotic_rms.value:.3f} nats rms of chaos per token, {_chaotic_share(total)} of the k3 KL of "
            f"{total.k3_kl.value:.1e} nats. The aligned trainer against itself under other noise still differs by {floor.value:.3f} nats (mean |d|). "
            f"What removes it: {WHAT_REMOVES_CHAOS}."
        )
    return Finding(
        code="chaotic-part",
        severity="info",
        text=text,
        numbers={
            "chaotic_rms": total.chaotic_rms.value,
            "k3_kl": total.k3_kl.value,
            "k3_kl_systematic": total.k3_kl_systematic.value,
            "k3_kl_systematic_se": total.k3_kl_systematic.se,
            "k3_kl_chaotic": total.k3_kl_chaotic.value,
            "floor_mean_abs_d": floor.value,
        },
        rank=11,
    )


def _chaotic_share(total: Estimate) -> str:
    share = total.k3_kl_chaotic.value / total.k3_kl.value if total.k3_kl.value > 0 else math.nan
    return f"{100 * min(share, 1.0):.0f} %" if math.isfinite(share) else "all"


def _saturated_finding(result: Attribution) -> Finding:
    each = result.strongest_first()
    shown = ", ".join(f"{name} {e.mean_abs_d.value:.3f}" for name, e in each)
    total = result.total.mean_abs_d.value
    return Finding(
        code="gap-saturated",
        severity="notice",
        text=f"The end-to-end gap is saturated: one part left unaligned moves logprobs by {shown} nats, all together by "
        f"{total:.3f}. Mean |d| cannot rank parts; the systematic part can.",
        numbers={"mean_abs_d_all": total},
        rank=20,
    )


def _naive_finding(result: Attribution) -> Finding:
    order = sorted(result.naive.values(), key=lambda n: n.rank)
    names = [n.name for n in order]
    found = [name for name, _ in result.strongest_first() if result.decisions[name].responsible]
    shown = ", ".join(f"{n.name} {pm(n.gain.value, n.gain.se)}" for n in order)
    total = result.total.mean_abs_d.value
    largest = 100 * max(abs(n.gain.value) for n in order) / total if total else 0.0
    right = bool(found) and names[: len(found)] == found
    if not found:
        judged = f"It would name {names[0]} first, while no part is shown to be responsible"
    elif right:
        judged = (
            f"It happens to name the responsible parts first here, from gains of at most {largest:.0f} % of the gap"
        )
    else:
        judged = (
            f"It orders the parts {', '.join(names)}, while {', '.join(found)} carry the systematic part: do not use it"
        )
    return Finding(
        code="naive-ranking",
        severity="info" if right else "notice",
        text=f"For comparison, the usual ranking, by how much mean |d| of one forward falls when one part alone is aligned: {shown} nats, of {total:.3f}. {judged}.",
        numbers={n.name: n.gain.value for n in order},
        rank=21,
    )


def _interaction_findings(result: Attribution) -> list[Finding]:
    pairs = [c for c in result.interactions if len(c.parts) == 2]
    if not pairs:
        return []
    seen = [c for c in pairs if c.p_adjusted <= result.level]
    mains = {c.parts[0]: c for c in result.interactions if len(c.parts) == 1}
    shown = "; ".join(f"{' and '.join(c.parts)} {squares(c.systematic_sq)} nats²" for c in seen)
    effects = ", ".join(f"{n} {squares(c.systematic_sq)}" for n, c in mains.items())
    text = f"Two-way interactions over {pairs[0].num_points} combinations: " + (
        f"{shown}; the parts do not simply add up."
        if seen
        else f"none of {len(pairs)} pairs is above zero; the parts add up."
    )
    return [
        Finding(
            code="interactions",
            severity="notice" if seen else "info",
            text=f"{text} Main effects, averaged over the state of the others: {effects} nats².",
            numbers={" × ".join(c.parts): c.systematic_sq.value for c in result.interactions},
            rank=12,
        )
    ]
