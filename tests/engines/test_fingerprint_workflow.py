"""``rpadiag fingerprint`` on models, bundles and runs: the contracts of both stacks' own layers, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rpadiag.contracts import QkRopeContract
from rpadiag.engines.base import TokenScores
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.bundle_writer import BundleWriter
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.errors import InputError, UsageError
from rpadiag.regions.align import align
from rpadiag.regions.fingerprint_file import level_one, read_fingerprint_file
from rpadiag.regions.presets import PRESETS, vllm_cpu_preset
from rpadiag.workflows.fingerprint import FingerprintResult, run_fingerprint
from rpadiag.workflows.options import FingerprintOptions

Tiny = Callable[[str], Path]
NUM_TOKENS = 80


def token_ids(seed: int = 0) -> list[int]:
    return torch.randint(3, 500, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": token_ids(i)}) + "\n" for i in range(2)))
    return path


def contracts(result: FingerprintResult) -> dict[str, object]:
    from rpadiag.contracts import contract_from_dict

    return {r: level_one(contract_from_dict(c)) for r, c in result.content["regions"].items()}


def expected(preset: str, *regions: str) -> dict[str, object]:
    return {r: level_one(PRESETS[preset].regions[r]) for r in regions}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_transformers_follows_hf_eager_in_every_layer(tiny: Tiny, prompts: Path, tmp_path: Path, family: str) -> None:
    out = tmp_path / "fingerprint.json"
    options = FingerprintOptions(
        target=str(tiny(family)), prompts=prompts, stack="trainer", device="cpu", output=out
    )  # fmt: skip
    result = run_fingerprint(options)
    assert contracts(result) == expected("hf-eager", "rope", "swiglu", "rmsnorm")
    assert "hf-eager" in result.content["presets"]
    assert all(layer["status"] == "determined" for layer in result.content["layers"].values())
    assert read_fingerprint_file(out)["regions"] == result.content["regions"]
    assert [f.code for f in result.findings] == ["contract"] * 3 + ["presets"]


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_follows_hf_eager_with_norms_of_one_plus_w_and_without_a_swiglu(
    tiny: Tiny, prompts: Path, family: str
) -> None:
    result = run_fingerprint(
        FingerprintOptions(target=str(tiny(family)), prompts=prompts, stack="trainer", device="cpu")
    )
    preset = PRESETS["hf-eager"]
    assert contracts(result) == {
        "rope": level_one(preset.regions["rope"]),
        "rmsnorm": level_one(preset.rmsnorm(offset=True)),
    }
    assert result.content["regions"]["rmsnorm"]["weight"] == "1+w"
    assert "hf-eager" in result.content["presets"]
    norms = {s for s in result.content["layers"] if s.endswith("norm")}
    assert norms == {f"layers.{n}.{p}_norm" for n in (0, 1) for p in ("input", "attn", "post", "mlp")} | {"final_norm"}
    assert all(layer["status"] == "determined" for layer in result.content["layers"].values())
    assert "GeGLU" in next(f.text for f in result.findings if f.code == "not-captured")


def test_a_model_with_experts_shows_the_swiglu_of_its_dense_layer_and_every_norm(tiny: Tiny, prompts: Path) -> None:
    result = run_fingerprint(
        FingerprintOptions(target=str(tiny("qwen3_moe")), prompts=prompts, stack="trainer", device="cpu")
    )
    assert contracts(result) == expected("hf-eager", "rope", "swiglu", "rmsnorm")
    assert [s for s in result.content["layers"] if s.endswith("act")] == ["layers.1.act"]
    assert sum(s.endswith("_norm") for s in result.content["layers"]) == 2 * 3 + 1


def fingerprint_of_aligned(model: Path, contract: str, bundle: Path) -> tuple[FingerprintResult, TokenScores]:
    """Of a bundle that a trainer aligned to ``contract`` made, and what it scored."""
    trainer = TrainerEngine.load(model)
    with align(trainer.model, contract=contract), BundleWriter(bundle, trainer.manifest()) as writer:
        writer.begin(0)
        scores = trainer.forward(token_ids(), sites=trainer.facts.sites[:-2], on_site=writer.append)
        writer.end(0, token_ids=token_ids(), num_prompt_tokens=NUM_TOKENS, positions=scores.positions)
    return run_fingerprint(FingerprintOptions(target=str(bundle), device="cpu")), scores


def test_which_sums_are_stored_is_not_claimed_where_norms_do_not_follow_from_them(tiny: Tiny, tmp_path: Path) -> None:
    result, _ = fingerprint_of_aligned(tiny("llama"), "vllm-compiled", tmp_path / "bundle")
    assert "carry" not in result.content
    assert {"fp32-output", "vllm-compiled"} <= set(result.content["presets"])
    assert "site-disagrees" in [f.code for f in result.findings]


def test_rope_of_an_engine_that_rounds_nothing_between_norm_and_rotation_is_told_with_the_norm(
    tiny: Tiny, tmp_path: Path
) -> None:
    result, scores = fingerprint_of_aligned(tiny("qwen3"), "fp32-output", tmp_path / "bundle")
    assert contracts(result) == expected("fp32-output", "rope", "swiglu", "rmsnorm", "qk_norm")
    second = TrainerEngine.load(tiny("qwen3"))
    with align(second.model, contract=result.path) as alignment:
        assert alignment.mid == "fp32"
        assert second.forward(token_ids()).logprob.tobytes() == scores.logprob.tobytes()


def test_align_follows_a_fingerprint_file(tiny: Tiny, prompts: Path, tmp_path: Path) -> None:
    """The file of an aligned model, used as a contract, makes a fresh model compute the same bits."""
    model, bundle = tiny("llama"), tmp_path / "bundle"
    result, scores = fingerprint_of_aligned(model, "fp32-output", bundle)
    assert result.content["carry"] == "lp"
    assert contracts(result) == expected("fp32-output", "rope", "swiglu", "rmsnorm")
    assert result.path == bundle / "fingerprint.json"
    second = TrainerEngine.load(model)
    with align(second.model, contract=result.path):
        again = second.forward(token_ids())
    assert again.logprob.tobytes() == scores.logprob.tobytes()


def test_boundary_of_qk_norm_and_rope_is_rounded_in_transformers(tiny: Tiny, prompts: Path) -> None:
    options = FingerprintOptions(
        target=str(tiny("qwen3")), prompts=prompts, stack="trainer", regions=("qk_norm",), device="cpu"
    )
    result = run_fingerprint(options)
    assert contracts(result) == {"qk_norm": level_one(QkRopeContract(mid="lp"))}


def test_family_without_qk_norm_says_so(tiny: Tiny, prompts: Path) -> None:
    options = FingerprintOptions(
        target=str(tiny("llama")), prompts=prompts, stack="trainer", regions=("swiglu", "qk_norm"), device="cpu"
    )
    result = run_fingerprint(options)
    assert next(f.text for f in result.findings if f.code == "not-captured").endswith("no per-head norm")


def test_few_tokens_leave_the_norm_undetermined_and_out_of_the_file(tiny: Tiny, tmp_path: Path) -> None:
    prompts = tmp_path / "short.jsonl"
    prompts.write_text(json.dumps({"token_ids": token_ids()[:20]}) + "\n")
    result = run_fingerprint(
        FingerprintOptions(target=str(tiny("llama")), prompts=prompts, stack="trainer", device="cpu")
    )
    assert "rmsnorm" not in result.content["regions"]
    assert "too few rows: 20" in result.content["undetermined"]["rmsnorm"]
    assert {"rope", "swiglu"} <= set(result.content["regions"])


def foreign(directory: Path, model: Path | None, *, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A bundle written by hand, as another engine would: safetensors with site names as keys."""
    from safetensors.torch import save_file

    engine = TrainerEngine.load(model or "")
    tensors: dict[str, torch.Tensor] = {}
    engine.forward(
        token_ids(), sites=engine.facts.sites[:-2], on_site=lambda s, t: tensors.__setitem__(s, t.clone().contiguous())
    )
    edit(tensors)
    directory.mkdir()
    save_file(tensors, directory / "sequence-00000.safetensors")
    meta = {"engine": "other", "model": str(model), "dtype": "bfloat16"}
    sequences = [{"token_ids": token_ids(), "num_prompt_tokens": NUM_TOKENS}]
    content = {"format": "rpadiag-bundle", "version": 1, "status": "complete", "meta": meta, "sequences": sequences}
    (directory / "bundle.json").write_text(json.dumps(content))
    return directory


