"""Verdicts where something other than the measurement decides: a cause that the stacks name, or evidence that is not there."""

from __future__ import annotations

from collections.abc import Sequence

from rpadiag.compare.causes import CONFIG_DIFFERS, PROCESSED_LOGPROBS, QUANTISED_CACHE, QUANTISED_WEIGHTS, REACHES
from rpadiag.compare.evidence import (
    FP32_LOCAL_REL_L2,
    FP32_MEAN_ABS_D,
    LP_LOCAL_REL_L2,
    Evidence,
    first_beyond,
    suspects,
)
from rpadiag.findings import Finding, Verdict
from rpadiag.sites import split_site

MAX_NAMED = 3
_WORDS = {
    QUANTISED_WEIGHTS: "weights quantised with {method}",
    QUANTISED_CACHE: "a KV cache in {cache_dtype}",
}


def named_cause(e: Evidence) -> Verdict | None:
    """Quantised weights or KV cache: the difference has this cause, and what it does not reach is looked at apart."""
    quantised = [f for f in e.causes if f.code in _WORDS]
    if not quantised:
        return None
    words = " and ".join(_WORDS[f.code].format(**f.numbers) for f in quantised)
    reached = {point for f in quantised for point in REACHES[f.code]}
    fp32 = e.control.aggregate
    off = [] if fp32 is None else suspects(fp32, FP32_LOCAL_REL_L2, positions=e.positions)
    off += suspects(e.aggregate, LP_LOCAL_REL_L2[e.dtype], positions=e.positions)
    others = list(dict.fromkeys(site for site, _ in off if split_site(site)[1] not in reached))
    beside = (
        f" Beside it, {others[0]} is off by more than rounding when fed the same input, which this does not explain."
        if others
        else ""
    )
    return Verdict(
        kind="different computation",
        sentence=f"Different computation: one stack runs with {words}, the other does not. The logprobs differ by {e.mean_abs_d:.3f} nats per "
        f"token (mean |d|, {e.counted}); this is quantisation, not rounding, and aligning rounding positions does not remove it. "
        f"To see rounding alone, compare without it.{beside}",
        site=others[0] if others else None,
        evidence=tuple(quantised) + _config_findings(e),
    )


def other_logprobs(e: Evidence) -> Verdict | None:
    """The rollout handed out logprobs of the distribution that it sampled from: a question of semantics, not of numerics."""
    found = tuple(f for f in e.causes if f.code == PROCESSED_LOGPROBS)
    if not found:
        return None
    return Verdict(
        kind="different computation",
        sentence=f"Different computation at logprob (sampling): {_lower(found[0].text)} No rounding position closes a gap that this makes: "
        f"take raw_logprobs from vLLM, or divide the trainer's logits by the temperature. Together the logprobs differ by "
        f"{e.mean_abs_d:.3f} nats per token (mean |d|, {e.counted}).",
        site="logprob",
        evidence=found,
    )


def tokens_differ(words: Sequence[str]) -> Verdict:
    """The two sides were given different tokens: ``words`` has a line for each prompt that differs."""
    more = f"; and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    named = "; ".join(words[:MAX_NAMED]) + more
    finding = Finding(
        code="tokens-differ",
        severity="error",
        text=f"Tokens differ: {named}.",
        numbers={"num_prompts": len(words), "prompts": list(words[:20])},
        rank=0,
    )
    return Verdict(
        kind="not comparable",
        sentence=f"Not comparable: the stacks were not given the same tokens: {named}. Capture one stack on the other's bundle: "
        "rpadiag capture MODEL BUNDLE takes its tokens, generated ones included.",
        evidence=(finding,),
    )


def config_differs(e: Evidence) -> Verdict | None:
    """The stacks' configurations differ, and no measurement has already said where."""
    found = _config_findings(e)
    if not found:
        return None
    return Verdict(
        kind="different computation",
        sentence=f"Different computation: {_lower(found[0].text)} The logprobs differ by {e.mean_abs_d:.3f} nats per token "
        f"(mean |d|, {e.counted}). Give both stacks the same configuration first.",
        site=e.aggregate.first_divergent(),
        evidence=found,
    )


def without_local(e: Evidence) -> Verdict | None:
    """Bundles without the trainer's operations: the FP32 control decides alone, and without it nothing does."""
    if e.no_local is None:
        return None
    first = e.aggregate.first_divergent()
    where = f"the first site that differs is {first}" if first else "no captured site differs, only the scores"
    gap = f"in {e.dtype} they differ by {e.mean_abs_d:.3f} nats per token (mean |d|, {e.counted})"
    note = Finding(
        code="local-absent",
        severity="notice",
        text=f"Local divergence was measured only where all inputs of a site are equal to the bit: {e.no_local}.",
        rank=4,
    )
    if e.control.mean_abs_d is not None and e.control.mean_abs_d <= FP32_MEAN_ABS_D:
        return Verdict(
            kind="rounding only",
            sentence=f"Rounding only: trainer and {e.rollout} agree {_closeness(e.control.mean_abs_d)} in FP32 (n = {e.control.num_tokens:,}), so they "
            f"compute the same function; {gap}, {where}. Which operations make it was not measured, so a mistake in the {e.dtype} path alone "
            "could hide.",
            site=first,
            evidence=(note,),
        )
    return Verdict(
        kind="inconclusive",
        sentence=f"Inconclusive: trainer and {e.rollout} were given the same tokens; {gap}, {where}. Whether by rounding or by a mistake "
        f"cannot be told: there is no FP32 control ({e.control.reason}), and no local divergence ({e.no_local}).",
        site=first,
        evidence=(note,),
    )


def beyond_in_fp32(e: Evidence) -> tuple[str | None, str]:
    """(site, words) of where FP32 first goes apart, for a mistake that no local divergence points at."""
    assert e.control.aggregate is not None
    if e.no_local is None:
        first = e.control.aggregate.first_divergent()
        return first, "yet no single operation explains it; look at what both sides were given"
    found = first_beyond(e.control.aggregate, FP32_LOCAL_REL_L2)
    if found is None:
        return None, "yet every captured site agrees; look at the head and at how the stacks score tokens"
    site, rel = found
    return (
        site,
        f"and the first site that is off there is {site} (relative L2 {rel:.1e}): look at it and at what it reads",
    )


def _config_findings(e: Evidence) -> tuple[Finding, ...]:
    return tuple(f for f in e.causes if f.code == CONFIG_DIFFERS)


def _closeness(mean_abs_d: float) -> str:
    return "to the bit" if mean_abs_d == 0.0 else f"to {mean_abs_d:.0e} nats"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
