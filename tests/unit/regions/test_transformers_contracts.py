"""transformers' own modules each compute exactly one level-one contract, on a million elements."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from region_probes import NUM_ELEMENTS, matching, num_differing, spread
from torch import Tensor, nn

from rpadiag.contracts import Contract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.regions import qk_norm, rmsnorm, rope, swiglu
from rpadiag.regions.align_families import FAMILIES, Family
from rpadiag.regions.presets import PRESETS

LP = (torch.bfloat16, torch.float16)
HIDDEN, ROWS = 576, NUM_ELEMENTS // 576 + 1
HF = PRESETS["hf-eager"]
# Llama, Qwen2, Qwen3 and Mistral share the norm's formula, Gemma, Gemma2 and Gemma3 another; all are run.
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
by_dtype = pytest.mark.parametrize("lp", LP, ids=lambda d: str(d).removeprefix("torch."))


def _part(family: Family, part: str) -> Any:
    return getattr(importlib.import_module(family.module_name), family.class_names()[part])


def _norm(family: Family, lp: torch.dtype, size: int = HIDDEN) -> nn.Module:
    norm = _part(family, "norm")(size, eps=1e-5).to(lp)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(9)) * 0.3
    norm.weight.data.copy_(weight if family.offset_norm else weight + 1.0)
    return norm


@by_dtype
@by_family
@torch.no_grad()
def test_rms_norm_matches_one_contract(family: Family, lp: torch.dtype) -> None:
    norm, x = _norm(family, lp), spread(ROWS, HIDDEN, lp, 1)
    space = [c for c in RmsNormContract.space() if c == c.canonical(residual=False) and c.weight != "none"]

    def predict(contract: Contract, rows: slice) -> Tensor:
        return rmsnorm.reference(x[rows], norm.weight, eps=1e-5, contract=contract)  # type: ignore[arg-type, return-value]

    expected = HF.rmsnorm(offset=family.offset_norm)
    assert [c.name() for c in matching(space, predict, norm(x))] == [expected.replace(dn="lp", dw="lp").name()]


@by_dtype
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("llama", "gemma")], ids=lambda f: f.name)
@torch.no_grad()
def test_residual_add_and_norm_match_one_contract(family: Family, lp: torch.dtype) -> None:
    norm, x, residual = _norm(family, lp), spread(ROWS, HIDDEN, lp, 2), spread(ROWS, HIDDEN, lp, 3)
    total = residual + x
    space = [c for c in RmsNormContract.space() if c.weight == ("1+w" if family.offset_norm else "w")]

    def predict(contract: Contract, rows: slice) -> Tensor:
        y, stored = rmsnorm.reference(x[rows], norm.weight, eps=1e-5, contract=contract, residual=residual[rows])  # type: ignore[arg-type]
        return torch.cat([y, stored], dim=-1)

    expected = HF.rmsnorm(offset=family.offset_norm).replace(dn="lp", dw="lp")
    assert matching(space, predict, torch.cat([norm(total), total], dim=-1)) == [expected]


@by_dtype
@by_family
@torch.no_grad()
def test_rope_matches_one_contract(family: Family, lp: torch.dtype) -> None:
    heads, size = 4, 64
    tokens = NUM_ELEMENTS // (heads * size) + 1
    x = spread(tokens * heads, size, lp, 4).view(1, tokens, heads, size).transpose(1, 2)
    angle = (torch.arange(tokens) * 3.0)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angle.cos(), angle.sin()
    full = [torch.cat([t, t], dim=-1)[None].to(lp) for t in (cos, sin)]
    seen, _ = importlib.import_module(family.module_name).apply_rotary_pos_emb(x, x, *full)

    def predict(contract: Contract, rows: slice) -> Tensor:
        return rope.reference(x[0].transpose(0, 1)[rows], cos[rows], sin[rows], contract=contract)  # type: ignore[arg-type]

    assert matching(RopeContract.space(), predict, seen[0].transpose(0, 1)) == [HF.regions["rope"]]


@by_dtype
@pytest.mark.parametrize("family", FAMILIES[:4], ids=lambda f: f.name)
@torch.no_grad()
def test_swiglu_matches_one_contract(family: Family, lp: torch.dtype) -> None:
    width = 1000
    gate, up = spread(1001, width, lp, 5), spread(1001, width, lp, 6)
    gate[::2] = (torch.randn(501, width, generator=torch.Generator().manual_seed(7)) * 4).to(lp)
    mlp = _mlp(family, width).to(lp)
    seen: list[Tensor] = []
    mlp.gate_proj.register_forward_hook(lambda *_: gate)
    mlp.up_proj.register_forward_hook(lambda *_: up)
    mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mlp(torch.zeros(1001, 8, dtype=lp))

    def predict(contract: Contract, rows: slice) -> Tensor:
        return swiglu.reference(gate[rows], up[rows], contract=contract)  # type: ignore[arg-type]

    assert matching(SwigluContract.space(), predict, seen[0]) == [HF.regions["swiglu"]]


def _mlp(family: Family, width: int) -> Any:
    import transformers

    config = getattr(transformers, f"{family.prefix}Config")(
        hidden_size=8, num_attention_heads=1, num_key_value_heads=1, intermediate_size=width
    )
    return _part(family, "mlp")(config)


@by_dtype
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("qwen3", "gemma3")], ids=lambda f: f.name)
@torch.no_grad()
def test_query_norm_is_rounded_before_rope(family: Family, lp: torch.dtype) -> None:
    heads, size = 8, 128
    tokens = NUM_ELEMENTS // (heads * size) + 1
    norm, x = _norm(family, lp, size), spread(tokens * heads, size, lp, 8).view(tokens, heads, size)
    angle = (torch.arange(1, tokens + 1) * 3.0)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angle.cos(), angle.sin()
    full = [torch.cat([t, t], dim=-1).to(lp) for t in (cos, sin)]
    turn = importlib.import_module(family.module_name).apply_rotary_pos_emb
    seen, _ = turn(norm(x), norm(x), *full, unsqueeze_dim=1)
    mismatches = {}
    for mid in ("lp", "fp32"):
        got = qk_norm.reference(
            x,
            norm.weight,  # type: ignore[arg-type]
            cos[:, None],
            sin[:, None],
            eps=1e-5,
            norm=HF.rmsnorm(offset=family.offset_norm),
            rope=HF.regions["rope"],  # type: ignore[arg-type]
            mid=mid,
        )
        mismatches[mid] = num_differing(got, seen)
    assert mismatches["lp"] == 0
    assert mismatches["fp32"] > 0.05 * x.numel()
