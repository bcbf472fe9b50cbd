"""The emulated rollout engine: labelled, same surface as the real one, distance made by its contracts only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.emulated import EmulatedEngine
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.errors import UsageError


def sequence(length, *, prompt=0, seed=0):
    ids = tuple(token_ids(length, seed=seed))
    return TokenSequence(prompt=prompt, token_ids=ids, num_prompt_tokens=length)


@pytest.fixture(scope="module")
def trainer(tiny):
    return TrainerEngine.load(tiny("qwen3"))


def test_emulating_the_trainers_own_contracts_gives_its_scores_to_the_bit(tiny, trainer):
    one = sequence(60)
    with EmulatedEngine.start(tiny("qwen3"), preset="hf-eager") as engine:
        (result,) = engine.score([one])
    assert np.array_equal(result.scores.logprob, trainer.forward(one.token_ids).logprob)
    assert result.sequence == one and result.positions.tolist() == list(range(60))


def test_emulation_differs_from_the_trainer_in_the_regions_of_its_preset_alone(tiny, trainer, tmp_path):
    one = sequence(60)
    with EmulatedEngine.start(tiny("qwen3"), preset="vllm-cpu") as engine:
        engine.score([one], sites=engine.facts.sites, bundle_dir=tmp_path / "bundle")
    capture = open_bundle(tmp_path / "bundle").capture(0)
    assert list(capture.sites) == list(engine.facts.sites) or set(capture.sites) == set(engine.facts.sites)
    differing = set()
    for site in engine.facts.sites:
        inputs = [capture.read(name) for name in trainer.reads(site)]
        if not torch.equal(trainer.replay(site, inputs, token_ids=one.token_ids), capture.read(site)):
            differing.add(site.rsplit(".", 1)[-1])
    # vLLM's CPU engine rounds silu as transformers does, and a norm without a residual: no swiglu, no per-head norms
    assert differing == {"input_norm", "post_norm", "final_norm", "q_rope", "k_rope"}


def test_manifest_says_emulated_and_what_it_does_not_emulate(tiny):
    with EmulatedEngine.start(tiny("llama"), preset="vllm-eager") as engine:
        manifest = engine.manifest()
    assert manifest["emulated"] is True and manifest["engine"] == "emulated" and manifest["preset"] == "vllm-eager"
    assert {"matmul", "attention"} <= set(manifest["not_emulated"])
    assert set(manifest["alignment"]["regions"]) >= {"rope", "swiglu", "rmsnorm"}


def test_weights_are_those_of_the_trainer(tiny, trainer):
    with EmulatedEngine.start(tiny("qwen3")) as engine:
        assert engine.weight_digests() == trainer.weight_digests()


def test_generated_tokens_follow_the_seed_and_are_scored_as_one_sequence(tiny, tmp_path):
    with EmulatedEngine.start(tiny("llama")) as engine:
        (first,) = engine.score([sequence(20)], num_generate=6, sites=["embed"], bundle_dir=tmp_path / "b", seed=3)
        (again,) = engine.score([sequence(20)], num_generate=6, seed=3)
        (other,) = engine.score([sequence(20)], num_generate=6, seed=4)
        (greedy,) = engine.score([sequence(20)], num_generate=6, temperature=0)
        (rescored,) = engine.score([first.sequence])
    assert len(first.sequence.token_ids) == 26 and first.sequence.num_prompt_tokens == 20
    assert first.sequence == again.sequence != other.sequence
    assert np.array_equal(first.scores.logprob, rescored.scores.logprob)
    assert greedy.scores.rank[19] == 1
    assert open_bundle(tmp_path / "b").capture(0).read("embed").shape == (26, 128)


def test_a_batch_is_padded_and_captures_nothing(tiny):
    two = [sequence(30, prompt=0), sequence(50, prompt=1, seed=1)]
    with EmulatedEngine.start(tiny("llama")) as engine:
        together = engine.score(two, together=True)
        alone = engine.score(two)
        with pytest.raises(UsageError, match="captures no sites"):
            engine.score(two, together=True, sites=["embed"])
    for a, b in zip(together, alone, strict=True):
        assert len(a.scores) == len(b.scores)
        assert np.abs(a.scores.logprob - b.scores.logprob).mean() < 0.1  # rounding of a 2-layer model


def test_reloading_in_float32_takes_rounding_away(tiny):
    one = sequence(60)
    full = TrainerEngine.load(tiny("llama"), dtype="float32")
    with EmulatedEngine.start(tiny("llama")) as engine:
        engine.reload(dtype="float32")
        (result,) = engine.score([one])
    # float32 against float32 with another order of operations: about 1e-7 of logits up to 20
    assert np.abs(result.scores.logprob - full.forward(one.token_ids).logprob).max() < 1e-4


def test_unknown_preset_is_an_error_that_lists_the_known_ones(tiny):
    with pytest.raises(UsageError) as caught:
        EmulatedEngine.start(tiny("llama"), preset="vllm-gpu")
    assert "vllm-cpu" in str(caught.value)
