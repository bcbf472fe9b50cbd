"""The trainer engine under ``align``: capture and replay follow what the model is patched with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import FAMILIES, token_ids

import rpadiag
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.errors import UsageError

IDS = token_ids(90)
SUM_READING = ("fp32-output", "vllm-cpu", "vllm-native")
OTHERS = ("hf-eager", "vllm-eager")


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, tiny):
    return TrainerEngine.load(tiny(request.param))


def capture(engine):
    found = {}
    scores = engine.forward(
        IDS, sites=engine.facts.sites, on_site=lambda site, tensor: found.__setitem__(site, tensor.clone())
    )
    return scores, found


@pytest.mark.parametrize("preset", SUM_READING + OTHERS)
def test_replaying_every_site_of_an_aligned_model_gives_it_back_to_the_bit(engine, preset):
    with rpadiag.align(engine.model, contract=preset):
        _, found = capture(engine)
        for site in engine.facts.sites:
            inputs = [found[name] for name in engine.reads(site)]
            assert torch.equal(engine.replay(site, inputs, token_ids=IDS), found[site]), site


@pytest.mark.parametrize("preset", SUM_READING)
def test_a_norm_aligned_to_the_unrounded_sum_reads_both_addends(engine, preset):
    assert engine.reads("layers.1.input_norm") == ("layers.0.resid_mlp",)
    with rpadiag.align(engine.model, contract=preset):
        last = f"layers.{engine.facts.num_layers - 1}.resid_mlp"
        assert engine.reads("layers.1.input_norm") == engine.facts.reads("layers.0.resid_mlp")
        assert engine.reads("layers.0.post_norm") == engine.facts.reads("layers.0.resid_attn")
        assert engine.reads("final_norm") == engine.facts.reads(last)
        assert engine.reads("layers.0.input_norm") == ("embed",)  # no add before the first norm
        _, found = capture(engine)
        with pytest.raises(UsageError, match="reads 2 sites"):
            engine.replay("layers.0.post_norm", [found["layers.0.resid_attn"]])
    assert engine.reads("layers.1.input_norm") == ("layers.0.resid_mlp",)


@pytest.mark.parametrize("preset", OTHERS)
def test_a_norm_aligned_to_the_rounded_sum_reads_the_sum(engine, preset):
    with rpadiag.align(engine.model, contract=preset):
        assert engine.reads("layers.1.input_norm") == ("layers.0.resid_mlp",)


def test_only_the_layers_that_are_aligned_read_both_addends(engine):
    with rpadiag.align(engine.model, contract="fp32-output", regions=("rmsnorm",), layers=[0]):
        assert engine.reads("layers.0.post_norm") == engine.facts.reads("layers.0.resid_attn")
        assert engine.reads("layers.1.post_norm") == ("layers.1.resid_attn",)
        _, found = capture(engine)
        for site in engine.facts.sites:
            inputs = [found[name] for name in engine.reads(site)]
            assert torch.equal(engine.replay(site, inputs, token_ids=IDS), found[site]), site


def test_rope_that_includes_the_per_head_norm_reads_the_projection(tiny):
    engine = TrainerEngine.load(tiny("qwen3"))
    assert engine.reads("layers.0.q_rope") == ("layers.0.q_norm",)
    with rpadiag.align(engine.model, contract="fp32-output"):
        assert engine.reads("layers.0.q_rope") == ("layers.0.q",)
        assert engine.reads("layers.0.k_rope") == ("layers.0.k",)
    with rpadiag.align(engine.model, contract="vllm-cpu"):
        assert engine.reads("layers.0.q_rope") == ("layers.0.q_norm",)


def test_aligning_to_what_the_trainer_does_changes_no_bit(engine):
    plain = engine.forward(IDS).logprob
    with rpadiag.align(engine.model, contract="hf-eager"):
        aligned, _ = capture(engine)
    assert np.array_equal(aligned.logprob, plain)


def test_embedding_offsets_and_padding_work_on_an_aligned_model(engine):
    offsets = torch.randint(-1, 2, (len(IDS), 128), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    with rpadiag.align(engine.model):
        plain = engine.forward(IDS).logprob
        moved = engine.forward_with_embedding_offset(IDS, offsets).logprob
        padded = engine.forward_padded([IDS, IDS[:40]])
    assert not np.array_equal(plain, moved)
    assert np.abs(padded[1].logprob - plain[:39]).mean() < 0.1  # rounding of a 2-layer model
