"""align to engines that carry residual sums unrounded from add to add: within a layer, or through the whole model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_models import IDS, LAYERS, assert_same, differs, make_model, step
from torch import Tensor

import rpadiag
from rpadiag.errors import InputError, UsageError
from rpadiag.regions.presets import PRESETS, Preset, load_preset

ONLY_NORMS = ("rmsnorm",)


def carrying(carry: str) -> Preset:
    return dataclasses.replace(PRESETS["fp32-output"], carry=carry)


def by_hand(model: Any, carry: str) -> Tensor:
    """Last hidden states [T, H], layer by layer in plain torch: which add reads what is written out here."""
    decoder = model.model
    hidden = decoder.embed_tokens(IDS[:1])
    positions = torch.arange(IDS.shape[1])[None]
    tables = decoder.rotary_emb(hidden, positions)
    mask = torch.full((IDS.shape[1],) * 2, float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
    read = hidden.float()  # what norms read and what the next add reads
    for layer in decoder.layers:
        residual = read if carry == "stream" else read.to(hidden.dtype).float()
        x, _ = layer.self_attn(
            hidden_states=norm(layer.input_layernorm, read), attention_mask=mask, position_embeddings=tables
        )
        total = x.float() + residual
        kept = total if carry != "lp" else total.to(hidden.dtype).float()
        read = layer.mlp(norm(layer.post_attention_layernorm, total)).float() + kept
    return norm(decoder.norm, read)[0]


def norm(module: Any, x: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / torch.tensor(float(x.shape[-1])) + module.variance_epsilon)
    return (y * module.weight.float()).to(module.weight.dtype)


@torch.no_grad()
@pytest.mark.parametrize("carry", ["lp", "layer", "stream"])
def test_each_add_reads_the_sum_before_it_as_the_carry_says(carry: str) -> None:
    model = make_model("llama").eval()
    model.set_attn_implementation("eager")
    expected = by_hand(model, carry)
    with rpadiag.align(model, ONLY_NORMS, contract=carrying(carry)):
        found = model.model(input_ids=IDS[:1]).last_hidden_state[0]
    assert torch.equal(found, expected)


def test_the_three_carries_are_three_results_and_undo_brings_every_bit_back() -> None:
    model = make_model("qwen3")
    before, results = step(model), []
    for carry in ("lp", "layer", "stream"):
        with rpadiag.align(model, contract=carrying(carry)) as alignment:
            results.append(step(model))
        assert alignment.to_dict()["carry"] == carry
    assert_same(before, step(model))
    assert differs(results[0], results[1]) and differs(results[1], results[2]) and differs(results[0], results[2])


def test_gradients_are_those_of_the_fp32_model_to_the_precision_of_bf16() -> None:
    wide = step(make_model("llama", dtype=torch.float32))[1]
    model = make_model("llama")
    with rpadiag.align(model, contract=carrying("stream")):
        found = step(model)[1]
    for name, gradient in wide.items():
        assert torch.isfinite(found[name]).all()
        assert (found[name].float() - gradient).norm() / gradient.norm() < 0.1, name


def test_hooks_and_outputs_see_rounded_tensors_as_before() -> None:
    model, seen = make_model("llama"), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        layer.post_attention_layernorm.register_forward_hook(
            lambda module, inputs, output: seen.append(inputs[0].dtype)
        )
    with rpadiag.align(model, contract=carrying("stream")):
        out = model(input_ids=IDS, output_hidden_states=True)
    assert set(seen) == {torch.bfloat16} and len(seen) == 2 * LAYERS
    assert {h.dtype for h in out.hidden_states} == {torch.bfloat16}


@pytest.mark.parametrize("carry", ["layer", "stream"])
def test_gradient_checkpointing_changes_no_bit(carry: str) -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract=carrying(carry)):
        plain = step(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_same(plain, step(model))


@pytest.mark.parametrize("carry", ["layer", "stream"])
def test_the_compiled_model_has_the_logits_of_the_uncompiled_one(carry: str) -> None:
    model = make_model("llama").eval()
    model.set_attn_implementation("eager")
    with rpadiag.align(model, contract=carrying(carry)), torch.no_grad():
        plain = model(input_ids=IDS).logits
        compiled = torch.compile(model, backend="aot_eager")(input_ids=IDS).logits
    assert torch.equal(plain, compiled)


def test_one_layer_can_be_aligned_and_a_model_in_fp32_stays_as_it_is() -> None:
    model = make_model("llama")
    with rpadiag.align(model, ONLY_NORMS, contract=carrying("layer"), layers=[1]):
        one = step(model)
    with rpadiag.align(model, ONLY_NORMS, contract=carrying("layer")):
        assert differs(one, step(model))
    wide = make_model("llama", dtype=torch.float32)
    with rpadiag.align(wide, ONLY_NORMS, contract=carrying("lp")):
        expected = step(wide)[0]
    with rpadiag.align(wide, ONLY_NORMS, contract=carrying("stream")):
        torch.testing.assert_close(step(wide)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_carry_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(UsageError, match=r"carry=stream is for layers with two norms.*\n.*gemma3"):
        rpadiag.align(make_model("gemma3"), contract=carrying("stream"))
    rounded = dataclasses.replace(PRESETS["vllm-eager"], carry="layer")
    with pytest.raises(UsageError, match="that read unrounded sums"):
        rpadiag.align(make_model("llama"), contract=rounded)


def test_a_hook_that_replaces_hidden_states_is_an_error_and_no_other_result() -> None:
    model = make_model("llama")
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1)
    with rpadiag.align(model, contract=carrying("stream")):
        with pytest.raises(InputError, match="residual sum of layer 1 did not reach layer 2") as caught:
            model(input_ids=IDS)
        assert "such as vllm-eager" in str(caught.value)


def test_a_file_keeps_the_carry_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(carrying("layer").to_dict()), encoding="utf-8")
    assert load_preset(path).carry == "layer"
    assert "carry" not in PRESETS["fp32-output"].to_dict()
    assert [PRESETS[name].carry for name in ("vllm-compiled", "vllm-cpu-compiled")] == ["layer", "stream"]
    path.write_text(json.dumps(PRESETS["fp32-output"].to_dict() | {"carry": "layers"}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"unknown carry of the residual stream: layers") as caught:
        load_preset(path)
    assert "stream" in str(caught.value)
