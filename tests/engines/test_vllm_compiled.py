"""vLLM as it runs in production: compiled. Only attention and what follows the model is seen, and that is said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import HEAD_DIM, HEADS, KV_HEADS, token_ids

from rpadiag.contracts import contract_from_dict
from rpadiag.engines.base import TokenSequence
from rpadiag.engines.borrowed import borrowed_attention
from rpadiag.engines.bundle import BundleCapture, open_bundle
from rpadiag.engines.merged import merged_projections
from rpadiag.engines.scoring import score_logits
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.errors import CaptureError
from rpadiag.regions.align import align
from rpadiag.regions.fingerprint_file import level_one
from rpadiag.regions.presets import PRESETS, Preset, load_preset
from rpadiag.sites import split_site
from rpadiag.workflows.fingerprint import run_fingerprint
from rpadiag.workflows.options import FingerprintOptions

SEQUENCES = [TokenSequence(prompt=n, token_ids=tuple(token_ids(n, seed=n)), num_prompt_tokens=n) for n in (37, 5)]


@pytest.fixture(scope="module")
def compiled(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    log = tmp_path_factory.mktemp("compiled") / "log"
    with VllmEngine.start(
        tiny("llama"), enforce_eager=False, max_model_len=101, max_num_batched_tokens=32, log_path=log
    ) as engine:
        yield engine


@pytest.mark.vllm
def test_a_compiled_model_shows_attention_and_head_and_refuses_the_rest(compiled: VllmEngine, tmp_path: Path) -> None:
    assert compiled.manifest()["compile_mode"] != "NONE"
    points = {site.rsplit(".", 1)[-1] for site in compiled.sites}
    assert points == {"q_rope", "k_rope", "v", "attn", "final_norm", "logits", "logprob"}
    with pytest.raises(CaptureError, match=r"layers\.0\.gate was requested but cannot fire") as caught:
        compiled.score(SEQUENCES, sites=["layers.0.gate"])
    assert "enforce_eager=True" in str(caught.value)

    plain = compiled.score(SEQUENCES)
    results = compiled.score(SEQUENCES, sites=compiled.sites, bundle_dir=tmp_path / "prompts")
    for a, b in zip(plain, results, strict=True):
        assert a.scores.logprob.tolist() == b.scores.logprob.tolist()
    results = compiled.score(SEQUENCES, sites=compiled.sites, bundle_dir=tmp_path / "b", num_generate=3, together=True)
    for index, result in enumerate(results):
        capture = open_bundle(tmp_path / "b").capture(index)
        assert capture.sites == compiled.sites
        for layer in (0, 1):
            heads = capture.read(f"layers.{layer}.v")[0].view(KV_HEADS, HEAD_DIM)
            expected = heads.repeat_interleave(HEADS // KV_HEADS, dim=0).reshape(-1)
            assert torch.equal(capture.read(f"layers.{layer}.attn")[0], expected)
        scores = score_logits(capture.read("logits"), result.sequence.token_ids)
        np.testing.assert_array_equal(result.scores.logprob, scores.logprob)
        assert capture.read("final_norm").shape == (len(result.sequence.token_ids), HEADS * HEAD_DIM)


@pytest.mark.vllm
def test_the_compiled_residual_stream_is_never_rounded_and_an_aligned_trainer_carries_it_too(
    compiled: VllmEngine, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """With vLLM's own attention outputs in its layers the trainer's values, queries and keys tell which sums were rounded."""
    compiled.score(SEQUENCES, sites=compiled.sites, bundle_dir=tmp_path / "b")
    trainer = TrainerEngine.load(tiny("llama"))
    found = {}
    for carry in ("lp", "layer", "stream"):
        preset = dataclasses.replace(PRESETS["vllm-cpu-compiled"], carry=carry)
        found[carry] = differing(trainer, open_bundle(tmp_path / "b").capture(0), preset)
    assert found["stream"] == dict.fromkeys(found["stream"], 0.0)
    for site in ("layers.1.v", "layers.1.q_rope", "layers.1.k_rope"):
        assert found["lp"][site] > 0.05 and found["layer"][site] == 0.0, site
    assert found["lp"]["final_norm"] > 0.2 and found["layer"]["final_norm"] > 0.2


@pytest.mark.vllm
def test_the_fingerprint_of_a_compiled_engine_names_its_contracts_and_align_follows_the_file(
    compiled: VllmEngine, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    sites = [s for s in compiled.sites if s != "logprob"]
    compiled.score(SEQUENCES, sites=sites, bundle_dir=tmp_path / "b")
    result = run_fingerprint(FingerprintOptions(target=str(tmp_path / "b"), output=tmp_path / "contract.json"))
    expected = PRESETS["vllm-cpu-compiled"]
    for region in ("rope", "swiglu", "rmsnorm"):
        found = contract_from_dict({**result.content["regions"][region], "region": region})
        assert level_one(found) == level_one(expected.regions[region])
    assert "carry" not in result.content  # two layers cannot tell how far a sum is carried
    assert result.content["blocks"]["exact_rows"]["layers.1.v"] == 1.0
    content = json.loads((tmp_path / "contract.json").read_text(encoding="utf-8")) | {"carry": "stream"}
    (tmp_path / "contract.json").write_text(json.dumps(content), encoding="utf-8")
    preset = load_preset(tmp_path / "contract.json")
    shares = differing(TrainerEngine.load(tiny("llama")), open_bundle(tmp_path / "b").capture(0), preset)
    assert set(shares.values()) == {0.0}


def differing(trainer: TrainerEngine, capture: BundleCapture, preset: Preset) -> dict[str, float]:
    """Share of elements by site, of a trainer aligned to ``preset`` whose attention gives what vLLM's gave."""
    found: dict[str, float] = {}

    def on_site(site: str, ours: torch.Tensor) -> None:
        theirs = capture.read(site)
        found[site] = float((ours.view(theirs.shape).view(torch.int16) != theirs.view(torch.int16)).float().mean())

    def attend(number: int, *_qkv: torch.Tensor) -> torch.Tensor:
        return capture.read(f"layers.{number}.attn")

    sites = [s for s in capture.sites if split_site(s)[1] in ("v", "q_rope", "k_rope", "final_norm")]
    model = trainer.model
    with merged_projections(model), borrowed_attention(model, attend), align(model, contract=preset):
        trainer.forward(capture.sequence.token_ids, sites=sites, on_site=on_site)
    return found
