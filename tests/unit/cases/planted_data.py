"""Planted faults of data, routers, embeddings and weights; and rounding noise, which must not be called a fault."""

from __future__ import annotations

from typing import Any

import torch
from planted import BF16, FP16, Sites, case, lp, normal
from torch import Tensor

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