def test_foreign_bundle_is_fingerprinted_and_a_truncating_kernel_is_called_one_sided(
    tiny: Tiny, tmp_path: Path
) -> None:
    def truncate(tensors: dict[str, torch.Tensor]) -> None:
        act = tensors["layers.1.act"].view(torch.int16)
        odd = torch.arange(act.numel()).reshape(act.shape) % 3 == 0
        tensors["layers.1.act"] = (act - odd.to(torch.int16)).view(torch.bfloat16)

    bundle = foreign(tmp_path / "foreign", tiny("llama"), edit=truncate)
    assert len(open_bundle(bundle)) == 1
    result = run_fingerprint(FingerprintOptions(target=str(bundle), device="cpu"))
    assert result.content["layers"]["layers.0.act"]["status"] == "determined"
    layer = result.content["layers"]["layers.1.act"]
    assert layer["status"] == "no known contract" and layer["structure"]["kind"] == "one-sided"
    told = next(f for f in result.findings if f.code == "site-disagrees")
    assert told.site == "layers.1.act" and "toward zero" in told.text


def test_bundle_without_inputs_says_what_it_did_not_see(tiny: Tiny, tmp_path: Path) -> None:
    def keep_what_attention_reads(tensors: dict[str, torch.Tensor]) -> None:
        for site in [s for s in tensors if not s.endswith(("q_rope", "k_rope", ".v"))]:
            del tensors[site]

    bundle = foreign(tmp_path / "foreign", tiny("llama"), edit=keep_what_attention_reads)
    result = run_fingerprint(FingerprintOptions(target=str(bundle), device="cpu"))
    assert result.content["regions"] == {}
    assert {f.code for f in result.findings} == {"not-captured"}
    assert "_rope needs layers" in next(f.text for f in result.findings if f.region == "rope")


