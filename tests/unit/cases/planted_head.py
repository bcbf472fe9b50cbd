"""Planted faults of the head and of sampling."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted import BF16, Sites, case, lp, normal
from torch import Tensor

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
