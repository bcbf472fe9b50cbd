"""Explanations of logits and of log-probabilities. Shape legend: N tokens, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.diagnose_structure import prefix_boundary
from rpadiag.compare.explain import Context, Explanation, Pair, rel_error
from rpadiag.structure import same_values

EXACT = 2e-5  # nats: float32 log_softmax of logits up to a few hundred


def logits(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two logit matrices [N, V], after rounding identities did not explain them."""
    if pair.a.ndim != 2 or min(pair.a.shape) < 2:
        return
    a, b = pair.a.double(), pair.b.double()
    ratio = b / torch.where(a == 0, math.nan, a)
    spreads = ratio.nan_to_num(0).std(0) / ratio.nan_to_num(0).mean(0).abs().clamp_min(1e-300)
    spread = spreads.kthvalue(max(1, int(0.9 * len(spreads)))).values
    middle = ratio.nanmedian(0).values
    scaled = float(((middle - 1).abs() > 1e-3).double().mean()) > 0.5
    if (
        scaled
        and a.shape[0] >= 4
        and float(spread) < 20 * pair.unit + 1e-5
        and float(middle.std() / middle.mean().abs()) > 1e-3
    ):
        size = float(middle.median())
        text = (
            f"each vocabulary row is off by a constant factor of its own (median {size:.5g}), the same for every token -> a per-channel (dequantisation) "
            f"scale is missing on the {'B' if size > 1 else 'A'} side"
        )
        yield Explanation(
            code="vocabulary-scale", severity="semantic", text=text, proof="solved", numbers={"median_ratio": size}
        )
        return
    yield from _operands(pair, ctx)


