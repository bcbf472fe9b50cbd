"""Contracts side by side: from evidence where there is some, from what versions are known to do elsewhere, and never mixed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.reports.written_runs import write_compare

from rpadiag.regions.presets import PRESETS
from rpadiag.reports import blocks_contracts
from rpadiag.reports.blocks_contracts import contracts_block, contracts_of, known_of
from rpadiag.reports.html import write_report
from rpadiag.reports.view import Block
from rpadiag.runs import Run, open_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(write_compare(tmp_path / "run", num_layers=1))


def block_of(run: Run) -> Block:
    block = contracts_block(run, "s0")
    assert block is not None
    return block


def fingerprint(run: Run, preset: str = "vllm-eager", **over: Any) -> None:
    content = {
        "format": "rpadiag-fingerprint/1", "captured": {"stack": "rollout", "label": "vllm 0.32.0"}, "undetermined": {}, "presets": [preset],
        "regions": {r: c.to_dict() for r, c in PRESETS[preset].regions.items() if r != "qk_norm"},
        "layers": {"layers.0.q_rope": {"status": "determined"}, "layers.0.act": {"status": "ambiguous"}},
    } | over  # fmt: skip
    (run.path / "fingerprint.json").write_text(json.dumps(content))


def rows(block: Block) -> dict[str, list[str]]:
    return {r[0]: list(r[1:]) for r in block.tables[0].rows}


def test_without_a_fingerprint_the_block_says_what_versions_are_known_to_do_and_that_it_was_not_measured(
    run: Run,
) -> None:
    block = block_of(run)
    assert rows(block)["rope"][:2] == ["cache bf16, products bf16", "cache bf16, products fp32, store toward zero"]
    assert "Neither stack was fingerprinted" in block.lead[0]
    assert block.notes[1].startswith("Rollout: vLLM 0.32.0, known as vllm-cpu-avx2")
    assert "not measured in this run" in block.notes[1]
    assert block.commands[0].code == "rpadiag fingerprint run"
    assert 'contract="vllm-cpu-avx2"' in block.commands[1].code


def test_fingerprint_of_the_run_is_believed_before_any_table(run: Run) -> None:
    fingerprint(run)
    block = block_of(run)
    assert rows(block)["swiglu"] == ["silu bf16", "silu bf16", "same", "nothing"]
    assert rows(block)["rmsnorm"][2:] == ["scale: bf16 against fp32", "--align rmsnorm"]
    assert block.notes[1] == "Rollout: fingerprinted bit for bit on 1 of 2 sites of this run, as vllm-eager."
    assert block.commands[0].code.splitlines()[2] == 'with rpadiag.align(model, regions=("rope", "rmsnorm"), contract="run/fingerprint.json"):'  # fmt: skip
    assert "--align rope,rmsnorm \\\n  --contract run/fingerprint.json \\\n" in block.commands[1].code + " \\\n"


def test_commands_name_files_as_the_user_did_and_quote_them_for_a_shell(run: Run) -> None:
    options = {"model": "models/mine", "prompts": "data/a b.txt", "run": "runs/x; reboot", "max_tokens": 12}
    run.manifest["options"] = {"given": options, "effective": {**options, "rollout": "emulated"}}
    measure, align, again = (command.code for command in block_of(run).commands)
    assert measure == "rpadiag fingerprint 'runs/x; reboot'"
    assert 'contract="vllm-cpu-avx2"' in align
    assert again.startswith("rpadiag compare models/mine 'data/a b.txt' \\\n  --run 'runs/x; reboot-aligned'")
    assert "--max-tokens 12" in again and "--align rope,rmsnorm" in again


def test_fingerprint_of_the_trainer_is_not_taken_for_the_rollouts(run: Run) -> None:
    fingerprint(run, preset="hf-eager", captured={"stack": "trainer"})
    assert contracts_of(run, "trainer").measured
    assert not contracts_of(run, "rollout").measured


def test_region_that_the_fingerprint_could_not_tell_says_why(run: Run) -> None:
    regions = {"rope": PRESETS["vllm-cpu"].regions["rope"].to_dict()}
    fingerprint(run, regions=regions, undetermined={"rmsnorm": "every weight is a power of two"})
    found = rows(block_of(run))["rmsnorm"]
    assert found[1:] == ["every weight is a power of two", "not known", "rpadiag fingerprint on this run"]


def test_aligned_trainer_follows_what_it_was_aligned_to(run: Run) -> None:
    contracts = {r: PRESETS["vllm-cpu-avx2"].regions[r].to_dict() for r in ("rope", "rmsnorm")}
    run.manifest["trainer"]["aligned"] = {"regions": ["rope", "rmsnorm"], "contract": "/somewhere/fingerprint.json", "contracts": {"regions": contracts}}  # fmt: skip
    block = block_of(run)
    assert {r: row[2] for r, row in rows(block).items()} == dict.fromkeys(("rmsnorm", "rope", "swiglu"), "same")
    assert "aligned in rope, rmsnorm to fingerprint.json, otherwise transformers" in block.notes[0]
    assert "round at the same points" in block.lead[0]


@pytest.mark.parametrize(
    ("facts", "preset"),
    [
        ({"engine": "vllm", "device": "cuda", "enforce_eager": False}, "vllm-compiled"),
        ({"engine": "vllm", "device": "cuda", "enforce_eager": True, "vllm_version": "0.26.0"}, "vllm-eager"),
        ({"engine": "vllm", "device": "cuda", "enforce_eager": True, "vllm_version": "0.19.1"}, "vllm-eager-0.19"),
        ({"engine": "vllm", "device": "cpu", "dtype": "bfloat16"}, "vllm-cpu-avx2"),
        ({"engine": "vllm", "device": "cpu", "dtype": "float16"}, "vllm-cpu"),
        ({"engine": "vllm", "device": "cpu", "dtype": "bfloat16", "enforce_eager": False}, "vllm-cpu-compiled"),
        ({"engine": "emulated", "preset": "vllm-native"}, "vllm-native"),
        ({"engine": "transformers"}, "hf-eager"),
        ({"engine": "sglang"}, None),
    ],
)
def test_build_and_mode_choose_what_is_known(facts: dict[str, Any], preset: str | None) -> None:
    assert known_of("rollout", facts, {"devices": {"cpu": {"isa": ["avx2"]}}}).preset == preset


def test_settings_that_differ_come_with_what_to_do(run: Run) -> None:
    run.manifest["rollout"] |= {"quantization": "fp8", "logprobs_mode": "processed_logprobs", "prefix_caching": False}
    table = blocks_contracts.setup_table(run.manifest)
    assert table is not None
    told = {r[0]: r[1:] for r in table.rows}
    assert told["attention"][:2] == ["sdpa", "CPU_ATTN"] and told["attention"][2]
    assert told["quantised weights"][2] == "compare without it to see rounding alone"
    assert told["log-probabilities"][2].startswith("raw_logprobs") and told["prefix caching"][1:] == ["off", ""]


def test_hostile_words_of_a_manifest_stay_words(run: Run, tmp_path: Path) -> None:
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["rollout_label"] = "<script>alert(1)</script>"
    manifest["rollout"] |= {"attention_backend": "</td><img src=x onerror=alert(1)>"}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    page = write_report([run.path], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "<img" not in page


def test_sums_that_are_not_rounded_stand_below_the_regions_and_are_aligned_with_the_norm(run: Run) -> None:
    assert blocks_contracts.SUMS not in rows(block_of(run))
    run.manifest["rollout"] |= {"device": "cuda", "enforce_eager": False}
    block = block_of(run)
    unrounded = "attention's unrounded where the MLP's is added"
    assert rows(block)["residual sums"] == [
        "each stored in bf16",
        unrounded,
        f"each stored in bf16 against {unrounded}",
        "--align rmsnorm",
    ]
    assert "residual sums" in block.lead[0]
    assert 'contract="vllm-compiled"' in block.commands[1].code

    contracts = {"regions": {r: c.to_dict() for r, c in PRESETS["fp32-output"].regions.items()}, "carry": "lp"}
    aligned = {"regions": ["rope", "swiglu", "rmsnorm"], "contract": "fp32-output", "contracts": contracts}
    run.manifest["trainer"]["aligned"] = aligned
    block = block_of(run)
    assert rows(block)["rmsnorm"][2] == "same"
    assert rows(block)["residual sums"][3] == "--align rmsnorm"
    assert 'regions=("rope", "swiglu", "rmsnorm")' in block.commands[1].code  # what is aligned already stays so

    run.manifest["trainer"]["aligned"] = {**aligned, "contracts": {**contracts, "carry": "layer"}}
    block = block_of(run)
    assert rows(block)["residual sums"] == [unrounded, unrounded, "same", "nothing"]
    assert "The stacks part" not in block.lead[0]


def test_sums_of_layers_with_four_norms_are_not_known_and_what_is_recommended_can_be_followed(run: Run) -> None:
    run.manifest["rollout"] |= {"device": "cuda", "enforce_eager": False, "family": "gemma2"}
    found = contracts_of(run, "rollout")
    assert (found.carry, found.preset) == (None, "fp32-output")
    assert "known as vllm-compiled" in found.how


def test_query_and_key_norms_are_aligned_with_the_norm_and_stay_aligned() -> None:
    regions = ["rope", "swiglu", "rmsnorm", "qk_norm"]
    align = blocks_contracts._to_align
    assert align(["rmsnorm"], regions, ()) == ["rmsnorm", "qk_norm"]
    assert align(["rmsnorm"], regions[:3], ()) == ["rmsnorm"]
    assert align(["qk_norm"], regions, ()) == ["qk_norm"]
    assert align([blocks_contracts.SUMS], regions, regions) == regions
    assert align([], regions, regions) == []


def test_families_whose_sums_are_not_known_are_those_with_four_norms() -> None:
    from rpadiag.regions.align_families import FAMILIES

    assert {f.name for f in FAMILIES if f.four_norms} == set(blocks_contracts.FOUR_NORMS)
