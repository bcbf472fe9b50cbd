"""Further planted faults, nearer to configuration mistakes than to rounding. They are added to the cases of ``planted``."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted import BF16, CASES, case, lp, normal
from planted_data import ROUTER, top
from planted_head import CHOSEN, HIDDEN, LOGITS, RAW, TOKENS, picked, scored
from planted_pointwise import QW, RES, SMALL, WEIGHT, X, head_norm
from planted_products import attended, gemm, partials, qkv
from planted_rope import D, H, T, inv_freq, rope_inputs, rotated
from torch import Tensor

__all__ = ["CASES"]


@case(
    "rope-positions-rounded-from-outputs",
    "rope",
    "semantic",
    "q_rope",
    "bf16(position)",
    "neighbouring tokens share an angle",
)
def _() -> Any:
    given = rope_inputs(step=5)
    x, p = given["q"], given["positions"]
    return {"q_rope": rotated(x, p, inv_freq())}, {"q_rope": rotated(x, lp(p), inv_freq())}, given


@case("rope-positions-site-rounded", "rope", "semantic", "positions", "B.positions == bf16(A.positions)")
def _() -> Any:
    p = torch.arange(600).float()
    return {"positions": p}, {"positions": lp(p)}, {}


@case("rope-partial", "rope", "semantic", "q_rope", "A rotates 64 columns of each head, B 32", size_a=64, size_b=32)
def _() -> Any:
    given = rope_inputs()
    x, p = given["q"], given["positions"]
    part = torch.cat((rotated(x[..., :32], p, inv_freq(dim=32)), x[..., 32:]), -1)
    return {"q_rope": rotated(x, p, inv_freq())}, {"q_rope": part}, given


@case(
    "rope-float32-output-of-a-rounded-table",
    "rope",
    "rounding-contract",
    "q_rope",
    "the table is rounded to bf16 on the B side",
)
def _() -> Any:
    given = rope_inputs()
    x = given["q"].float()
    angle = given["positions"].float()[:, None] * inv_freq()
    c, s = angle.cos()[:, None], angle.sin()[:, None]

    def turn(c: Tensor, s: Tensor) -> Tensor:
        one, two = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat((one * c - two * s, two * c + one * s), -1)

    return {"q_rope": turn(c, s)}, {"q_rope": turn(lp(c), lp(s))}, given


@case(
    "rope-table-ends", "rope", "semantic", "cos", "rows 0..99 bit-equal, every row from 100 on differs", "table length"
)
def _() -> Any:
    p = torch.arange(T)
    return (
        {"cos": (p[:, None] * inv_freq()).cos()},
        {"cos": (p.clamp(max=99)[:, None] * inv_freq()).cos()},
        {"positions": p},
    )


@case(
    "swiglu-gate-and-up-interleaved",
    "swiglu",
    "semantic",
    "act",
    "A splits gate and up as halves, gate first, B as interleaved, gate first",
)
def _() -> Any:
    both = normal(201, 64, 256)
    silu = torch.nn.functional.silu
    a = silu(both[:, :128].float()) * both[:, 128:].float()
    b = silu(both[:, ::2].float()) * both[:, 1::2].float()
    return {"act": a.to(BF16)}, {"act": b.to(BF16)}, {"gate_up": both}


@case("norm-epsilon-outside-the-root", "rmsnorm", "semantic", "norm_out", "eps mismatch", "outside", eps_outside=1e-5)
def _() -> Any:
    x = SMALL.float()
    ms = x.square().mean(1, keepdim=True)
    a, b = x * (ms + 1e-5).rsqrt(), x / (ms.sqrt() + 1e-5)
    return (
        {"norm_out": (a * WEIGHT.float()).to(BF16)},
        {"norm_out": (b * WEIGHT.float()).to(BF16)},
        {"x": SMALL, "weight": WEIGHT},
    )


@case(
    "norm-variance-rounded",
    "rmsnorm",
    "biased-rounding",
    "norm_out",
    "sqrt(var/bf16(var))",
    "the variance is rounded to bf16",
)
def _() -> Any:
    x = (normal(202, 96, 1024).float() * torch.linspace(0.5, 2, 96)[:, None]).to(BF16).float()
    ms = x.square().mean(1, keepdim=True)
    return {"norm_out": (x * ms.rsqrt()).to(BF16)}, {"norm_out": (x * lp(ms).rsqrt()).to(BF16)}, {"x": x.to(BF16)}


@case(
    "norm-overflow-makes-rows-zero",
    "rmsnorm",
    "fatal",
    "norm_out",
    "zero in 11 whole rows",
    "sum of squares overflowed",
)
def _() -> Any:
    h = (X.float() * torch.where(torch.arange(len(X)) % 9 == 0, 300.0, 1.0)[:, None]).half()
    f = h.float()
    a, b = f.square().mean(1, keepdim=True), (h * h).float().mean(1, keepdim=True)
    return {"norm_out": (f * a.rsqrt()).half()}, {"norm_out": (f * b.rsqrt()).half()}, {"x": h}


@case("norm-residual-twice", "rmsnorm", "semantic", "residual_out", "B is 1 * x + 2 * residual")
def _() -> Any:
    x, r = X.float(), RES.float()
    return {"residual_out": (x + r).to(BF16)}, {"residual_out": (x + 2 * r).to(BF16)}, {"x": X, "residual": RES}


@case(
    "norm-one-plus-weight-rounded",
    "rmsnorm",
    "rounding-contract",
    "norm_out",
    "the factor is 1+w on A and is 1+w rounded on B",
)
def _() -> Any:
    w = normal(203, X.shape[1], scale=0.3)
    n = head_norm(X)
    return (
        {"norm_out": (n * (1 + w.float())).to(BF16)},
        {"norm_out": (n * lp(1 + w.float())).to(BF16)},
        {"x": X, "weight": w},
    )


@case("norm-weight-rounded", "rmsnorm", "biased-rounding", "norm_out", "the weight itself is rounded", "per-column")
def _() -> Any:
    w = normal(204, X.shape[1], scale=0.3, dtype=torch.float32) + 1
    n = head_norm(X)
    return {"norm_out": (n * w).to(BF16)}, {"norm_out": (n * lp(w)).to(BF16)}, {"x": X, "weight": w}


@case("norm-residual-kept-in-float32", "rmsnorm", "rounding-contract", "residual_after_24", "bf16 grid")
def _() -> Any:
    a = b = RES.float()
    for i in range(24):
        step = normal(300 + i, *RES.shape).float()
        a, b = a + step, lp(b + step)
    return {"residual_after_24": a}, {"residual_after_24": b}, {}


@case("qk-norm-over-all-heads", "qk_norm", "semantic", "q_norm", "B normalises all heads of a token together")
def _() -> Any:
    q = (normal(205, 64, 4, D).float() * torch.linspace(0.5, 2, 4)[:, None]).to(BF16)
    wide = head_norm(q.reshape(64, -1)).reshape(q.shape)
    return (
        {"q_norm": (head_norm(q) * QW.float()).to(BF16)},
        {"q_norm": (wide * QW.float()).to(BF16)},
        {"q": q, "weight": QW},
    )


@case("attention-scores-capped", "attention", "semantic", "attn_out", "capped as c * tanh(s / c) with c = 4", cap=4)
def _() -> Any:
    given = qkv()
    q, k, v = (given[n].double() for n in "qkv")
    mask = torch.ones(q.shape[1], q.shape[1]).tril().bool()
    s = 4 * torch.tanh((q @ k.mT) / 8 / 4)
    return (
        {"attn_out": attended(given)},
        {"attn_out": (s.masked_fill(~mask, -math.inf).softmax(-1) @ v).to(BF16)},
        given,
    )


@case("attention-scale-of-another-head-size", "attention", "semantic", "attn_out", "1/sqrt(96)", scale=96**-0.5)
def _() -> Any:
    given = qkv()
    return {"attn_out": attended(given)}, {"attn_out": attended(given, scale=96**-0.5)}, given


@case("attention-sink-missing", "attention", "semantic", "attn_out", "attention sink on one side only")
def _() -> Any:
    given = qkv()
    q, k, v = (given[n].double() for n in "qkv")
    mask = torch.ones(q.shape[1], q.shape[1]).tril().bool()
    s = ((q @ k.mT) / 8).masked_fill(~mask, -math.inf)
    p = torch.cat((s, torch.ones(*s.shape[:2], 1)), -1).softmax(-1)[..., :-1]
    return {"attn_out": (p @ v).to(BF16)}, {"attn_out": attended(given)}, given


@case("attention-key-heads-tiled", "attention", "semantic", "attn_out", "key heads tiled instead of repeated")
def _() -> Any:
    q, k, v = normal(206, 4, 64, 32), normal(207, 2, 64, 32), normal(208, 2, 64, 32)

    def out(spread: Any) -> Tensor:
        return attended({"q": q, "k": spread(k), "v": spread(v)})

    return (
        {"attn_out": out(lambda t: t.repeat_interleave(2, 0))},
        {"attn_out": out(lambda t: t.repeat(2, 1, 1))},
        {"q": q, "k": k, "v": v},
    )


@case("cache-quantised-on-one-side", "attention", "semantic", "k_cache", "distinct magnitudes: quantised")
def _() -> Any:
    k = normal(209, 2, 96, 64)
    scale = float(k.float().abs().max()) / 448
    return {"k_cache": k.float()}, {"k_cache": (k.float() / scale).to(torch.float8_e4m3fn).float() * scale}, {"k": k}


@case("matmul-bias-after-rounding", "matmul", "rounding-contract", "out", "bias added after the product was rounded")
def _() -> Any:
    given, bias = gemm(), normal(210, 96)
    out = partials(given, 1, rounded=False)
    return {"out": (out + bias.float()).to(BF16)}, {"out": (lp(out) + bias.float()).to(BF16)}, {**given, "bias": bias}


@case("matmul-adapter-missing", "matmul", "semantic", "out", "low-rank (LoRA) adapter", rank=4)
def _() -> Any:
    given = gemm()
    extra = (given["x"].float() @ normal(211, 1024, 4, scale=0.05).float()) @ normal(212, 4, 96, scale=0.5).float()
    out = partials(given, 1, rounded=False)
    return {"out": (out + extra).to(BF16)}, {"out": out.to(BF16)}, given


@case(
    "weights-adapter-merged",
    "weights",
    "semantic",
    "weights_q",
    "matrix of rank 4",
    "LoRA adapter is merged on one side only",
    rank=4,
)
def _() -> Any:
    w = normal(213, 256, 192)
    extra = normal(214, 256, 4, scale=0.3).float() @ normal(215, 4, 192, scale=0.3).float()
    return {"weights_q": (w.float() + extra).to(BF16)}, {"weights_q": w}, {}


@case("dropout-active", "matmul", "semantic", "hidden", "dropout is active (training mode) on the B side")
def _() -> Any:
    kept = torch.rand(64, 256, generator=torch.Generator().manual_seed(7)) > 0.1
    x = HIDDEN[:48].repeat(2, 1)[:64]
    return {"hidden": x}, {"hidden": (x.float() * kept / 0.9).to(BF16)}, {"x": x}


@case("head-some-rows-stale", "lm_head", "semantic", "logits", "only columns 100..163 differ")
def _() -> Any:
    other = LOGITS.clone()
    other[:, 100:164] = normal(216, len(LOGITS), 64, dtype=torch.float32)
    return scored(LOGITS), scored(other), {}


@case("embedding-of-some-tokens", "embed", "semantic", "embed", "only rows 20..29 differ", "not precision")
def _() -> Any:
    a = normal(217, 64, 128)
    b = a.clone()
    b[20:30] = normal(218, 10, 128)
    return {"embed": a}, {"embed": b}, {}


@case("sampling-temperature-in-bf16", "sampling", "rounding-contract", "logprob", "bf16 logits divided by T in bf16")
def _() -> Any:
    low = lp(lp(RAW) / 0.7)
    return (
        {"logits": RAW, "logprob": picked(RAW / 0.7, CHOSEN)},
        {"logits": RAW, "logprob": picked(low, CHOSEN)},
        {"tok": CHOSEN},
    )


@case("sampling-impossible-token", "sampling", "fatal", "logprob", "probability 0", "1 infinite")
def _() -> Any:
    a = picked(LOGITS)
    b = a.clone()
    b[9] = -math.inf
    return {"logprob": a}, {"logprob": b}, {"tok": TOKENS}


@case(
    "router-selection-bias-leaks",
    "router",
    "semantic",
    "topk_weights",
    "selection bias is added to the combine weights",
)
def _() -> Any:
    p, bias = ROUTER.sigmoid(), normal(219, ROUTER.shape[1], scale=0.3, dtype=torch.float32)
    ids = top(p + bias, 4)
    return (
        {"expert_ids": ids, "topk_weights": p.gather(-1, ids)},
        {"expert_ids": ids, "topk_weights": (p + bias).gather(-1, ids)},
        {"logits": ROUTER},
    )


@case(
    "key-after-rope-of-shared-heads",
    "rope",
    "rounding-contract",
    "k_rope",
    "the table is not rounded on A and is rounded on B",
)
def _() -> Any:
    given = rope_inputs()
    k, p = normal(220, T, H, D), given["positions"]
    return {"k_rope": rotated(k, p, inv_freq(), cache="fp32")}, {"k_rope": rotated(k, p, inv_freq())}, {**given, "k": k}