def _operands(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """From the hidden states and the head: which operands or outputs each side rounded."""
    from rpadiag.compare.diagnose_matmul import product_forms

    h, w = ctx.tensor("h"), ctx.tensor("weight")
    if h is None or w is None or h.ndim != 2 or w.ndim != 2:
        return
    weight = w.T if w.shape[0] == pair.a.shape[-1] else w
    if h.shape[1] == weight.shape[0] and weight.shape[1] == pair.a.shape[1]:
        yield from product_forms(pair, h, weight)


def logprob(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two vectors of log-probabilities [N] of chosen tokens, with the logits they came from where these are known."""
    if pair.a.ndim == 1 and prefix_boundary(pair.a, pair.b, axis=0) is not None:
        return  # equal up to one index: the inputs change there, and nothing is wrong with the definition
    scores = _shared_logits(pair, ctx)
    if scores is None:
        yield from _one_sided(pair)
        return
    values, targets = scores
    (t_a, error_a), (t_b, error_b) = (solve_temperature(values, targets, side) for side in (pair.a, pair.b))
    if max(error_a, error_b) < EXACT and abs(math.log(t_a / t_b)) > 1e-5:
        sign = "mostly negative" if float((pair.b - pair.a).double().mean()) < 0 else "mostly positive"
        text = (
            f"logits bit-equal, one T maps the logits onto each side's log-probs exactly: solved T = {t_a:.4g} on A, T = {t_b:.4g} on B; deltas {sign} "
            "for sampled tokens -> temperature applied on one side only"
        )
        yield Explanation(
            code="temperature",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"temperature_a": t_a, "temperature_b": t_b},
        )
        return
    for this, that, side, other, t in (("B", "A", pair.b, pair.a, t_a), ("A", "B", pair.a, pair.b, t_b)):
        error = error_a if that == "A" else error_b
        if error < EXACT:
            found = list(_truncated(values / t, targets, side, other, this)) or list(
                _rounded_softmax(values, t, targets, side, this)
            )
            yield from found
            if found:
                return
    yield from _one_sided(pair)


def _shared_logits(pair: Pair, ctx: Context) -> tuple[Tensor, Tensor] | None:
    """float64 logits [N, V] that both sides had, and the chosen token of each."""
    targets = ctx.tensor("targets", like=pair.a)
    candidates = [ctx.a[s] for s in ctx.a if "logits" in s.lower() and same_values(ctx.a[s], ctx.b[s])]
    given = ctx.tensor("logits")
    if not candidates and given is not None and not any("logits" in s.lower() for s in ctx.a):
        candidates = [given]
    if targets is None or not candidates or targets.is_floating_point():
        return None
    values = candidates[0].double()
    if values.ndim != 2 or targets.ndim != 1 or values.shape[0] != targets.shape[0]:
        return None
    inside = bool(((targets >= 0) & (targets < values.shape[1])).all())
    return (values, targets.long()) if inside else None


def picked(values: Tensor, targets: Tensor) -> Tensor:
    """log_softmax of logits [N, V] at the targets [N], float64."""
    return values.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def solve_temperature(values: Tensor, targets: Tensor, logprobs: Tensor) -> tuple[float, float]:
    """(T, largest error in nats) of the temperature that best maps logits onto log-probabilities."""
    want = logprobs.double()

    def error(t: float, n: int | None = None) -> float:
        return float((picked(values[:n] / t, targets[:n]) - want[:n]).abs().mean())

    n = min(64, len(want))
    grid = [math.exp(x) for x in torch.linspace(math.log(0.05), math.log(20), 49).tolist()] + [1.0]
    start = min(grid, key=lambda t: error(t, n))
    low, high = start / 1.15, start * 1.15
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(48):
        c, d = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, d) if error(c, n) < error(d, n) else (c, high)
    found = (low + high) / 2
    for nice in (1.0, round(found, 1), round(found, 2), round(found, 3)):
        if nice > 0 and float((picked(values / nice, targets) - want).abs().max()) < EXACT:
            return nice, float((picked(values / nice, targets) - want).abs().max())
    return found, float((picked(values / found, targets) - want).abs().max())


def _truncated(values: Tensor, targets: Tensor, side: Tensor, other: Tensor, name: str) -> Iterator[Explanation]:
    """One side is renormalised over the tokens that top-p, top-k or min-p kept: delta = -log(kept mass)."""
    delta = side.double() - other.double()
    if float(delta.min()) < -EXACT or float(delta.max()) < 1e-4:
        return
    mass = (-delta).exp()
    probs, _ = values.softmax(-1).sort(-1, descending=True)
    cumulative = probs.cumsum(-1)
    error, count = (cumulative - mass[:, None]).abs().min(-1)
    if float(error.max()) > 1e-4:
        return
    kept = count + 1
    rows = torch.arange(len(kept))
    before = torch.where(count > 0, cumulative[rows, (count - 1).clamp_min(0)], 0.0)
    low, high = float(before.max()), float(mass.min())
    smallest, first_out = (
        probs[rows, count] / probs[:, 0],
        probs[rows, (count + 1).clamp_max(probs.shape[1] - 1)] / probs[:, 0],
    )
    if bool((kept == kept[0]).all()):
        rule = f"top-k with k = {int(kept[0])} (solved)"
    elif low <= high + 1e-6:
        rule = f"top-p with p in ({low:.4f}, {high:.4f}] (solved: {round((low + high) / 2, 2):g})"
    elif float(first_out.max()) <= float(smallest.min()) + 1e-9:
        rule = f"min-p of {float(smallest.min()):.3g} (solved)"
    else:
        rule = "a truncated support"
    way = "delta >= 0 at every token" if name == "B" else "delta <= 0 at every token"
    text = (
        f"logits equal, {way} and equals -log(kept mass) exactly: {name} is renormalised over {rule}, the other side over the full vocabulary; mean ratio "
        f"exp(A - B) is the kept mass, {float(mass.mean()):.3g}"
    )
    yield Explanation(
        code="truncated-support",
        severity="semantic",
        text=text,
        proof="solved",
        numbers={"side": name, "mean_mass": float(mass.mean())},
    )


def _rounded_softmax(values: Tensor, t: float, targets: Tensor, side: Tensor, name: str) -> Iterator[Explanation]:
    """log_softmax computed in, or on logits rounded to, a 16-bit type."""
    for dtype, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        rounded = (values / t).float().to(dtype)
        twice = (values.float().to(dtype).float() / t).to(dtype)
        once = values.float().to(dtype).double() / t
        forms = {
            f"log_softmax of {word} logits divided by T in {word}": picked(twice.double(), targets),
            f"log_softmax of {word} logits divided by T in fp32": picked(once, targets),
            f"log_softmax of logits rounded to {word}": picked(rounded.double(), targets),
            f"log_softmax computed in {word}": rounded.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double(),
        }
        for how, expected in forms.items():
            if rel_error(side, expected) < 1e-6:
                text = f"{name} is {how}, the other side is float32"
                yield Explanation(
                    code="rounded-softmax",
                    severity="rounding-contract",
                    text=text,
                    proof="identity",
                    numbers={"side": name},
                )
                return


def _one_sided(pair: Pair) -> Iterator[Explanation]:
    delta = (pair.b.double() - pair.a.double()).reshape(-1)
    if len(delta) >= 16 and (float(delta.min()) >= 0 or float(delta.max()) <= 0) and float(delta.abs().mean()) > 1e-4:
        way = ">= 0" if float(delta.min()) >= 0 else "<= 0"
        spread = float(delta.std() / delta.abs().mean())
        what = (
            "a constant (a penalty, or another normaliser)"
            if spread < 1e-3
            else "a truncated support (top-p, top-k) or masked tokens on one side"
        )
        text = f"delta {way} at every token (mean {float(delta.mean()):+.4g} nats): one-sided, as from {what}"
        yield Explanation(
            code="one-sided-logprob",
            severity="semantic",
            text=text,
            proof="structure",
            numbers={"mean": float(delta.mean())},
        )
