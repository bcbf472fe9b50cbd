"""Planted faults of RoPE."""

from __future__ import annotations

import math
from typing import Any

import torch
from planted import BF16, FP16, Sites, case, lp, normal
from torch import Tensor

from rpadiag.contracts import RopeContract
from rpadiag.regions import rope

# --- rope ------------------------------------------------------------------------------------------------------------

T, H, D = 160, 2, 64


def inv_freq(theta: float = 1e4, dim: int = D) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def rotated(x: Tensor, positions: Tensor, inv: Tensor, *, gain: float = 1.0, **axes: str) -> Tensor:
    contract = RopeContract(**{"products": "fp32", **axes})
    angle = positions.float()[:, None] * inv[None, :]
    return rope.reference(x, angle.cos() * gain, angle.sin() * gain, contract=contract)


def rope_inputs(step: int = 3, dtype: torch.dtype = BF16) -> dict[str, Any]:
    return {"q": normal(11, T, H, D, dtype=dtype), "positions": torch.arange(T) * step}


def rope_pair(a: dict[str, Any], b: dict[str, Any], **inputs: Any) -> tuple[Sites, Sites, dict[str, Any]]:
    given = rope_inputs(**inputs)
    x, p = given["q"], given["positions"]
    return (
        {"q_rope": rotated(x, p, **{"inv": inv_freq(), **a})},
        {"q_rope": rotated(x, p, **{"inv": inv_freq(), **b})},
        given,
    )


@case(
    "rope-table-rounded",
    "rope",
    "rounding-contract",
    "q_rope",
    "the table is not rounded on A and is rounded on B",
    "not rounded (single output rounding) on both",
    "position 0 is exact",
)
def _() -> Any:
    return rope_pair({"cache": "fp32"}, {"cache": "lp"})


@case(
    "rope-table-site-rounded-to-fp16",
    "rope",
    "rounding-contract",
    "cos",
    "B.cos == fp16(A.cos) bit for bit",
    "table is rounded",
)
def _() -> Any:
    cos = (torch.arange(T)[:, None] * inv_freq()).cos()
    return {"cos": cos}, {"cos": lp(cos, FP16)}, {}


@case(
    "rope-products-rounded",
    "rope",
    "rounding-contract",
    "q_rope",
    "products are rounded on A and are not rounded",
    "the table is rounded on both",
    "unbiased",
)
def _() -> Any:
    return rope_pair({"products": "lp"}, {})


@case("rope-products-rounded-fp16-key", "rope", "rounding-contract", "k_rope", "products")
def _() -> Any:
    given = rope_inputs(dtype=FP16)
    x, p = given["q"], given["positions"]
    return (
        {"k_rope": rotated(x, p, inv_freq(), products="lp")},
        {"k_rope": rotated(x, p, inv_freq())},
        {"k": x, "pos": p},
    )


@case(
    "rope-two-stacked",
    "rope",
    "rounding-contract",
    "q_rope",
    "two stacked contracts",
    "cache: fp32 -> bf16",
    "products: fp32 -> bf16",
)
def _() -> Any:
    return rope_pair({"cache": "fp32"}, {"products": "lp"})


@case("rope-layout", "rope", "semantic", "q_rope", "layout, not precision", "position 0 is exact", "norm preserved")
def _() -> Any:
    return rope_pair({}, {"layout": "interleaved"})


@case(
    "rope-base-from-outputs",
    "rope",
    "semantic",
    "q_rope",
    "RoPE base differs",
    "not precision",
    theta_a=1e4,
    theta_b=5e5,
)
def _() -> Any:
    return rope_pair({}, {"inv": inv_freq(5e5)})


@case("rope-base-one-percent-off", "rope", "semantic", "q_rope", "RoPE base differs", theta_a=1e4, theta_b=10100)
def _() -> Any:
    return rope_pair({}, {"inv": inv_freq(10100.0)})


@case(
    "rope-base-from-frequencies", "rope", "semantic", "inv_freq", "theta A = 1e+06, B = 10000", theta_a=1e6, theta_b=1e4
)
def _() -> Any:
    return {"inv_freq": inv_freq(1e6)}, {"inv_freq": inv_freq(1e4)}, {}