def test_bundle_of_attention_alone_is_told_from_whole_layers(tiny: Tiny, tmp_path: Path) -> None:
    def keep_attention(tensors: dict[str, torch.Tensor]) -> None:
        for site in [s for s in tensors if not s.endswith(("q_rope", "k_rope", ".v", ".attn"))]:
            del tensors[site]

    bundle = foreign(tmp_path / "foreign", tiny("llama"), edit=keep_attention)
    result = run_fingerprint(FingerprintOptions(target=str(bundle), device="cpu"))
    assert contracts(result) == expected("hf-eager", "rope", "swiglu", "rmsnorm")
    assert [f.code for f in result.findings[:3]] == ["contract"] * 3
    assert "told from whole layers" in result.findings[0].text and result.content["undetermined"] == {}


def test_bundle_that_names_no_model_is_an_error(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b", {"engine": "other"}) as writer:
        writer.begin(0)
        writer.append("layers.0.act", torch.zeros(3, 4))
        writer.end(0, token_ids=[1, 2, 3], num_prompt_tokens=3)
    with pytest.raises(InputError, match="does not say which model"):
        run_fingerprint(FingerprintOptions(target=str(tmp_path / "b")))


def test_target_that_is_neither_run_nor_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run nor a bundle"):
        run_fingerprint(FingerprintOptions(target=str(tmp_path)))


def test_run_is_captured_again_from_its_tokens(tiny: Tiny, tmp_path: Path) -> None:
    from rpadiag.runs import create_run

    with create_run(tmp_path / "run", command="compare", options={"model": str(tiny("llama")), "device": "cpu"}) as run:
        run.add_prompts([{"prompt": 0, "num_prompt_tokens": NUM_TOKENS, "text": "", "token_ids": token_ids()}])
    result = run_fingerprint(FingerprintOptions(target=str(tmp_path / "run"), stack="trainer"))
    assert contracts(result) == expected("hf-eager", "rope", "swiglu", "rmsnorm")
    assert result.path == tmp_path / "run" / "fingerprint.json"


@pytest.mark.vllm
def test_vllm_on_the_cpu_follows_its_preset_in_every_layer(tiny: Tiny, prompts: Path) -> None:
    options = FingerprintOptions(
        target=str(tiny("qwen3")), prompts=prompts, regions=("rope", "swiglu", "rmsnorm"), device="cpu"
    )
    result = run_fingerprint(options)
    preset = vllm_cpu_preset().name
    assert contracts(result) == expected(preset, "rope", "swiglu", "rmsnorm")
    assert preset in result.content["presets"]
    assert all(layer["status"] == "determined" for layer in result.content["layers"].values())
