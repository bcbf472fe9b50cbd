"""Fingerprints across the qk-norm boundary, of many sites together, and the file they are kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rpadiag.contracts import QkRopeContract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.errors import InputError
from rpadiag.regions import qk_norm
from rpadiag.regions.align import resolve
from rpadiag.regions.fingerprint import Ambiguity, Fingerprint
from rpadiag.regions.fingerprint_file import (
    agreeing_presets,
    common_presets,
    file_content,
    level_one,
    read_fingerprint_file,
    summarise,
)
from rpadiag.regions.fingerprint_qk import fingerprint_qk_rope
from rpadiag.regions.fingerprint_rope import rope_table
from rpadiag.regions.presets import PRESETS
from rpadiag.structure import Structure


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, WEIGHT = normal(1, 24, 2, 64), (normal(2, 64).float() * 0.3 + 0.7).bfloat16()
POSITIONS, INV_FREQ = torch.arange(24) * 5, 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64)


@pytest.mark.parametrize("mid", ["lp", "fp32"])
@pytest.mark.parametrize("scale", ["lp", "fp32"])
@pytest.mark.parametrize("products", ["lp", "fp32"])
def test_norm_boundary_and_rotation_are_told_from_the_two_ends(mid: str, scale: str, products: str) -> None:
    cos, sin = (t[:, None] for t in rope_table(POSITIONS, INV_FREQ))
    norm, rope = RmsNormContract(scale=scale), RopeContract(products=products)
    out = qk_norm.reference(X, WEIGHT, cos, sin, eps=1e-6, norm=norm, rope=rope, mid=mid)
    found = fingerprint_qk_rope(X, WEIGHT, POSITIONS, out, eps=1e-6, inv_freq=INV_FREQ)
    assert found["qk_norm"].matches == (QkRopeContract(mid=mid),)
    assert found["rmsnorm"].matches == (norm,)
    assert found["rope"].matches == (rope,)


def test_power_of_two_weights_hide_the_scale_axis_of_the_head_norm_only() -> None:
    cos, sin = (t[:, None] for t in rope_table(POSITIONS, INV_FREQ))
    ones = torch.ones(64).bfloat16()
    out = qk_norm.reference(
        X, ones, cos, sin, eps=1e-6, norm=RmsNormContract(scale="fp32"), rope=RopeContract(products="fp32"), mid="lp"
    )
    found = fingerprint_qk_rope(X, ones, POSITIONS, out, eps=1e-6, inv_freq=INV_FREQ)
    assert found["rope"].matches == (RopeContract(products="fp32"),)
    assert found["rmsnorm"].status == "not determined"
    assert "power of two" in found["rmsnorm"].ambiguities[0].reason


def told(contract: object, *others: object, status: str = "determined") -> Fingerprint:
    return Fingerprint(
        region="rmsnorm",
        status=status,
        dtype="bf16",
        num_rows=100,
        num_elements=1000,
        matches=(contract, *others),  # type: ignore[arg-type]
        ambiguities=(Ambiguity(axis="scale", values=("lp", "fp32"), reason="every weight is a power of two"),)
        if others
        else (),
    )


UNKNOWN = Fingerprint(
    region="rmsnorm",
    status="no known contract",
    dtype="bf16",
    num_rows=100,
    num_elements=1000,
    structure=Structure(kind="one-sided", text="one-sided"),
)
LP, FP32 = RmsNormContract(), RmsNormContract(scale="fp32")


def test_site_that_cannot_tell_follows_those_that_can() -> None:
    summary = summarise("rmsnorm", {"a": told(LP), "b": told(FP32, LP, status="not determined")})
    assert summary.contract == LP and summary.disagreeing == ()
    assert (summary.num_sites, summary.num_determined) == (2, 1)


def test_sites_that_follow_another_contract_or_none_are_listed() -> None:
    summary = summarise("rmsnorm", {"a": told(LP), "b": told(LP), "c": told(FP32), "d": UNKNOWN})
    assert summary.contract == LP and summary.disagreeing == ("c", "d")


def test_one_ambiguous_site_is_not_made_certain_by_putting_it_together_with_itself() -> None:
    summary = summarise("rmsnorm", {"a": told(LP, FP32, status="not determined")})
    assert summary.contract is None and "power of two" in summary.reason


def test_norm_without_residual_speaks_about_its_own_axes_only() -> None:
    fused = RmsNormContract(sum="fp32", variance="unrounded", scale="fp32")
    summary = summarise("rmsnorm", {"first": told(FP32), "a": told(fused), "b": told(fused)}, plain=["first"])
    assert summary.contract == fused and summary.disagreeing == ()


def test_no_site_gives_no_contract_and_a_reason() -> None:
    assert summarise("rmsnorm", {"a": UNKNOWN}).contract is None
    assert summarise("rmsnorm", {}).reason == "no site of this region was captured"


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_agrees_with_itself(name: str) -> None:
    for region, contract in PRESETS[name].regions.items():
        assert name in agreeing_presets(region, contract)


def test_implementations_agree_in_which_sums_they_round_as_well_where_the_norm_was_told() -> None:
    base = PRESETS["fp32-output"]
    summaries = {r: summarise(r, {"a": told(base.regions[r])}) for r in ("rope", "swiglu", "rmsnorm")}
    assert common_presets(summaries, "lp") == ["fp32-output", "flash-attn"]
    assert common_presets(summaries, "layer") == ["vllm-compiled"]
    assert {"fp32-output", "vllm-compiled", "vllm-cpu-compiled"} <= set(common_presets(summaries, None))
    del summaries["rmsnorm"]
    assert {"fp32-output", "vllm-compiled", "vllm-cpu-compiled"} <= set(common_presets(summaries, "lp"))
    assert common_presets({}, None) == []


def test_file_survives_the_disk_and_is_a_contract_for_align(tmp_path: Path) -> None:
    sites = {"layers.0.post_norm": told(LP), "layers.0.act": told(SwigluContract())}
    summaries = {
        "rmsnorm": summarise("rmsnorm", {"layers.0.post_norm": sites["layers.0.post_norm"]}),
        "rope": summarise("rope", {}),
    }
    path = tmp_path / "fingerprint.json"
    path.write_text(json.dumps(file_content(summaries, sites, source={"label": "somewhere"}, carry="lp")))
    content = read_fingerprint_file(path)
    assert list(content["regions"]) == ["rmsnorm"] and "rope" in content["undetermined"]
    preset = resolve(path)
    assert level_one(preset.regions["rmsnorm"]) == level_one(LP)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_fingerprint_file(path)
