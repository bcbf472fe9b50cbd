"""Explanations of a mixture-of-experts router. Shape legend: N tokens, E experts, K chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.explain import Context, Explanation, Pair, percent, rel_error
from rpadiag.structure import same_values


def experts(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Chosen experts [N, K]: which tokens flipped, and were they ties?"""
    a, b = pair.a.long(), pair.b.long()
    sets_a, sets_b = a.sort(-1).values, b.sort(-1).values
    changed = (sets_a != sets_b).reshape(len(a), -1).any(-1)
    n = int(changed.sum())
    if n == 0:
        text = "the same experts in another order: only the order of summation changes"
        yield Explanation(code="expert-order", severity="ulp-noise", text=text, proof="identity")
        return
    scores = _scores(ctx, len(a))
    text = f"moe router: {n:,} of {len(a):,} tokens ({percent(n / len(a))}) choose another expert set"
    ties = None
    if scores is not None and a.ndim == 2 and a.shape[-1] < scores.shape[-1]:
        top = scores.double().sort(-1, descending=True).values
        k = a.shape[-1]
        margin = ((top[:, k - 1] - top[:, k]) / top[:, k - 1].abs().clamp_min(1e-300))[changed]
        ties = float(margin.max())
        if ties < 2**-6:
            text += f"; every changed token is a tie or near-tie at the k-th place (largest relative margin {ties:.1e})"
    severity = "rounding-contract" if ties is not None and ties < 2**-6 else "semantic"
    text += "; discrete flips downstream, so rank by flipped tokens, not ULP"
    yield Explanation(
        code="expert-flips",
        severity=severity,
        text=text,
        proof="solved",
        numbers={"num_flipped": n, "largest_margin": ties},
    )


def _scores(ctx: Context, rows: int) -> Tensor | None:
    names = [s for s in ctx.a if any(w in s.lower() for w in ("prob", "logit", "score"))]
    for name in reversed(names):
        if ctx.a[name].ndim == 2 and ctx.a[name].shape[0] == rows:
            return ctx.a[name]
    given = ctx.tensor("logits")
    return given if given is not None and given.ndim == 2 and given.shape[0] == rows else None


def combine(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Combine weights [N, K] of the chosen experts."""
    a, b = pair.a.double(), pair.b.double()
    sum_a, sum_b = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)
    logits, ids = ctx.tensor("logits"), _ids(ctx, pair)
    fits_logits = (
        logits is not None
        and ids is not None
        and logits.ndim == ids.ndim == 2
        and len(logits) == len(ids)
        and _in_range(ids, logits.shape[-1])
    )
    sources = _sources(logits, ids) if fits_logits and logits is not None and ids is not None else {}
    names = []
    for side in (a, b):
        fits = [name for name, value in sources.items() if rel_error(side, value) < max(4 * pair.unit, 1e-5)]
        names.append(fits[0] if fits else "")
    if names[0] and names[1] and names[0] != names[1]:
        raw = (
            "; the weights of one side are not a distribution (sum > 1, can be negative)"
            if "raw logits" in names
            else ""
        )
        text = f"moe router: expert ids equal, A's combine weights are {names[0]}, B's are {names[1]}{raw}"
        yield Explanation(
            code="combine-weights",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"source_a": names[0], "source_b": names[1]},
        )
        return
    if rel_error(b, a * ((a * b).sum() / a.square().sum())) < max(4 * pair.unit, 1e-6):
        return  # one factor for all (a routed scaling factor): the gain says it
    for this, x, y, total in (("B", b, a, sum_a), ("A", a, b, sum_b)):
        if rel_error(x, y / total) < max(4 * pair.unit, 1e-5) and rel_error(y, y / total) > 1e-3:
            text = f"moe router: {this}'s combine weights are the other side's, renormalised to sum to 1"
            yield Explanation(
                code="renormalised", severity="semantic", text=text, proof="solved", numbers={"side": this}
            )
            return
    yield from _selection_bias(ids, a, b)
    if (float(sum_b.max()) > 1.01 and float(sum_a.max()) <= 1.001) or float(b.min()) < 0 <= float(a.min()):
        text = f"moe router: B's combine weights are not a distribution (sums {float(sum_b.min()):.3g} to {float(sum_b.max()):.3g}, smallest weight {float(b.min()):.3g}): raw router logits or a missing softmax"
        yield Explanation(
            code="combine-weights",
            severity="semantic",
            text=text,
            proof="structure",
            numbers={"max_sum": float(sum_b.max())},
        )


def _selection_bias(ids: Tensor | None, a: Tensor, b: Tensor) -> Iterator[Explanation]:
    """B - A is one constant per expert: the bias that only selects leaked into the weights."""
    if ids is None:
        return
    flat, delta = ids.reshape(-1), (b - a).reshape(-1)
    count = torch.zeros(int(flat.max()) + 1, dtype=torch.float64).index_add_(0, flat, torch.ones_like(delta))
    mean = torch.zeros_like(count).index_add_(0, flat, delta) / count.clamp_min(1)
    if float((delta - mean[flat]).abs().max()) < 1e-4 * float(delta.abs().max()) and float(delta.std()) > 0:
        text = "moe router: expert ids equal, weights differ by one constant per expert: the selection bias is added to the combine weights on one side"
        yield Explanation(code="selection-bias", severity="semantic", text=text, proof="solved")


def _ids(ctx: Context, pair: Pair) -> Tensor | None:
    for name, value in {**ctx.inputs, **ctx.a}.items():
        if (
            isinstance(value, Tensor)
            and not value.is_floating_point()
            and value.shape == pair.a.shape
            and not _differs(ctx, name)
        ):
            return value.long()
    return None


def _in_range(ids: Tensor, num_experts: int) -> bool:
    return bool(((ids >= 0) & (ids < num_experts)).all())


def _differs(ctx: Context, name: str) -> bool:
    return name in ctx.a and not same_values(ctx.a[name], ctx.b[name])


def _sources(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    values = logits.double()
    chosen = values.gather(-1, ids)
    soft, sigmoid = values.softmax(-1).gather(-1, ids), values.sigmoid().gather(-1, ids)
    return {
        "the softmax over all experts, gathered": soft,
        "raw logits": chosen,
        "the softmax over the chosen experts (renormalised)": chosen.softmax(-1),
        "sigmoid scores": sigmoid,
        "sigmoid scores, renormalised": sigmoid / sigmoid.sum(-1, keepdim=True),
        "uniform": torch.full_like(chosen, 1 / ids.shape[-1]),
    }
