"""The trainer engine on a CUDA device: the same contract as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import FAMILIES, token_ids

import rpadiag
from rpadiag.engines.trainer import TrainerEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = token_ids(90)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", [None, "fp32-output", "vllm-eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_every_site_on_the_gpu_gives_it_back_to_the_bit(family, preset, attention, tiny):
    engine = TrainerEngine.load(tiny(family), device="cuda", attention=attention)
    alignment = rpadiag.align(engine.model, contract=preset) if preset else None
    found = {}
    scores = engine.forward(
        IDS, sites=engine.facts.sites, on_site=lambda site, tensor: found.__setitem__(site, tensor.cpu())
    )
    assert np.array_equal(scores.logprob, engine.forward(IDS).logprob)
    for site in engine.facts.sites:
        inputs = [found[name] for name in engine.reads(site)]
        replayed = engine.replay(site, inputs, token_ids=IDS)
        assert replayed.device.type == "cpu"
        assert torch.equal(replayed, found[site]), site
    if alignment is not None:
        alignment.undo()


def test_weights_on_the_gpu_have_the_digests_they_have_on_the_cpu(tiny):
    on_gpu, on_cpu = (TrainerEngine.load(tiny("qwen3"), device=d) for d in ("cuda", "cpu"))
    assert on_gpu.weight_digests() == on_cpu.weight_digests()


def test_float32_on_the_gpu_agrees_with_the_cpu_up_to_rounding(tiny):
    on_gpu, on_cpu = (TrainerEngine.load(tiny("llama"), device=d, dtype="float32") for d in ("cuda", "cpu"))
    # float32 matrix products in another order, logits up to 20
    assert np.abs(on_gpu.forward(IDS).logprob - on_cpu.forward(IDS).logprob).max() < 1e-3
