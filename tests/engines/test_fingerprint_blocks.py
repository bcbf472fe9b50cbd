"""The fingerprint of an engine that shows attention alone, on transformers models aligned to known roundings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import token_ids

from rpadiag.engines.bundle import Bundle, open_bundle
from rpadiag.engines.bundle_writer import BundleWriter
from rpadiag.engines.merged import merged_projections
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.regions.align import align
from rpadiag.regions.fingerprint_file import level_one
from rpadiag.regions.presets import Preset, find_preset
from rpadiag.workflows.fingerprint_blocks import (
    BlockFingerprint,
    block_findings,
    block_sites,
    can_tell,
    fingerprint_blocks,
)

REGIONS = ("rope", "swiglu", "rmsnorm")


def deep(tiny: Callable[[str], Path], family: str) -> TrainerEngine:
    """The tiny checkpoint with its second layer once more on top, since two layers cannot tell how far a sum is carried."""
    engine = TrainerEngine.load(tiny(family))
    layers: Any = engine.model.model.layers
    again = TrainerEngine.load(tiny(family)).model.model.layers[1]
    again.self_attn.layer_idx = 2
    layers.append(again)
    engine.model.config.num_hidden_layers = 3
    if getattr(engine.model.config, "layer_types", None):
        engine.model.config.layer_types = ["full_attention"] * 3
    return TrainerEngine(engine.model, engine.family, name=engine.name, settings={})


def shown(trainer: TrainerEngine, preset: Preset, directory: Path, *, lengths: tuple[int, ...] = (40, 25)) -> Bundle:
    """What an engine with these roundings shows when it is compiled."""
    sites = block_sites(trainer.facts.num_layers)
    with merged_projections(trainer.model), align(trainer.model, contract=preset):
        with BundleWriter(directory, trainer.manifest()) as writer:
            for index, length in enumerate(lengths):
                ids = tuple(token_ids(length, seed=index))
                writer.begin(index)
                scores = trainer.forward(ids, sites=sites, on_site=writer.append)
                writer.end(index, token_ids=ids, num_prompt_tokens=length, prompt=index, positions=scores.positions)
    return open_bundle(directory)


def told(found: BlockFingerprint) -> dict[str, Any]:
    return {region: level_one(contract) for region, contract in found.contracts.items()}


@pytest.mark.parametrize("carry", ["lp", "layer", "stream"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp32_outputs_are_told_with_how_far_sums_are_carried(
    tiny: Callable[[str], Path], tmp_path: Path, family: str, carry: str
) -> None:
    trainer, preset = deep(tiny, family), dataclasses.replace(find_preset("fp32-output"), carry=carry)
    bundle = shown(trainer, preset, tmp_path / "b")
    assert can_tell(trainer, bundle)
    found = fingerprint_blocks(trainer, bundle)
    assert found.carry == carry and not found.reasons
    expected = {r: level_one(preset.regions[r]) for r in told(found)}
    assert told(found) == expected and set(REGIONS) <= set(expected) and ("qk_norm" in expected) == (family == "qwen3")
    assert set(found.rows.values()) == {1.0} and found.runner_up < 0.02
    texts = [f.text for f in block_findings(found, REGIONS, "the engine")]
    assert "told from whole layers" in texts[0] and f"carry={carry}" in texts[-1]


@pytest.mark.parametrize("name", ["vllm-eager", "vllm-native", "hf-eager"])
def test_other_roundings_are_told_too(tiny: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    trainer, preset = deep(tiny, "llama"), find_preset(name)
    found = fingerprint_blocks(trainer, shown(trainer, preset, tmp_path / "b"))
    assert told(found) == {r: level_one(preset.regions[r]) for r in REGIONS} and found.carry == "lp"


def test_roundings_that_no_candidate_has_are_not_told_and_the_model_is_left_as_it_was(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = deep(tiny, "llama")
    ids = torch.tensor([token_ids(20, seed=3)])
    before = trainer.model(ids).logits
    preset = find_preset("vllm-cpu-ops-avx2")  # its stores truncate
    found = fingerprint_blocks(trainer, shown(trainer, preset, tmp_path / "b"))
    assert found.contracts == {} and found.carry is None and set(found.reasons) == set(REGIONS)
    (finding, *_) = block_findings(found, ("rope",), "the engine")
    assert finding.code == "not-determined" and "no candidate makes 20 % of the rows" in finding.text
    assert torch.equal(trainer.model(ids).logits, before)


def test_few_tokens_and_two_layers_tell_less(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    trainer = deep(tiny, "llama")
    few = fingerprint_blocks(trainer, shown(trainer, find_preset("fp32-output"), tmp_path / "few", lengths=(9,)))
    assert few.contracts == {} and "9 tokens are too few" in few.reasons["rope"]
    flat = TrainerEngine.load(tiny("llama"))
    carried = dataclasses.replace(find_preset("fp32-output"), carry="stream")
    found = fingerprint_blocks(flat, shown(flat, carried, tmp_path / "flat"))
    assert told(found) == {r: level_one(carried.regions[r]) for r in REGIONS} and found.carry is None


def test_a_bundle_without_attention_and_layers_with_four_norms_cannot_tell(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = TrainerEngine.load(tiny("gemma3"))
    with BundleWriter(tmp_path / "b", trainer.manifest()) as writer:
        writer.begin(0)
        ids = tuple(token_ids(9, seed=0))
        scores = trainer.forward(ids, sites=block_sites(2), on_site=writer.append)
        writer.end(0, token_ids=ids, num_prompt_tokens=9, prompt=0, positions=scores.positions)
    assert not can_tell(trainer, open_bundle(tmp_path / "b"))
    assert not can_tell(TrainerEngine.load(tiny("qwen3_moe")), open_bundle(tmp_path / "b"))
