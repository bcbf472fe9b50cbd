"""align: the bits of an aligned model, and what can be aligned: regions, layers, contracts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_models import IDS, LAYERS, WAYS, assert_same, differs, make_model, step
from torch import Tensor, nn

import rpadiag
from rpadiag.contracts import RopeContract, SwigluContract
from rpadiag.regions import rmsnorm, rope, swiglu
from rpadiag.regions.align_families import FAMILIES
from rpadiag.regions.presets import PRESETS

# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", [f.name for f in FAMILIES])
def test_hf_eager_leaves_every_logit_and_gradient_as_it_was(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype=dtype)
    before = step(model)
    with rpadiag.align(model, contract="hf-eager"):
        assert_same(before, step(model))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"torchtitan"}))  # interleaved: refused, tested below
def test_undo_brings_every_bit_back(family: str, preset: str) -> None:
    if PRESETS[preset].carry != "lp" and family == "gemma3":
        pytest.skip("four norms a layer: refused, tested in test_align_carry.py")
    model = make_model(family)
    before = step(model)
    with rpadiag.align(model, contract=preset):
        inside = step(model)
    assert_same(before, step(model))
    # vLLM's kernels up to 0.19 round where transformers does; Gemma's norm is the exception.
    assert differs(before, inside) or preset == "hf-eager" or (preset, family) == ("vllm-eager-0.19", "qwen3")
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_smollm2_aligned_to_hf_eager_is_the_unaligned_model_in_every_bit(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).train()
    few = IDS[:1, :10]  # all layers and the head, and few tokens: BF16 products are slow where a CPU has none
    before = step(model, ids=few)
    with rpadiag.align(model, contract="hf-eager"):
        assert_same(before, step(model, ids=few))


@pytest.mark.parametrize("preset", ["fp32-output", "vllm-native", "vllm-cpu-ops"])
def test_every_op_of_an_aligned_layer_follows_its_contract(preset: str) -> None:
    """The model's sites, recomputed by hand from the tensors that the hooks see."""
    model = make_model("llama")
    contract: Any = PRESETS[preset].regions
    seen: dict[str, Any] = {}
    layer, below = model.model.layers[1], model.model.layers[0]

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.__setitem__(name, (args, out))

    for name, module in {
        "mlp_below": below.mlp,
        "post_below": below.post_attention_layernorm,
        "input_norm": layer.input_layernorm,
        "o": layer.self_attn.o_proj,
        "post_norm": layer.post_attention_layernorm,
        "gate": layer.mlp.gate_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
    }.items():
        module.register_forward_hook(keep(name))
    with rpadiag.align(model, contract=preset), torch.no_grad():
        model(input_ids=IDS)

    (stream,), normed = seen["input_norm"]
    (before,), _ = seen["post_below"]
    y, stored = rmsnorm.reference(
        seen["mlp_below"][1], layer.input_layernorm.weight, eps=1e-6, contract=contract["rmsnorm"], residual=before
    )
    assert torch.equal(normed, y) and torch.equal(stream, stored)
    (middle,), normed = seen["post_norm"]
    y, stored = rmsnorm.reference(
        seen["o"][1], layer.post_attention_layernorm.weight, eps=1e-6, contract=contract["rmsnorm"], residual=stream
    )
    assert torch.equal(normed, y) and torch.equal(middle, stored)
    act = swiglu.reference(seen["gate"][1], seen["up"][1], contract=contract["swiglu"])
    assert torch.equal(seen["down"][0][0], act)


@pytest.mark.parametrize("cache", ["lp", "fp32"])
def test_queries_and_keys_reach_attention_as_the_contract_says(cache: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, seen = make_model("llama"), []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.detach(), key.detach()))
        return sdpa(module, query, key, *args, **kwargs)

    projected: list[Tensor] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *a: projected.append(a[2].detach()))
    contract = RopeContract(cache=cache, products="fp32", grad_products="fp32")
    ALL_ATTENTION_FUNCTIONS.register("sdpa", spy)
    try:
        with rpadiag.align(model, regions=("rope",), contract=contract), torch.no_grad():
            model(input_ids=IDS)
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)
    angle = torch.arange(24).float()[:, None] * model.model.rotary_emb.inv_freq
    query = projected[0].view(2, 24, 4, 16).transpose(1, 2)
    expected = rope.rotate(query, angle.cos()[None, None], angle.sin()[None, None], contract=contract)
    assert torch.equal(seen[0][0], expected)


