"""Switches of a trainer: what they change, where, and that nothing of them stays."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from tiny import make_checkpoint, token_ids

from rpadiag.engines.merged import merged_projections
from rpadiag.engines.products import fp32_products
from rpadiag.engines.switches import MEANINGS, TrainerSwitches, eager_attention, fp32_attention, switchable_regions
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.errors import RpadiagError, UsageError
from rpadiag.sites import region_of, split_site

IDS = token_ids(80)
LAYERS = 3
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("three")
    return TrainerEngine.load(make_checkpoint(root / request.param, request.param, num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return TrainerEngine.load(make_checkpoint(tmp_path_factory.mktemp("llama") / "llama", num_hidden_layers=LAYERS))


def capture(engine):
    found = {}
    scores = engine.forward(
        IDS, sites=engine.facts.sites, on_site=lambda site, tensor: found.__setitem__(site, tensor.clone())
    )
    return scores.logprob, found


def regions_here(engine):
    own = ("rope", "swiglu", "rmsnorm", "attention", "lm_head")
    return (*own, "qk_norm") if engine.facts.qk_norm else own


def test_each_switch_changes_its_own_region_first_and_nothing_before_its_layers(engine):
    _, plain = capture(engine)
    switches = TrainerSwitches(engine.model, contract="vllm-compiled")
    for region in regions_here(engine):
        for first in (0, 1):
            with switches.aligned({region: range(first, 2)}):
                _, found = capture(engine)
            changed = [s for s in engine.facts.sites if not torch.equal(found[s], plain[s])]
            assert changed, region
            assert region_of(changed[0]) == region, (region, changed[0])
            layer, _ = split_site(changed[0])
            assert layer == (None if region == "lm_head" else first) or region == "rmsnorm"
            assert layer is None or layer >= first


def test_a_switch_changes_only_its_layers_when_each_operation_is_fed_the_same_input(engine):
    _, plain = capture(engine)
    switches = TrainerSwitches(
        engine.model, contract="vllm-eager"
    )  # reads rounded sums, so that inputs stay the same sites
    for region in ("rope", "swiglu", "rmsnorm", "attention"):
        with switches.aligned({region: [1]}):
            local = {s for s in engine.facts.sites if not same_when_replayed(engine, s, plain)}
        regions = {region_of(s) for s in local}
        assert regions <= {region} and {split_site(s)[0] for s in local} <= {1}, (region, local)
        assert local or region == "swiglu"  # vLLM's eager SwiGLU rounds as transformers does


def same_when_replayed(engine, site, plain):
    inputs = [plain[name] for name in engine.reads(site)]
    return torch.equal(engine.replay(site, inputs, token_ids=IDS), plain[site])


def test_merged_products_are_the_separate_ones_up_to_the_order_of_addition(engine):
    plain, _ = capture(engine)
    switches = TrainerSwitches(engine.model, contract="fp32-output")
    with switches.aligned({"matmul": None}):
        merged, _ = capture(engine)
    with merged_projections(engine.model):
        reference, _ = capture(engine)
    assert np.array_equal(merged, reference)
    assert np.abs(merged - plain).max() < 0.5
    wide = TrainerSwitches(engine.model, contract="fp32-output", wide_products=True)
    with fp32_products(engine.model):
        before, _ = capture(engine)
        with wide.aligned({"matmul": [0, 2]}):
            one, _ = capture(engine)
        assert np.abs(one - before).max() < 0.5
        after, _ = capture(engine)
    assert np.array_equal(before, after)


def test_the_head_in_fp32_leaves_logits_unrounded(llama):
    with TrainerSwitches(llama.model, contract="fp32-output").aligned({"lm_head": None}):
        _, found = capture(llama)
    assert found["logits"].dtype == torch.float32
    weight = llama.model.lm_head.weight
    assert torch.equal(found["logits"], found["final_norm"].float() @ weight.float().T)


def test_fp32_attention_rounds_once_and_eager_attention_is_that_of_transformers(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("backends") / "mistral", "mistral", num_hidden_layers=2)
    sdpa, eager = TrainerEngine.load(path), TrainerEngine.load(path, attention="eager")
    with TrainerSwitches(sdpa.model, contract="fp32-output", attention="eager").aligned({"attention": None}):
        switched, _ = capture(sdpa)
    assert np.array_equal(switched, capture(eager)[0])  # 80 tokens and a window of 64: the mask is not plain causal
    torch.manual_seed(0)
    module = sdpa.model.model.layers[0].self_attn
    query, key, value = (torch.randn(2, h, 9, 32, dtype=torch.bfloat16) for h in (4, 2, 2))
    got, _ = fp32_attention(module, query, key, value)
    wide = [x.double() for x in (query, key, value)]
    exact, _ = eager_attention(module, *wide)
    assert (got.double() - exact).abs().max() <= (exact.abs() * 2**-8).max()  # half an ULP of the largest output


def test_borrowed_attention_is_called_for_its_layers_alone_and_row_by_row(llama):
    calls = []

    def attend(layer, query, key, value):
        calls.append((layer, tuple(query.shape), tuple(key.shape)))
        return torch.zeros_like(query)

    switches = TrainerSwitches(llama.model, contract="fp32-output", attention=attend)
    with switches.aligned({"attention": [1]}), torch.no_grad():
        llama.model(input_ids=torch.tensor([IDS, IDS]))
    assert calls == [(1, (80, 128), (80, 64))] * 2
    assert switches.regions["attention"] == "the rollout engine's own operator"


def test_regions_can_be_aligned_in_different_layers_at_once(engine):
    layers = {"rope": [0, 1], "swiglu": [1, 2], "rmsnorm": [2], "attention": [0], "matmul": [1], "lm_head": None}
    if engine.facts.qk_norm:
        layers["qk_norm"] = [1, 2]
    for contract in ("fp32-output", "flashinfer", "vllm-cpu-avx2"):
        with TrainerSwitches(engine.model, contract=contract).aligned(layers):
            logprob, _ = capture(engine)
        assert np.isfinite(logprob).all()


def test_the_model_is_as_before_also_when_the_block_or_a_switch_raises(engine):
    before, _ = capture(engine)
    switches = TrainerSwitches(engine.model, contract="fp32-output")
    every = dict.fromkeys(regions_here(engine) + ("matmul",))
    with contextlib.suppress(KeyError), switches.aligned(every):
        capture(engine)
        raise KeyError
    with pytest.raises(UsageError, match="no layer 7"), switches.aligned({**every, "swiglu": [7]}):
        raise AssertionError
    assert all("forward" not in module.__dict__ for module in engine.model.modules())
    assert np.array_equal(capture(engine)[0], before)


def test_every_region_has_a_meaning_or_a_reason(engine):
    switches = TrainerSwitches(engine.model, contract="fp32-output")
    assert set(switches.regions) | set(switches.absent) == set(MEANINGS)
    assert ("qk_norm" in switches.absent) != engine.facts.qk_norm
    assert switchable_regions(engine.model, "fp32-output") == switches.regions


def test_unknown_regions_and_regions_the_model_lacks_are_errors(llama):
    switches = TrainerSwitches(llama.model, contract="fp32-output")
    with pytest.raises(RpadiagError, match="rotary") as unknown, switches.aligned({"rotary": None}):
        raise AssertionError
    assert "lm_head" in str(unknown.value.detail) + str(unknown.value.hint)
    with pytest.raises(UsageError, match="no switch for region qk_norm"), switches.aligned({"qk_norm": None}):
        raise AssertionError
    with pytest.raises(RpadiagError, match="paged"):
        TrainerSwitches(llama.model, contract="fp32-output", attention="paged")
