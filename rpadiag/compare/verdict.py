"""From evidence to one of four answers: identical, rounding only, different computation, not comparable.

End-to-end numbers of a 16-bit forward decide nothing: one flipped ULP anywhere moves every later logprob as far as
all differences together. The decision rests on, in this order: what both sides were given (weights, tokens, positions),
bitwise equality, the FP32 control, where rounding vanishes and mistakes stay, and the local divergence of each operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rpadiag.compare.causes import QUANTISED_WEIGHTS
from rpadiag.compare.evidence import (
    FP32_LOCAL_REL_L2,
    FP32_MEAN_ABS_D,
    LP_LOCAL_REL_L2,
    Evidence,
    suspects,
)
from rpadiag.compare.experts import flip_findings
from rpadiag.compare.verdict_causes import beyond_in_fp32, config_differs, named_cause, other_logprobs, without_local
from rpadiag.findings import Finding, Verdict
from rpadiag.sites import region_of, split_site, telling_points

NOTABLE_LOCAL = 1e-3
# Rounding at another point leaves magnitudes balanced within a few per cent; truncation against rounding gives 1.
ONE_SIDED_BALANCE = 0.8
MIN_ONE_SIDED = 100


def decide(evidence: Evidence) -> Verdict:
    """The verdict, with its evidence most telling first."""
    rules = (
        _not_comparable, _identical, other_logprobs, _not_finite, named_cause, _mistake_in_fp32, _mistake_in_lp, config_differs, _without_local,
    )  # fmt: skip
    verdict = next((v for rule in rules if (v := rule(evidence)) is not None), None) or _rounding_only(evidence)
    named = [f for f in evidence.causes if f not in verdict.evidence]
    if verdict.kind != "not comparable":
        named += flip_findings(evidence.aggregate, evidence.control.aggregate)
    return replace(verdict, evidence=(*verdict.evidence, *named))


def _without_local(e: Evidence) -> Verdict | None:
    verdict = without_local(e)
    if verdict is None:
        return None
    control = () if e.control.aggregate is None else (_control_finding(e),)
    found = (*control, *_one_sided_findings(e), *_local_findings(e), *_position_findings(e))
    return replace(verdict, evidence=(*verdict.evidence, *found))


def _not_comparable(e: Evidence) -> Verdict | None:
    if e.weights_differing:
        named = ", ".join(e.weights_differing[:3])
        more = f" and {len(e.weights_differing) - 3} more" if len(e.weights_differing) > 3 else ""
        quantised = tuple(f for f in e.causes if f.code == QUANTISED_WEIGHTS)
        advice = "Load the same checkpoint on both sides, or sync the weights, before looking at numerics."
        return Verdict(
            kind="not comparable",
            sentence=f"Not comparable: {len(e.weights_differing)} weight tensors differ between the stacks ({named}{more}). "
            + (quantised[0].text if quantised else advice),
            evidence=(
                *quantised,
                Finding(
                    code="weights-differ",
                    severity="error",
                    text=f"Weights differ: {named}{more}.",
                    numbers={"num_tensors": len(e.weights_differing), "tensors": list(e.weights_differing[:20])},
                    rank=0,
                ),
            ),
        )
    if e.positions.kind == "different":
        return Verdict(
            kind="not comparable",
            sentence=f"Not comparable: the stacks used different positions (first at prompt {e.positions.prompt}, token {e.positions.index}), "
            "and not by a constant shift. Fix position_ids (padding side, packing) first.",
            site="layers.0.q_rope",
        )
    return None


def _identical(e: Evidence) -> Verdict | None:
    if e.max_abs_d != 0.0 or e.aggregate.first_divergent() is not None:
        return None
    return Verdict(
        kind="identical",
        sentence=f"Identical: every captured site and all {e.num_tokens:,} logprobs agree to the last bit. Nothing to align.",
        evidence=tuple(_position_findings(e)),
    )


def _not_finite(e: Evidence) -> Verdict | None:
    """NaN or infinity on one side: no mean means anything then."""
    for made_here in (True, False):
        for site, entry in e.aggregate.sites.items():
            stats = entry.local if made_here else entry.total
            if stats is None or stats.num_nonfinite_mismatch == 0:
                continue
            how = "although it was fed the same input" if made_here else "first in execution order"
            return Verdict(
                kind="different computation",
                sentence=f"Different computation at {site} ({region_of(site)}): {stats.num_nonfinite_mismatch:,} of {stats.n:,} elements are "
                f"NaN or infinite on one side only (trainer {stats.num_nonfinite_a:,}, rollout {stats.num_nonfinite_b:,}), {how}. "
                "Look for an overflow (float16 ends at 65504) or an empty reduction there.",
                site=site,
                evidence=(
                    Finding(
                        code="non-finite",
                        severity="error",
                        text=f"{site}: {stats.num_nonfinite_mismatch:,} elements are NaN or infinite on one side only.",
                        site=site,
                        region=region_of(site),
                        numbers={"trainer": stats.num_nonfinite_a, "rollout": stats.num_nonfinite_b, "n": stats.n},
                        rank=0,
                    ),
                ),
            )
    if e.num_nonfinite == 0:
        return None
    return Verdict(
        kind="inconclusive",
        sentence=f"No answer: {e.num_nonfinite:,} of {e.num_tokens:,} logprobs are not finite on one side or both, so no mean can be taken.",
        site=e.aggregate.first_divergent(),
    )


def _mistake_in_fp32(e: Evidence) -> Verdict | None:
    control = e.control
    if control.aggregate is None or control.mean_abs_d is None:
        return None
    found = suspects(control.aggregate, FP32_LOCAL_REL_L2, positions=e.positions)
    if not found and control.mean_abs_d <= FP32_MEAN_ABS_D:
        return None
    fp32 = f"FP32 logprobs differ by {control.mean_abs_d:.1e} nats (n = {control.num_tokens:,}), where rounding would leave about 1e-5"
    if not found:
        first, where = beyond_in_fp32(e)
        return Verdict(
            kind="different computation",
            sentence=f"Different computation: {fp32}, {where}.",
            site=first,
            evidence=(_control_finding(e),),
        )
    site, rel = found[0]
    explained = tuple(f for f in control.explained if f.site == site)
    what = f" What it looks like: {explained[0].text.rstrip('.')}." if explained else ""
    return Verdict(
        kind="different computation",
        sentence=f"Different computation at {site} ({region_of(site)}): in FP32 and fed the same input, its output is off by "
        f"{rel:.1e} (relative L2), a {_times(rel / FP32_LOCAL_REL_L2)} the limit for rounding. {fp32}. Check this operation's "
        f"{_suspicion(site)} before aligning anything.{what}",
        site=site,
        evidence=(*explained, _control_finding(e), *_suspect_findings(found, "fp32"), *_position_findings(e)),
    )


def _mistake_in_lp(e: Evidence) -> Verdict | None:
    found = suspects(e.aggregate, LP_LOCAL_REL_L2[e.dtype], positions=e.positions)
    if not found:
        return None
    site, rel = found[0]
    only_here = "" if e.control.aggregate is None else f" In FP32 it agrees, so the mistake is in its {e.dtype} path."
    return Verdict(
        kind="different computation",
        sentence=f"Different computation at {site} ({region_of(site)}): fed the same input, its {e.dtype} output is off by {rel:.1e} "
        f"(relative L2), more than rounding can do.{only_here} Check this operation's {_suspicion(site)}.",
        site=site,
        evidence=(_control_finding(e), *_suspect_findings(found, e.dtype), *_position_findings(e)),
    )


def _rounding_only(e: Evidence) -> Verdict:
    made = {
        r: s
        for r, s in sorted(e.aggregate.local_by_region().items(), key=lambda item: -item[1].differing)
        if s.differing >= NOTABLE_LOCAL and r != "sampling"
    }
    named = ", ".join(
        f"{_label(r)} ({100 * s.differing:.0f} % of elements)" for r, s in made.items() if s.differing >= 0.01
    )
    cause = (
        f"because they round at different points; it is made in {named}"
        if named
        else "by less than 1 % of any operation's elements, as another order of accumulation does"
    )
    if e.control.aggregate is not None and e.control.mean_abs_d is not None:
        proof = f"in FP32 the stacks agree to {e.control.mean_abs_d:.0e} nats"
    else:
        proof = f"no operation is off by more than rounding, but without an FP32 control ({e.control.reason}) a small mistake could hide"
    biased = _one_sided_findings(e)
    if biased:
        cause += f"; {' and '.join(_label(str(f.region)) for f in biased)} {'is' if len(biased) == 1 else 'are'} truncated, not rounded to nearest"
    return Verdict(
        kind="rounding only",
        sentence=f"Rounding only: trainer and {e.rollout} compute the same function ({proof}) and differ by {e.mean_abs_d:.3f} nats per token "
        f"(mean |d|, {e.counted}) {cause}.",
        site=e.aggregate.first_divergent(),
        evidence=(_control_finding(e), *biased, *_local_findings(e), *_position_findings(e)),
    )


def _suspicion(site: str) -> str:
    return {
        "rmsnorm": "epsilon, weight offset and residual input",
        "rope": "base (theta), scaling, inv_freq dtype, layout and positions",
        "swiglu": "activation function and gate/up order",
        "qk_norm": "epsilon and its order with RoPE",
        "attention": "mask, sliding window, softmax scale and KV-cache dtype",
        "matmul": "weights, bias and quantisation scales",
        "all_reduce": "number of ranks, and a rank that is counted twice or not at all",
        "geglu": "activation function (GELU exact or by tanh) and gate/up order",
        "experts": "choice of experts, normalisation of their weights, activation and expert order",
        "lm_head": "weights, logit scaling and soft-capping",
        "embed": "token ids and embedding scale",
        "sampling": "temperature and top-p/top-k normalisation",
    }[region_of(site)]


def _times(factor: float) -> str:
    return f"factor of {factor:.0f} over" if factor >= 2 else "little over"


def _label(region: str) -> str:
    return {"rmsnorm": "residual RMSNorm", "rope": "RoPE", "swiglu": "SwiGLU", "geglu": "GeGLU"}.get(region, region)


def _control_finding(e: Evidence) -> Finding:
    if e.control.aggregate is None or e.control.mean_abs_d is None:
        return Finding(
            code="fp32-control-absent",
            severity="notice",
            text=f"No FP32 control: {e.control.reason}.",
            rank=5,
        )
    worst = max(
        ((s, st.rel_l2) for s, st in e.control.aggregate.locals() if split_site(s)[1] != "logprob"),
        key=lambda item: item[1],
        default=(None, 0.0),
    )
    return Finding(
        code="fp32-control",
        severity="info",
        text=f"FP32 control: mean |d| {e.control.mean_abs_d:.1e} nats (n = {e.control.num_tokens:,}) against {e.mean_abs_d:.1e} in {e.dtype}; "
        f"largest local relative L2 {worst[1]:.1e} at {worst[0]}.",
        site=worst[0],
        numbers={
            "mean_abs_d_fp32": e.control.mean_abs_d,
            "mean_abs_d": e.mean_abs_d,
            "max_local_rel_l2_fp32": worst[1],
            "num_tokens": e.control.num_tokens,
        },
        rank=2,
    )


def _local_findings(e: Evidence) -> list[Finding]:
    out = []
    by_point = e.aggregate.local_by_point()
    ranked = sorted(e.aggregate.local_by_region().items(), key=lambda item: -item[1].differing)
    for n, (region, stats) in enumerate(ranked):
        if region == "sampling":
            continue
        points = ", ".join(p for p in telling_points(region) if p in by_point)
        text = (
            f"{_label(region)} makes {_percent(stats.differing)} of its elements differ when fed the same input "
            f"(n = {stats.n:,} of {points}, largest {stats.max_ulp:,} ULP)."
        )
        rank = 1 if n == 0 else 3 + n
        if not stats.num_differing:  # told after all that make something
            rank = 20 + n
            text = (
                f"{_label(region)} makes no difference when fed the same input (0 of {stats.n:,} elements of {points})."
            )
        out.append(
            Finding(
                code="local-divergence",
                severity="info",  # rounding at another point is what stacks are expected to do; mistakes have findings of their own
                region=region,
                text=text,
                numbers={"local_differing": stats.differing, "n": stats.n, "max_ulp": stats.max_ulp},
                rank=rank,
            )
        )
    return out


def _one_sided_findings(e: Evidence) -> list[Finding]:
    """Regions whose local differences all point one way in magnitude: a store that truncates, not one that rounds elsewhere."""
    out = []
    for region, stats in e.aggregate.local_by_region().items():
        balance = stats.magnitude_balance
        if region == "sampling" or stats.num_differing < MIN_ONE_SIDED or not abs(balance) >= ONE_SIDED_BALANCE:
            continue
        side = e.rollout if balance < 0 else "the trainer"
        out.append(
            Finding(
                code="one-sided-rounding",
                severity="notice",
                region=region,
                text=f"{side} truncates in {_label(region)}: {100 * abs(balance):.1f} % (net) of {stats.num_differing:,} local differences "
                f"point toward zero on its side. Rounding at another point would be balanced; truncation is biased and adds up with depth.",
                numbers={"magnitude_balance": balance, "num_differing": stats.num_differing},
                rank=1,
            )
        )
    return out


def _percent(share: float) -> str:
    if share == 0.0:
        return "0 %"
    return f"{100 * share:.1f} %" if share >= 1e-3 else f"{100 * share:.2g} %"


def _suspect_findings(suspects: Sequence[tuple[str, float]], precision: str) -> list[Finding]:
    return [
        Finding(
            code="local-mistake",
            severity="error",
            site=site,
            region=region_of(site),
            text=f"{site}: relative L2 {rel:.1e} in {precision} when fed the same input.",
            numbers={"local_rel_l2": rel},
            rank=n,
        )
        for n, (site, rel) in enumerate(suspects[:5])
    ]


def _position_findings(e: Evidence) -> list[Finding]:
    if e.positions.kind == "unobserved":
        text = "Positions were not observed on one of the stacks; that they agree is an assumption."
        return [Finding(code="positions-unobserved", severity="notice", text=text, region="rope", rank=6)]
    if e.positions.kind != "shifted":
        return []
    shift = "a constant" if e.positions.uniform else "a constant of its own in each sequence, at most"
    return [
        Finding(
            code="positions-shifted",
            severity="notice",
            text=f"Positions differ by {shift} {e.positions.offset:+d} (trainer minus rollout). RoPE only sees differences of positions, "
            "so this is harmless; q_rope and k_rope are not comparable.",
            region="rope",
            numbers={"offset": e.positions.offset},
            rank=1,
        )
    ]
