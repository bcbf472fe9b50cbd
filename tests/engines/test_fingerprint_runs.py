"""``rpadiag fingerprint RUN``: the run's stacks are made again as they were, or the command says why it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import planted_copy, token_ids

from rpadiag.contracts import QkRopeContract, contract_from_dict
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.errors import NotComparableError, UsageError
from rpadiag.regions.fingerprint_file import level_one
from rpadiag.regions.presets import PRESETS
from rpadiag.workflows.compare import run_compare
from rpadiag.workflows.fingerprint import FingerprintResult, run_fingerprint
from rpadiag.workflows.fingerprint_sites import POSITIONS_ASSUMED
from rpadiag.workflows.options import CompareOptions, FingerprintOptions

Tiny = Callable[[str], Path]
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of this module's own."""
    return planted_copy(tiny("llama"), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text(json.dumps({"token_ids": token_ids(NUM_TOKENS)}) + "\n")
    return path


@pytest.fixture(scope="module")
def emulated(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of a trainer aligned in RoPE with an emulated rollout of another contract."""
    where = tmp_path_factory.mktemp("runs") / "run"
    run_compare(
        CompareOptions(
            model=str(model),
            prompts=prompts,
            run=where,
            rollout="emulated",
            emulate="vllm-eager",
            align=("rope",),
            contract="vllm-compiled",
            control="none",
            device="cpu",
        )
    )
    return where


def contracts(result: FingerprintResult) -> dict[str, object]:
    return {r: level_one(contract_from_dict(c)) for r, c in result.content["regions"].items()}


def expected(preset: str, *regions: str) -> dict[str, object]:
    return {r: level_one(PRESETS[preset].regions[r]) for r in regions}


def fingerprint(run: Path, tmp_path: Path, **options: Any) -> FingerprintResult:
    return run_fingerprint(FingerprintOptions(target=str(run), output=tmp_path / "f.json", **options))


def test_emulated_rollout_of_a_run_follows_what_was_emulated(emulated: Path, tmp_path: Path) -> None:
    result = fingerprint(emulated, tmp_path)
    assert contracts(result) == expected("vllm-eager", "rope", "swiglu", "rmsnorm")
    assert result.content["captured"]["label"] == "emulated vllm-eager"
    assert result.content["captured"]["emulated"] is True


def test_trainer_of_a_run_is_aligned_as_the_run_aligned_it(emulated: Path, tmp_path: Path) -> None:
    result = fingerprint(emulated, tmp_path, stack="trainer")
    assert contracts(result) == {
        **expected("vllm-compiled", "rope"),
        **expected("hf-eager", "swiglu", "rmsnorm"),
    }
    assert result.content["captured"]["aligned"] == ["rope"]


def test_mode_asked_for_on_an_emulated_run_is_an_error(emulated: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was emulated"):
        fingerprint(emulated, tmp_path, mode="compiled")


def test_option_given_wins_over_the_run(emulated: Path, tmp_path: Path) -> None:
    result = fingerprint(emulated, tmp_path, dtype="float32", stack="trainer", regions=("swiglu",))
    assert result.content["captured"]["dtype"] == "float32"
    assert "bfloat16" not in str(result.content["undetermined"])
    cut = fingerprint(emulated, tmp_path, max_tokens=20, stack="trainer", regions=("swiglu",))
    assert cut.content["layers"]["layers.0.act"]["num_rows"] == 20


@pytest.fixture
def changed(model: Path) -> Iterator[str]:
    """The name of a tensor of the model that is another one for as long as a test runs."""
    from safetensors.torch import load_file, save_file

    name = "model.layers.1.mlp.up_proj.weight"
    path = model / "model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    tensors[name] = tensors[name] * 2
    save_file(tensors, path, metadata={"format": "pt"})
    yield name
    path.write_bytes(before)


@pytest.mark.parametrize("options", [{}, {"stack": "trainer"}, {"dtype": "float32"}])
def test_model_that_changed_since_the_run_is_an_error(
    emulated: Path, changed: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(NotComparableError, match="has other weights than run") as caught:
        fingerprint(emulated, tmp_path, **options)
    assert changed in str(caught.value) and "1 of 21 tensors" in str(caught.value)
    assert not (tmp_path / "f.json").exists()


def test_attention_factor_of_yarn_is_part_of_the_boundary_of_qk_norm_and_rope(tmp_path: Path, prompts: Path) -> None:
    from tiny import make_checkpoint

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    model = make_checkpoint(tmp_path / "yarn", "qwen3", rope_parameters=yarn)
    rotary: Any = TrainerEngine.load(model).model.model.rotary_emb  # type: ignore[union-attr]
    assert rotary.attention_scaling != 1.0
    options = FingerprintOptions(
        target=str(model), prompts=prompts, stack="trainer", regions=("qk_norm", "rope"), device="cpu"
    )
    result = run_fingerprint(options)
    assert contracts(result)["qk_norm"] == level_one(QkRopeContract(mid="lp"))
    assert contracts(result)["rope"] == level_one(PRESETS["hf-eager"].regions["rope"])


def bundle_without_positions(directory: Path, model: Path, *, first: int) -> Path:
    """A capture at positions from ``first`` on, in a bundle that records none."""
    from rpadiag.engines.bundle_writer import BundleWriter

    trainer = TrainerEngine.load(model)
    ids = token_ids(NUM_TOKENS)
    with BundleWriter(directory, trainer.manifest()) as writer:
        writer.begin(0)
        trainer.forward(
            ids, sites=trainer.facts.sites[:-2], on_site=writer.append, positions=range(first, first + NUM_TOKENS)
        )
        writer.end(0, token_ids=ids, num_prompt_tokens=NUM_TOKENS)
    return directory


def test_positions_that_were_not_recorded_are_proved_by_a_contract_that_fits(model: Path, tmp_path: Path) -> None:
    result = fingerprint(bundle_without_positions(tmp_path / "b", model, first=0), tmp_path, regions=("rope",))
    assert contracts(result) == expected("hf-eager", "rope")


def test_positions_that_were_not_recorded_are_the_reason_when_no_contract_fits(model: Path, tmp_path: Path) -> None:
    result = fingerprint(bundle_without_positions(tmp_path / "b", model, first=3), tmp_path, regions=("rope",))
    assert contracts(result) == {}
    assert POSITIONS_ASSUMED in result.content["undetermined"]["rope"]
    assert result.content["layers"]["layers.0.q_rope"]["status"] == "not determined"


def test_place_that_cannot_be_written_is_an_error_before_the_model_is_looked_at(tmp_path: Path) -> None:
    from rpadiag.errors import InputError

    with pytest.raises(InputError, match="cannot write"):
        run_fingerprint(FingerprintOptions(target=str(tmp_path / "no-run"), output=tmp_path / "no" / "f.json"))
