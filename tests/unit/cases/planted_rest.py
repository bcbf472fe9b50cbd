"""Planted faults of the head, attention, matrix products, sampling, data, routers, embeddings, weights; and false alarms.

They are added to the cases of ``planted``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from planted import BF16, CASES, FP16, Sites, case, lp, normal
from torch import Tensor

__all__ = ["CASES"]

# --- lm head ---------------------------------------------------------------------------------------------------------

N, K, V = 48, 256, 1024
HIDDEN, HEAD = normal(51, N, K), normal(52, V, K, scale=3 / 16)
LOGITS = (HIDDEN.double() @ HEAD.double().T).float()
TOKENS = torch.multinomial(LOGITS.softmax(-1), 1, generator=torch.Generator().manual_seed(5))[:, 0]
HEADED = {"h": HIDDEN, "w": HEAD, "tok": TOKENS}


def scored(logits: Tensor) -> Sites:
    return {"logits": logits, "logprob": picked(logits)}


def picked(logits: Tensor, tokens: Tensor = TOKENS) -> Tensor:
    return logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0].float()


@case("head-output-rounded", "lm_head", "rounding-contract", "logits", "B.logits == bf16(A.logits) bit for bit")
def _() -> Any:
    return scored(LOGITS), scored(lp(LOGITS)), HEADED


@case("head-reference-rounded", "lm_head", "rounding-contract", "logits", "A.logits == bf16(B.logits) bit for bit")
def _() -> Any:
    return scored(lp(LOGITS)), scored(LOGITS), HEADED


@case(
    "head-row-scale-missing",
    "lm_head",
    "semantic",
    "logits",
    "each vocabulary row is off by a constant factor",
    "same for every token",
)
def _() -> Any:
    scale = HEAD.float().abs().amax(1) / 448
    return scored(LOGITS), scored(LOGITS / scale), HEADED


@case("head-soft-cap", "lm_head", "semantic", "logits", "soft cap", cap=30)
def _() -> Any:
    logits = LOGITS * 3
    return scored(logits), scored(30 * torch.tanh(logits / 30)), {}


@case("head-scaled", "lm_head", "semantic", "logits", "constant gain", gain=0.0625)
def _() -> Any:
    return scored(LOGITS), scored(LOGITS / 16), {}


@case("head-bias", "lm_head", "semantic", "logits", "a bias missing on one side")
def _() -> Any:
    return scored(LOGITS), scored(LOGITS + normal(53, V, dtype=torch.float32)), {}


@case("head-tf32-of-bf16-operands", None, "control", None, "no finding")
def _() -> Any:
    return scored(LOGITS), scored(LOGITS.clone()), HEADED


@case("head-tf32-of-fp32-operands", "lm_head", "rounding-contract", "logits", "TF32")
def _() -> Any:
    h, w = normal(54, N, K, dtype=torch.float32), normal(55, V, K, scale=3 / 16, dtype=torch.float32)

    def cut(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    a, b = ((p.double() @ q.double().T).float() for p, q in ((h, w), (cut(h), cut(w))))
    return {"logits": a}, {"logits": b}, {"h": h, "w": w}


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


# --- sampling --------------------------------------------------------------------------------------------------------

RAW = normal(81, 192, 512, scale=3, dtype=torch.float32)
CHOSEN = torch.multinomial((RAW / 0.7).softmax(-1), 1, generator=torch.Generator().manual_seed(8))[:, 0]


def sampled(a: Tensor, b: Tensor, tokens: Tensor = CHOSEN) -> Any:
    return (
        {"logits": RAW, "logprob": picked(a, tokens)},
        {"logits": RAW, "logprob": picked(b, tokens)},
        {"logits": RAW, "tok": tokens},
    )


@case(
    "sampling-temperature",
    "sampling",
    "semantic",
    "logprob",
    "temperature",
    "logits bit-equal",
    temperature_a=0.7,
    temperature_b=1.0,
)
def _() -> Any:
    return sampled(RAW / 0.7, RAW)


@case(
    "sampling-temperature-other-way",
    "sampling",
    "semantic",
    "logprob",
    "temperature",
    temperature_a=1.0,
    temperature_b=1.3,
)
def _() -> Any:
    return sampled(RAW, RAW / 1.3)


def kept(rule: str) -> tuple[Tensor, Tensor]:
    """Logits with the dropped tokens at -inf, and a kept token of each row."""
    p, order = RAW.double().softmax(-1).sort(-1, descending=True)
    keep = {
        "top-p": (p.cumsum(-1) - p) < 0.8,
        "top-k": torch.arange(512).expand_as(p) < 20,
        "min-p": p >= 0.05 * p[:, :1],
    }[rule]
    mask = torch.zeros_like(keep).scatter(-1, order, keep)
    masked = RAW.masked_fill(~mask, -math.inf)
    return masked, torch.multinomial(masked.softmax(-1), 1, generator=torch.Generator().manual_seed(9))[:, 0]


@case(
    "sampling-top-p", "sampling", "semantic", "logprob", "delta >= 0 at every token", "-log(kept mass)", "top-p", "0.8"
)
def _() -> Any:
    masked, tokens = kept("top-p")
    return sampled(RAW, masked, tokens)


@case("sampling-top-k", "sampling", "semantic", "logprob", "top-k with k = 20")
def _() -> Any:
    masked, tokens = kept("top-k")
    return sampled(RAW, masked, tokens)


@case("sampling-min-p-on-the-reference", "sampling", "semantic", "logprob", "delta <= 0 at every token", "min-p")
def _() -> Any:
    masked, tokens = kept("min-p")
    return sampled(masked, RAW, tokens)


@case("sampling-softmax-in-bf16", "sampling", "rounding-contract", "logprob", "bf16")
def _() -> Any:
    low = RAW.to(BF16).log_softmax(-1).gather(-1, CHOSEN[:, None])[:, 0].float()
    a, _, given = sampled(RAW, RAW)
    return a, {"logits": RAW, "logprob": low}, given


# --- data ------------------------------------------------------------------------------------------------------------

IDS = torch.randint(3, 900, (40,), generator=torch.Generator().manual_seed(3))
SCORES = normal(91, 40, dtype=torch.float32)


@case(
    "data-two-bos",
    "data",
    "data",
    "input_ids",
    "one leading BOS (1) too many",
    "differ in length by one",
    "suffixes equal",
)
def _() -> Any:
    one = torch.tensor([1])
    return (
        {"input_ids": torch.cat((one, IDS)), "logprobs": SCORES},
        {"input_ids": torch.cat((one, one, IDS)), "logprobs": SCORES + 0.1},
        {},
    )


@case("data-left-padding", "data", "data", "input_ids", "4 leading", "left padding")
def _() -> Any:
    return {"input_ids": IDS}, {"input_ids": torch.cat((torch.zeros(4, dtype=torch.int64), IDS))}, {}


@case("data-truncated", "data", "data", "input_ids", "at the end", "truncation")
def _() -> Any:
    return {"input_ids": IDS}, {"input_ids": IDS[:-5]}, {}


@case("data-tokenised-differently", "data", "data", "input_ids", "tokenised differently")
def _() -> Any:
    return {"input_ids": IDS}, {"input_ids": torch.cat((IDS[:10], torch.tensor([1, 2]), IDS[15:]))}, {}


@case("data-one-token", "data", "data", "input_ids", "1 of 40 tokens differ", "first at index [7]")
def _() -> Any:
    other = IDS.clone()
    other[7] += 1
    return {"input_ids": IDS, "logprobs": SCORES}, {"input_ids": other, "logprobs": SCORES - 0.2}, {}


@case("data-labels-shifted", "data", "data", "logprobs", "lag-1", "B[t] == A[t+1]", "no model-side finding")
def _() -> Any:
    return (
        {"input_ids": IDS, "logprobs": SCORES},
        {"input_ids": IDS, "logprobs": torch.cat((SCORES[1:], torch.zeros(1)))},
        {"ids": IDS},
    )


@case("data-labels-shifted-back", "data", "data", "logprobs", "lag-1", "B[t] == A[t-1]")
def _() -> Any:
    return {"logprobs": SCORES}, {"logprobs": torch.cat((torch.zeros(1), SCORES[:-1]))}, {}


@case("data-packed-positions", "data", "data", "position_ids", "boundary (index 17)", "first document bit-equal")
def _() -> Any:
    return {"position_ids": torch.cat((torch.arange(17), torch.arange(23)))}, {"position_ids": torch.arange(40)}, {}


@case("data-packed-logprobs", "data", "data", "logprobs", "boundary (index 17)", "document")
def _() -> Any:
    return (
        {"logprobs": SCORES},
        {"logprobs": torch.where(torch.arange(40) < 17, SCORES, SCORES - SCORES.abs() * 0.3)},
        {},
    )


@case("data-positions-offset", "data", "data", "position_ids", "offset by 3 everywhere")
def _() -> Any:
    return {"position_ids": torch.arange(40)}, {"position_ids": torch.arange(40) + 3}, {}


# --- routers ---------------------------------------------------------------------------------------------------------

ROUTER = normal(101, 1024, 64, dtype=torch.float32)


def top(x: Tensor, k: int) -> Tensor:
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]


@case(
    "router-ties",
    "router",
    "rounding-contract",
    "probs",
    "B.probs == bf16(A.probs) bit for bit",
    "tie or near-tie",
    "flipped tokens",
)
def _() -> Any:
    p = ROUTER.softmax(-1)
    a, b = ({"router_logits": ROUTER, "probs": x, "expert_set": top(x, 8).sort(-1).values} for x in (p, lp(p)))
    return a, b, {"logits": ROUTER}


def combined(weights: Tensor) -> Sites:
    return {"expert_ids": top(ROUTER, 4), "topk_weights": weights}


@case(
    "router-raw-logits",
    "router",
    "semantic",
    "topk_weights",
    "B's are raw logits",
    "can be negative",
    "expert ids equal",
)
def _() -> Any:
    ids = top(ROUTER, 4)
    return combined(ROUTER.softmax(-1).gather(-1, ids)), combined(ROUTER.gather(-1, ids)), {"logits": ROUTER}


@case("router-not-renormalised", "router", "semantic", "topk_weights", "renormalised")
def _() -> Any:
    w = ROUTER.softmax(-1).gather(-1, top(ROUTER, 4))
    return combined(w / w.sum(-1, keepdim=True)), combined(w), {}


@case("router-sigmoid", "router", "semantic", "topk_weights", "sigmoid scores")
def _() -> Any:
    ids = top(ROUTER, 4)
    return combined(ROUTER.softmax(-1).gather(-1, ids)), combined(ROUTER.sigmoid().gather(-1, ids)), {"logits": ROUTER}


@case("router-scaling-factor", "router", "semantic", "topk_weights", "constant gain", gain=2.5)
def _() -> Any:
    w = ROUTER.softmax(-1).gather(-1, top(ROUTER, 4))
    return combined(w), combined(w * 2.5), {}


# --- embedding, weights, non-finite ----------------------------------------------------------------------------------

EMB = normal(111, 64, 640, scale=0.05)


def scaled(by: float) -> Sites:
    return {"embed_scaled": (EMB.float() * by).to(BF16)}


@case(
    "embedding-normaliser-rounded",
    "embed",
    "biased-rounding",
    "embed_scaled",
    "same way in magnitude",
    "bf16(sqrt(640))",
)
def _() -> Any:
    root = torch.tensor(640.0).sqrt()
    return scaled(float(lp(root))), scaled(float(root)), {"emb": EMB}


@case(
    "embedding-normaliser-rounded-without-inputs",
    "embed",
    "biased-rounding",
    "embed_scaled",
    "constant gain",
    "same way in magnitude",
)
def _() -> Any:
    root = torch.tensor(640.0).sqrt()
    return scaled(float(lp(root))), scaled(float(root)), {}


@case("embedding-normaliser-missing", "embed", "semantic", "embed_scaled", "equals its input emb bit for bit")
def _() -> Any:
    return scaled(640**0.5), {"embed_scaled": EMB.clone()}, {"emb": EMB}


@case(
    "weights-stale",
    "weights",
    "semantic",
    "weights_l0",
    "weights differ before any activation",
    "equals step_0 bit for bit",
    "do not attribute to kernels",
)
def _() -> Any:
    old = normal(121, 64, 64)
    new = (old.float() + normal(122, 64, 64).float() * 0.01).to(BF16)
    x = normal(123, 16, 64).float()
    a, b = ({"weights_l0": w, "hidden": (x @ w.float()).to(BF16)} for w in (new, old))
    return a, b, {"step_0": old, "step_1": new}


@case("weights-of-another-checkpoint", "weights", "semantic", "weight", "weights differ before any activation")
def _() -> Any:
    return {"weight": normal(124, 64, 64)}, {"weight": normal(125, 64, 64)}, {}


@case("overflow-in-fp16", "matmul", "fatal", "down_proj", "non-finite", "overflow", "65504")
def _() -> Any:
    x = normal(131, 32, 64, scale=100, dtype=torch.float32)
    x[3, 5] = 7e4
    return {"down_proj": x}, {"down_proj": x.to(FP16).float()}, {}


@case("masked-row-is-nan", "attention", "fatal", "attn_out", "whole rows", "fully masked softmax row")
def _() -> Any:
    a = normal(132, 2, 32, 64)
    b = a.clone()
    b[:, 5] = float("nan")
    return {"attn_out": a}, {"attn_out": b}, {}


@case("nan-later-in-the-network", "sampling", "fatal", "hidden", "non-finite", "1 NaN")
def _() -> Any:
    hidden = normal(133, 40, 64)
    flipped = (
        hidden.view(torch.int16)
        ^ (torch.rand(40, 64, generator=torch.Generator().manual_seed(1)) < 2e-4).to(torch.int16)
    ).view(BF16)
    lost = SCORES.clone()
    lost[4] = float("nan")
    return {"hidden": hidden, "logprob": SCORES}, {"hidden": flipped, "logprob": lost}, {}


@case("nan-on-both-sides", None, "control", None, "no finding")
def _() -> Any:
    x = normal(134, 16, 16)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    return {"attn_out": x}, {"attn_out": x.clone()}, {}


# --- rounding noise, which must not be called a fault ----------------------------------------------------------------


@case("noise-rare-flips", "matmul", "ulp-noise", "o_proj", "unbiased", "accumulation order")
def _() -> Any:
    x = normal(141, 128, 512)
    g = torch.Generator().manual_seed(2)
    step = (torch.rand(x.shape, generator=g) < 3e-4).to(torch.int16) * (
        1 - 2 * torch.randint(0, 2, x.shape, generator=g).to(torch.int16)
    )
    return {"o_proj": x}, {"o_proj": (x.view(torch.int16) + step).view(BF16)}, {}


@case("noise-common-flips", "matmul", "rounding-contract", "o_proj", "unbiased", "a rounding point moved")
def _() -> Any:
    exact = normal(142, 128, 512, dtype=torch.float32)
    return (
        {"o_proj": exact.to(BF16)},
        {"o_proj": (exact * (1 + 0.002 * normal(143, 128, 512, dtype=torch.float32))).to(BF16)},
        {},
    )


@case("noise-fp32-order", "matmul", "ulp-noise", "o_proj", "accumulation order")
def _() -> Any:
    x = normal(144, 128, 512, dtype=torch.float32)
    return {"o_proj": x}, {"o_proj": x * (1 + 1e-7 * normal(145, 128, 512, dtype=torch.float32))}, {}