def test_a_float32_model_keeps_its_values_because_nothing_is_rounded_there() -> None:
    model = make_model("qwen3", dtype=torch.float32)
    before = step(model)[0]
    with rpadiag.align(model, contract="vllm-native"):
        after = step(model)[0]
    assert float((before - after).abs().max()) < 1e-4


# --- choice of regions, layers and contracts -------------------------------------------------------------------------


@pytest.mark.parametrize("region", ["rope", "swiglu", "rmsnorm"])
def test_one_region_alone_changes_bits_and_records_itself(region: str) -> None:
    model = make_model("qwen2")
    before = step(model)
    with rpadiag.align(model, regions=(region,)) as alignment:
        assert differs(before, step(model))
        assert list(alignment.to_dict()["regions"]) == [region]
        assert json.loads(json.dumps(alignment.to_dict())) == alignment.to_dict()


@pytest.mark.parametrize("contract", ["fp32-output", "flashinfer", "vllm-cpu-ops-avx2"])
def test_layers_left_out_compute_as_before(contract: str) -> None:
    model = make_model("llama")
    inputs: list[Any] = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda m, a, k: inputs.append((a, k)), with_kwargs=True)
    before: list[Tensor] = []
    with rpadiag.align(model, contract=contract, layers=[0]), torch.no_grad():
        hooked = model.model.layers[1].register_forward_hook(lambda m, a, out: before.append(out))
        model(input_ids=IDS)
        hooked.remove()
    handle.remove()
    (args, kwargs) = inputs[0]
    kwargs["position_embeddings"] = tuple(t.bfloat16() for t in kwargs["position_embeddings"])
    kwargs["past_key_values"] = None
    with torch.no_grad():
        assert torch.equal(model.model.layers[1](args[0].clone(), **kwargs), before[0])


@pytest.mark.parametrize("preset", [w for w in WAYS if w != "hf-eager"])
def test_add_and_norm_in_one_operation_or_in_two_give_the_same_bits(preset: str) -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract=preset):
        expected = step(model)
    for layer in model.model.layers:  # as FSDP does to a module that it shards by itself
        norm = layer.post_attention_layernorm
        norm.__class__ = type("Sharded" + type(norm).__name__, (type(norm),), {})
    with rpadiag.align(model, contract=preset):
        assert_same(expected, step(model))


def test_all_layers_named_is_all_layers() -> None:
    model = make_model("llama")
    with rpadiag.align(model):
        expected = step(model)
    with rpadiag.align(model, layers=range(LAYERS)):
        assert_same(expected, step(model))


def test_regions_aligned_one_after_the_other_are_aligned_together() -> None:
    model = make_model("qwen3")
    with rpadiag.align(model, contract="vllm-eager"):
        expected = step(model)
    with (
        rpadiag.align(model, regions=("rmsnorm", "qk_norm"), contract="vllm-eager"),
        rpadiag.align(model, regions=("rope",), contract="vllm-eager"),
        rpadiag.align(model, regions=("swiglu",), contract="vllm-eager"),
    ):
        assert_same(expected, step(model))


def test_contract_may_be_a_preset_a_contract_a_mapping_or_a_file(tmp_path: Path) -> None:
    model = make_model("llama")
    preset = PRESETS["vllm-eager"]
    file = tmp_path / "found.json"
    file.write_text(json.dumps(preset.to_dict()), encoding="utf-8")
    results = []
    for contract in (preset, "vllm-eager", file, str(file), preset.to_dict(), dict(preset.regions)):
        with rpadiag.align(model, contract=contract):
            results.append(step(model))
    for result in results[1:]:
        assert_same(results[0], result)
    with rpadiag.align(model, contract=SwigluContract(silu="fp32")) as alignment:
        assert list(alignment.contracts) == ["swiglu"]


def test_mid_takes_effect_when_both_sides_of_the_boundary_are_aligned() -> None:
    model = make_model("qwen3")
    results = {}
    for mid in ("lp", "fp32"):
        regions = {**PRESETS["fp32-output"].regions, "qk_norm": rpadiag_qk(mid)}
        with rpadiag.align(model, contract=regions) as alignment:
            results[mid] = step(model)
            assert alignment.mid == mid
    assert differs(results["lp"], results["fp32"])


def rpadiag_qk(mid: str) -> Any:
    from rpadiag.contracts import QkRopeContract

    return QkRopeContract(mid=mid)
