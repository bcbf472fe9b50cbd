"""Planted faults of SwiGLU, of norms and of the per-head norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planted import BF16, Sites, case, lp, normal
from planted_rope import D, inv_freq, rope_inputs, rotated
from torch import Tensor

from rpadiag.contracts import RmsNormContract, SwigluContract
from rpadiag.regions import rmsnorm, swiglu

# --- swiglu ----------------------------------------------------------------------------------------------------------

GATE, UP = normal(21, 128, 512, scale=2.0), normal(22, 128, 512)
FFN = {"gate": GATE, "up": UP}


def act(**axes: str) -> Sites:
    return {"act": swiglu.reference(GATE, UP, contract=SwigluContract(**axes))}


@case(
    "swiglu-silu-rounded",
    "swiglu",
    "rounding-contract",
    "act",
    "is rounded before the product with up on B",
    "B == swiglu: silu=bf16 -> bf16 bit for bit",
    "unbiased",
)
def _() -> Any:
    return act(silu="fp32"), act(silu="lp"), FFN


@case("swiglu-sigmoid-rounded", "swiglu", "rounding-contract", "act", "the sigmoid stays fp32 on A and is rounded on B")
def _() -> Any:
    return act(), act(sigmoid="lp"), FFN


@case("swiglu-exp-flavour", "swiglu", "ulp-noise", "act_fp32", "same rounding contract", "not a precision downgrade")
def _() -> Any:
    g, u = GATE.float(), UP.float()
    one = g * u / (1 + torch.exp(-g))
    two = (g * (1 / (1 + torch.exp2(-g * 1.4426950408889634)))) * u
    return {"act_fp32": one, "act": one.to(BF16)}, {"act_fp32": two, "act": two.to(BF16)}, FFN


def _activation(fn: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return act(silu="fp32"), {"act": fn(GATE.float(), UP.float()).to(BF16)}, FFN


@case("swiglu-gelu-instead", "swiglu", "semantic", "act", "B computes gelu_tanh(gate) * up", "another formula")
def _() -> Any:
    return _activation(lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u)


@case("swiglu-gate-and-up-swapped", "swiglu", "semantic", "act", "B computes silu(up) * gate")
def _() -> Any:
    return _activation(lambda g, u: torch.nn.functional.silu(u) * g)


@case("swiglu-clamped", "swiglu", "semantic", "act", "clamped at 5")
def _() -> Any:
    return _activation(lambda g, u: torch.nn.functional.silu(g.clamp(max=5)) * u.clamp(-5, 5))


@case("swiglu-truncating-store", "swiglu", "biased-rounding", "act", "truncates toward zero")
def _() -> Any:
    return act(), act(store="truncate"), FFN


@case("swiglu-equal", None, "control", None, "no finding")
def _() -> Any:
    return act(), act(), FFN


# --- norms -----------------------------------------------------------------------------------------------------------

R, C = 96, 512
X, RES, WEIGHT = normal(31, R, C), normal(32, R, C, scale=4), (normal(33, C, scale=0.2).float() + 1).to(BF16)
NORM = {"x": X, "residual": RES, "weight": WEIGHT}


def norm(eps: float = 1e-6, x: Tensor = X, res: Tensor | None = RES, weight: Tensor = WEIGHT, **axes: str) -> Sites:
    contract = RmsNormContract(**axes)
    y = rmsnorm.reference(x, None if contract.weight == "none" else weight, eps=eps, contract=contract, residual=res)
    return {"norm_out": y} if isinstance(y, Tensor) else {"residual_out": y[1], "norm_out": y[0]}


@case(
    "norm-sum-rounded",
    "rmsnorm",
    "rounding-contract",
    "norm_out",
    "residual stream bit-equal",
    "fused-add",
    "sum: fp32 -> bf16",
    "variance: unrounded -> rounded",
)
def _() -> Any:
    return norm(sum="fp32", variance="unrounded"), norm(), NORM


@case(
    "norm-cast-order",
    "rmsnorm",
    "rounding-contract",
    "norm_out",
    "weight-multiply cast order",
    "scale: bf16 -> fp32",
    "unbiased",
)
def _() -> Any:
    return norm(), norm(scale="fp32"), NORM


@case(
    "norm-truncates", "rmsnorm", "biased-rounding", "residual_out", "truncates toward zero", "grows linearly with depth"
)
def _() -> Any:
    return norm(sum="fp32"), norm(sum="fp32", store="truncate"), NORM


@case("norm-inverse-rms-rounded", "rmsnorm", "biased-rounding", "norm_out", "bf16(inv)/inv", "row-coherent")
def _() -> Any:
    x = (X.float() * torch.linspace(0.5, 3, R)[:, None]).to(BF16)
    return norm(x=x, res=None, scale="fp32"), norm(x=x, res=None, rstd="lp"), {"x": x, "weight": WEIGHT}


@case(
    "norm-inverse-rms-site-rounded",
    "rmsnorm",
    "biased-rounding",
    "rstd",
    "B.rstd == bf16(A.rstd) bit for bit",
    "a whole row",
)
def _() -> Any:
    rstd = X.float().square().mean(1).rsqrt()
    return {"rstd": rstd}, {"rstd": lp(rstd)}, {"x": X}


SMALL = (X.float() * torch.logspace(-4, 0, R)[:, None]).to(BF16)


@case(
    "norm-epsilon", "rmsnorm", "semantic", "norm_out", "eps mismatch", "huge for small-rms rows", eps_a=1e-5, eps_b=1e-6
)
def _() -> Any:
    return norm(1e-5, SMALL, None), norm(1e-6, SMALL, None), {"x": SMALL, "weight": WEIGHT}


@case(
    "norm-epsilon-the-other-way-fp16",
    "rmsnorm",
    "semantic",
    "norm_out",
    "eps mismatch",
    "toward zero",
    eps_a=1e-6,
    eps_b=1e-4,
)
def _() -> Any:
    x, w = SMALL.half(), WEIGHT.half()
    return norm(1e-6, x, None, w), norm(1e-4, x, None, w), {"x": x, "gamma": w}


@case("norm-unusual-epsilon", "rmsnorm", "semantic", "norm_out", "eps mismatch", eps_a=1e-6, eps_b=3.3e-4)
def _() -> Any:
    return norm(1e-6, SMALL, None), norm(3.3e-4, SMALL, None), {"x": SMALL, "weight": WEIGHT}


@case(
    "norm-offset-missing", "rmsnorm", "semantic", "norm_out", "A computes x * (1 + w) * rstd, B computes x * w * rstd"
)
def _() -> Any:
    w = normal(34, C, scale=0.5)
    return (
        {"norm_out": rmsnorm.reference(X, w, eps=1e-6, contract=RmsNormContract(weight="1+w", scale="fp32"))},
        {"norm_out": rmsnorm.reference(X, w, eps=1e-6, contract=RmsNormContract(scale="fp32"))},
        {"x": X, "weight": w},
    )


@case("norm-weight-missing", "rmsnorm", "semantic", "norm_out", "B computes x * rstd")
def _() -> Any:
    return (
        norm(res=None),
        {"norm_out": rmsnorm.reference(X, None, eps=1e-6, contract=RmsNormContract(weight="none"))},
        {"x": X, "weight": WEIGHT},
    )


@case("norm-weight-stale", "rmsnorm", "semantic", "norm_out", "another weight vector")
def _() -> Any:
    other = (WEIGHT.float() * (1 + 0.1 * normal(35, C).float())).to(BF16)
    return norm(res=None), norm(res=None, weight=other), {"x": X, "weight": WEIGHT}


@case("norm-mean-subtracted", "rmsnorm", "semantic", "norm_out", "B computes (x - mean) * w * rstd")
def _() -> Any:
    x = (X.float() + 0.5).to(BF16)
    c = x.float() - x.float().mean(1, keepdim=True)
    b = (c * c.square().mean(1, keepdim=True).rsqrt() * WEIGHT.float()).to(BF16)
    return norm(x=x, res=None), {"norm_out": b}, {"x": x, "weight": WEIGHT}


# --- qk norm ---------------------------------------------------------------------------------------------------------

QW = (normal(41, D, scale=0.2).float() + 1).to(BF16)


def head_norm(x: Tensor) -> Tensor:
    f = x.float()
    return f * (f.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@case(
    "qk-order-swapped",
    "qk_norm",
    "semantic",
    "q_final",
    "order of norm and rope swapped",
    "norm(rope(q))",
    "order, not precision",
)
def _() -> Any:
    given = rope_inputs()
    x, p = given["q"], given["positions"]
    a = (head_norm(rotated(x, p, inv_freq())) * QW.float()).to(BF16)
    b = rotated((head_norm(x) * QW.float()).to(BF16), p, inv_freq())
    return {"q_final": a}, {"q_final": b}, {**given, "weight": QW}


@case(
    "qk-mid-rounded",
    "qk_norm",
    "rounding-contract",
    "q_final",
    "reaches RoPE unrounded on A and is rounded before RoPE on B",
)
def _() -> Any:
    given = rope_inputs()
    x, p = given["q"], given["positions"]
    angle = p.float()[:, None] * inv_freq()
    c, s = lp(angle.cos())[:, None], lp(angle.sin())[:, None]
    mid = head_norm(x) * QW.float()

    def turn(m: Tensor) -> Tensor:
        one, two = m[..., : D // 2], m[..., D // 2 :]
        return torch.cat((one * c - two * s, two * c + one * s), -1).to(BF16)

    return {"q_final": turn(mid)}, {"q_final": turn(lp(mid))}, {**given, "weight": QW}


@case("qk-norm-epsilon", "qk_norm", "semantic", "q_norm", "eps mismatch", eps_a=1e-6, eps_b=1e-5)
def _() -> Any:
    x = (normal(42, 64, 2, D).float() * 0.02).to(BF16)
    return (
        {"q_norm": rmsnorm.reference(x, QW, eps=1e-6, contract=RmsNormContract())},
        {"q_norm": rmsnorm.reference(x, QW, eps=1e-5, contract=RmsNormContract())},
        {"q": x, "weight": QW},
    )
