"""Explanations of matrix products: rounded operands, partial sums, outputs. Shape legend: [M, K] @ [K, N]."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rpadiag.compare.diagnose_identity import drop_mantissa, round_tf32
from rpadiag.compare.explain import Context, Explanation, Pair, percent, rel_error

MAX_COLUMNS = 512  # output columns that are recomputed
SPLITS = (2, 4, 8, 16)
CLOSE = 0.02  # share of elements a form may miss: the accumulation order of the real kernel is not known


def product(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two outputs of a linear layer, from its input and weight."""
    x, w = ctx.tensor("x", pair.site), ctx.tensor("weight", pair.site)
    if x is None or w is None or x.ndim != 2 or w.ndim != 2:
        return
    if w.shape[0] != x.shape[1] or w.shape[1] != pair.a.shape[-1]:
        w = w.T
    if w.shape[0] == x.shape[1] and pair.a.shape == (x.shape[0], w.shape[1]):
        bias = ctx.tensor("bias", pair.site)
        yield from product_forms(pair, x, w, bias if bias is not None and bias.shape == (w.shape[1],) else None)


def _exact(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double()).float()


def forms(x: Tensor, w: Tensor, out: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Known ways to compute a product and store it in ``out``; the accumulation is exact."""

    def rounded_partials(splits: int, dtype: torch.dtype) -> Tensor:
        step = x.shape[1] // splits
        total = torch.zeros(x.shape[0], w.shape[1])
        for i in range(splits):
            total = (
                (total + _exact(x[:, i * step : (i + 1) * step], w[i * step : (i + 1) * step]).to(dtype).float())
                .to(dtype)
                .float()
            )
        return total.to(out)

    lp = out if out in (torch.bfloat16, torch.float16) else torch.bfloat16
    name = "fp16" if lp == torch.float16 else "bf16"
    ways: dict[str, Callable[[], Tensor]] = {
        "one rounding of the full-K sum": lambda: _exact(x, w).to(out),
        "operands truncated to TF32": lambda: _exact(drop_mantissa(x, 10), drop_mantissa(w, 10)).to(out),
        "operands rounded to TF32": lambda: _exact(round_tf32(x), round_tf32(w)).to(out),
        f"operands rounded to {name}": lambda: _exact(x.float().to(lp), w.float().to(lp)).to(out),
        f"weight rounded to {name}": lambda: _exact(x, w.float().to(lp)).to(out),
        f"input rounded to {name}": lambda: _exact(x.float().to(lp), w).to(out),
        f"output rounded to {name}": lambda: _exact(x, w).to(lp).to(out),
    }
    for splits in SPLITS:
        if x.shape[1] % splits == 0 and x.shape[1] // splits >= 8:
            ways[f"{splits} partial sums, each rounded to {name} before they are added"] = lambda n=splits: (
                rounded_partials(n, lp)
            )  # type: ignore[misc]
    return ways


def with_bias(x: Tensor, w: Tensor, bias: Tensor, out: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Ways to add a bias."""
    return {
        "bias added in fp32, one rounding": lambda: (_exact(x, w) + bias.float()).to(out),
        "bias added after the product was rounded": lambda: (_exact(x, w).to(out).float() + bias.float()).to(out),
        "no bias": lambda: _exact(x, w).to(out),
    }


def product_forms(pair: Pair, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Iterator[Explanation]:
    """Which known way each side follows, if their ways differ."""
    columns = slice(0, min(MAX_COLUMNS, w.shape[1]))
    sides = pair.a[:, columns], pair.b[:, columns]
    if rel_error(sides[1], sides[0]) < 2e-6 and not pair.lp:
        return
    found: list[tuple[str, float]] = [("", 2.0), ("", 2.0)]
    out = pair.a.dtype if pair.lp else torch.float32
    ways = forms(x, w[:, columns], out) if bias is None else with_bias(x, w[:, columns], bias[columns], out)
    for name, compute in ways.items():
        value = compute()
        for i, side in enumerate(sides):
            misses = float((value != side.to(out)).double().mean()) if pair.lp else rel_error(side, value) / 2e-6
            if misses < found[i][1] - (0.005 if found[i][0] else 0):
                found[i] = (name, misses)
    (form_a, miss_a), (form_b, miss_b) = found
    limit = CLOSE if pair.lp else 1.0
    if form_a == form_b or max(miss_a, miss_b) > limit:
        return
    c = pair.change
    split = "partial sums" in form_a or "partial sums" in form_b
    where = " (a row-parallel output: o_proj or down_proj; column-parallel GEMMs are equal)" if split else ""
    tail = (
        f"; {percent(c.differing)} of {c.n:,} elements differ, few ULP, larger where partials cancel"
        if split
        else f"; {percent(c.differing)} of {c.n:,} elements differ"
    )
    text = f"A is {form_a}, B is {form_b}{where}{tail}, unbiased"
    proof = "identity" if max(miss_a, miss_b) == 0 else "solved"
    severity = "semantic" if "no bias" in (form_a, form_b) else "rounding-contract"
    yield Explanation(
        code="product-form",
        severity=severity,
        text=text,
        proof=proof,
        numbers={"form_a": form_a, "form_b": form_b},
    )