@case("rope-base-from-a-table", "rope", "semantic", "cos", "RoPE base differs", theta_a=1e4, theta_b=1e6)
def _() -> Any:
    p = torch.arange(512)
    return {"cos": (p[:, None] * inv_freq()).cos()}, {"cos": (p[:, None] * inv_freq(1e6)).cos()}, {"positions": p}


@case("rope-frequencies-few-ulp", "rope", "ulp-noise", "inv_freq", "few fp32 ULP", "proportional to position")
def _() -> Any:
    x = torch.arange(0, D, 2, dtype=torch.float32) / D
    other = torch.exp(-x * torch.tensor(math.log(1e6), dtype=torch.float32))
    p = torch.arange(T)[:, None] * 50
    return (
        {"inv_freq": inv_freq(1e6), "cos": (p * inv_freq(1e6)).cos()},
        {"inv_freq": other, "cos": (p * other).cos()},
        {"positions": p[:, 0]},
    )


@case(
    "rope-frequencies-rounded",
    "rope",
    "biased-rounding",
    "inv_freq",
    "B.inv_freq == bf16(A.inv_freq)",
    "grows with position",
)
def _() -> Any:
    return {"inv_freq": inv_freq()}, {"inv_freq": lp(inv_freq())}, {}


@case("rope-frequencies-rounded-from-outputs", "rope", "biased-rounding", "q_rope", "grows with position")
def _() -> Any:
    return rope_pair({}, {"inv": lp(inv_freq())}, step=1)


@case("rope-linear-scaling", "rope", "semantic", "q_rope", "linear RoPE scaling", scale=0.25)
def _() -> Any:
    return rope_pair({}, {"inv": inv_freq() / 4})


@case("rope-llama3-scaling", "rope", "semantic", "inv_freq", "rescaled piecewise")
def _() -> Any:
    inv = inv_freq(5e5)
    return {"inv_freq": inv}, {"inv_freq": torch.where(inv < 0.01, inv / 8, inv)}, {}


@case("rope-attention-factor", "rope", "semantic", "q_rope", "attention factor", gain=1.2)
def _() -> Any:
    return rope_pair({}, {"gain": 1.2})


@case("rope-position-offset", "rope", "semantic", "q_rope", "positions are offset by 3", offset=3)
def _() -> Any:
    given = rope_inputs(step=1)
    x, p = given["q"], given["positions"]
    return {"q_rope": rotated(x, p, inv_freq())}, {"q_rope": rotated(x, p + 3, inv_freq())}, given


@case("rope-table-shifted", "rope", "semantic", "cos", "positions are offset by 1", lag=1)
def _() -> Any:
    cos = (torch.arange(T + 1)[:, None] * inv_freq()).cos()
    return {"cos": cos[:-1]}, {"cos": cos[1:]}, {"positions": torch.arange(T)}


@case("rope-positions-rounded", "rope", "semantic", "cos", "positions are rounded to bf16")
def _() -> Any:
    p = torch.arange(600)
    return {"cos": (p[:, None] * inv_freq()).cos()}, {"cos": (lp(p)[:, None] * inv_freq()).cos()}, {"positions": p}


@case("rope-missing", "rope", "semantic", "q_rope", "equals its input q bit for bit", "missing on the B side")
def _() -> Any:
    given = rope_inputs()
    return {"q_rope": rotated(given["q"], given["positions"], inv_freq())}, {"q_rope": given["q"].clone()}, given


@case("rope-backwards", "rope", "semantic", "q_rope", "sign of sin is flipped")
def _() -> Any:
    given = rope_inputs()
    x, p = given["q"], given["positions"]
    return {"q_rope": rotated(x, p, inv_freq())}, {"q_rope": rotated(x, -p, inv_freq())}, given


@case("rope-truncating-store", "rope", "biased-rounding", "q_rope", "truncates toward zero")
def _() -> Any:
    return rope_pair({}, {"store": "truncate"})
