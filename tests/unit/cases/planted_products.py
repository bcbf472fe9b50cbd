"""Planted faults of attention and of matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted import BF16, case, lp, normal
from torch import Tensor

# --- attention -------------------------------------------------------------------------------------------------------

HEADS, TOKENS_SEEN = 2, 96


def qkv(d: int = 64) -> dict[str, Any]:
    return {name: normal(60 + i, HEADS, TOKENS_SEEN, d) for i, name in enumerate("qkv")}


def attended(
    given: dict[str, Any], *, window: int | None = None, causal: bool = True, scale: float | None = None, low: str = ""
) -> Tensor:
    q, k, v = (given[n].double() for n in "qkv")
    s = q.shape[-1] ** -0.5 if scale is None else scale
    i = torch.arange(q.shape[1])
    seen = (i[None] <= i[:, None]) if causal else torch.ones(len(i), len(i), dtype=torch.bool)
    if window:
        seen = seen & (i[:, None] - i[None] < window)
    scores = lp(q * s).double() @ k.mT if low == "query" else (q @ k.mT) * s
    p = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return ((lp(p).double() if low == "probs" else p) @ v).float().to(BF16)


def attention(a: dict[str, Any], b: dict[str, Any], d: int = 64) -> Any:
    given = qkv(d)
    return {"attn_out": attended(given, **a)}, {"attn_out": attended(given, **b)}, given


@case(
    "attention-window-one-more",
    "attention",
    "semantic",
    "attn_out",
    "rows 0..31 bit-equal, every row from 32 on differs",
    "one extra key at distance 32",
)
def _() -> Any:
    return attention({"window": 32}, {"window": 33})


@case(
    "attention-window-missing",
    "attention",
    "semantic",
    "attn_out",
    "rows 0..39 bit-equal, every row from 40 on differs",
)
def _() -> Any:
    return attention({"window": 40}, {})


@case("attention-window-without-inputs", "attention", "semantic", "attn_out", "rows 0..30 bit-equal")
def _() -> Any:
    a, b, _ = attention({"window": 32}, {"window": 31})
    return a, b, {}


@case("attention-not-causal", "attention", "semantic", "attn_out", "without a causal mask")
def _() -> Any:
    return attention({}, {"causal": False})


@case("attention-unscaled", "attention", "semantic", "attn_out", "without a scale")
def _() -> Any:
    return attention({}, {"scale": 1.0})


@case("attention-probabilities-rounded", "attention", "rounding-contract", "attn_out", "probabilities rounded to bf16")
def _() -> Any:
    return attention({}, {"low": "probs"})


@case(
    "attention-scaled-query-rounded",
    "attention",
    "rounding-contract",
    "attn_out",
    "pre-scaled query rounding",
    "head_dim 128",
)
def _() -> Any:
    return attention({}, {"low": "query"}, d=128)


@case("attention-scaled-query-control", None, "control", None, "no finding")
def _() -> Any:
    return attention({}, {"low": "query"}, d=64)


@case("attention-heads-reordered", "attention", "semantic", "attn_out", "heads reordered", "layout")
def _() -> Any:
    out = normal(64, 40, 4, 32)
    return {"attn_out": out}, {"attn_out": out[:, [0, 2, 1, 3]]}, {}


def fp8(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@case(
    "cache-unit-scale",
    "attention",
    "semantic",
    "k_cache",
    "multiples of 2^-9",
    "saturates at exactly +-448",
    "unit scale",
)
def _() -> Any:
    k, v = normal(65, 2, 64, 32, scale=0.02).float(), normal(66, 2, 64, 32, scale=4).float()
    v[:, ::9, 3] *= 300
    ka, va = fp8(k, float(k.abs().max()) / 448), fp8(v, float(v.abs().max()) / 448)
    return {"k_cache": ka, "v_cache": va}, {"k_cache": fp8(k, 1), "v_cache": fp8(v, 1)}, {}


# --- matrix products -------------------------------------------------------------------------------------------------


def gemm() -> dict[str, Any]:
    return {"x": normal(71, 32, 1024), "w": normal(72, 1024, 96, scale=1 / 32)}


def partials(given: dict[str, Any], parts: int, *, rounded: bool) -> Tensor:
    step = given["x"].shape[1] // parts
    total: Tensor | None = None
    for i in range(parts):
        part = (
            given["x"][:, i * step : (i + 1) * step].double() @ given["w"][i * step : (i + 1) * step].double()
        ).float()
        part = lp(part) if rounded else part
        total = part if total is None else (lp(total + part) if rounded else total + part)
    assert total is not None
    return total


@case(
    "matmul-two-ranks-rounded",
    "matmul",
    "rounding-contract",
    "out",
    "2 partial sums",
    "row-parallel",
    "larger where partials cancel",
)
def _() -> Any:
    g = gemm()
    return {"out": partials(g, 1, rounded=False).to(BF16)}, {"out": partials(g, 2, rounded=True).to(BF16)}, g


@case("matmul-four-ranks-rounded", "matmul", "rounding-contract", "down_proj", "4 partial sums")
def _() -> Any:
    g = gemm()
    return (
        {"down_proj": partials(g, 1, rounded=False).to(BF16)},
        {"down_proj": partials(g, 4, rounded=True).to(BF16)},
        g,
    )


@case("matmul-order", "matmul", "ulp-noise", "out_fp32", "accumulation order", "not a precision downgrade")
def _() -> Any:
    g = gemm()
    a, b = partials(g, 16, rounded=False), partials(g, 4, rounded=False)
    return {"out_fp32": a, "out": a.to(BF16)}, {"out_fp32": b, "out": b.to(BF16)}, g


@case("matmul-bias-missing", "matmul", "semantic", "q_proj", "a bias missing on one side")
def _() -> Any:
    out = partials(gemm(), 1, rounded=False)
    return {"q_proj": (out + normal(73, 96).float()).to(BF16)}, {"q_proj": out.to(BF16)}, {}
