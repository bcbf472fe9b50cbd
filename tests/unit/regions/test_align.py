"""align: bits, reversibility, and everything a training stack does to a model afterwards."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpadiag
from rpadiag.contracts import RmsNormContract, RopeContract, SwigluContract
from rpadiag.errors import InputError, RpadiagError, UsageError
from rpadiag.regions import rmsnorm, rope, swiglu
from rpadiag.regions.align_families import FAMILIES
from rpadiag.regions.presets import PRESETS, Preset

VOCAB, LAYERS = 500, 3
IDS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
# One contract for each way a sum reaches its norm: rounded; rounded with a fused gradient; unrounded; truncated.
WAYS = ("hf-eager", "vllm-eager", "fp32-output", "vllm-cpu-ops-avx2")
Result = tuple[Tensor, dict[str, Tensor]]


def make_model(family: str = "llama", *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any) -> Any:
    """A model of three layers with norm weights that are no powers of two, in training mode."""
    import transformers

    prefix = next(f.prefix for f in FAMILIES if f.name == family)
    config_class = getattr(transformers, f"{prefix}TextConfig" if family == "gemma3" else f"{prefix}Config")
    torch.manual_seed(seed)
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
    }
    model = transformers.AutoModelForCausalLM.from_config(config_class(**values | config), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def step(model: nn.Module, forward: Callable[..., Any] | None = None) -> Result:
    """Logits and every gradient of one training step, through ``forward`` if given."""
    model.zero_grad()
    out = (model if forward is None else forward)(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(a: Result, b: Result) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    assert [n for n in a[1] if not torch.equal(a[1][n], b[1][n])] == []


def differs(a: Result, b: Result) -> bool:
    return not torch.equal(a[0], b[0])


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
    before = step(model)
    with rpadiag.align(model, contract="hf-eager"):
        assert_same(before, step(model))


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


# --- hooks, checkpointing, compile, adapters, copies, files ----------------------------------------------------------


@pytest.mark.parametrize("preset", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_hooks_fire_in_the_same_order_with_the_same_shapes(preset: str, family: str) -> None:
    model = make_model(family)

    def record() -> list[tuple[str, Any]]:
        fired: list[tuple[str, Any]] = []
        handles = [
            m.register_forward_hook(lambda _, args, out, n=n: fired.append((n, getattr(out, "shape", None))))
            for n, m in model.named_modules()
            if not n.endswith("act_fn")  # its work is done inside the region
        ]
        model(input_ids=IDS)
        for handle in handles:
            handle.remove()
        return fired

    expected = record()
    with rpadiag.align(model, contract=preset):
        assert record() == expected


@pytest.mark.parametrize("preset", WAYS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_bit(preset: str, reentrant: bool) -> None:
    model = make_model("llama")
    model.enable_input_require_grads()
    with rpadiag.align(model, contract=preset):
        expected = step(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(expected, step(model))


@pytest.mark.parametrize("preset", WAYS)
def test_compiled_forward_and_backward_keep_the_contract(preset: str) -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract=preset):
        expected = step(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        assert_same(expected, step(model, compiled))


def test_compiled_alignment_is_one_graph() -> None:
    model = make_model("llama").eval()
    with rpadiag.align(model, contract="fp32-output"), torch.no_grad():
        torch._dynamo.reset()
        expected = model(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, expected)


def test_adapters_train_on_an_aligned_model() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    before_peft = peft.get_peft_model(make_model("llama"), config)
    torch.manual_seed(0)
    base = make_model("llama")
    alignment = rpadiag.align(base)
    after_align = peft.get_peft_model(base, config)
    with rpadiag.align(before_peft):
        one, two = step(before_peft), step(after_align)
    assert_same(one, two)
    assert one[1] and all("lora" in name for name in one[1])
    alignment.undo()


def test_a_copy_of_an_aligned_model_is_aligned_and_has_its_own_weights() -> None:
    model = make_model("llama")
    with rpadiag.align(model):
        expected = step(model)
        other = copy.deepcopy(model)
        assert_same(expected, step(other))
        other.model.norm.weight.data.zero_()
        with torch.no_grad():
            assert float(other(input_ids=IDS).logits.abs().max()) == 0.0
        assert_same(expected, step(model))


def test_state_dict_and_saved_files_are_those_of_the_unaligned_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("llama")
    names = list(model.state_dict())
    with rpadiag.align(model):
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path)
        model.load_state_dict(model.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    assert_same(step(model), step(loaded))


@pytest.mark.parametrize("preset", ["fp32-output", "vllm-eager"])
@pytest.mark.parametrize("shard_first", [False, True], ids=["aligned-then-sharded", "sharded-then-aligned"])
def test_sharding_with_fsdp_changes_no_bit(preset: str, shard_first: bool, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def shard() -> None:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mesh=mesh)

    model = make_model("llama")
    with rpadiag.align(model, contract=preset):
        expected = step(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for act in (shard, lambda: rpadiag.align(model, contract=preset))[:: -1 if not shard_first else 1]:
            act()
        logits, gradients = step(model)
        assert_same(expected, (logits, {n: g.full_tensor() for n, g in gradients.items()}))  # type: ignore[operator]
    finally:
        dist.destroy_process_group()


def test_generation_with_a_cache_works_while_aligned() -> None:
    model = make_model("qwen3").eval()
    with rpadiag.align(model):
        out = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 28)


def test_autocast_over_float32_weights_works_while_aligned() -> None:
    model = make_model("llama", dtype=torch.float32)
    with rpadiag.align(model), torch.autocast("cpu", dtype=torch.bfloat16):
        logits, gradients = step(model)
    assert bool(logits.isfinite().all()) and all(bool(g.isfinite().all()) for g in gradients.values())


@pytest.mark.parametrize("preset", WAYS)
def test_hidden_states_can_still_be_asked_for(preset: str) -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract=preset), torch.no_grad():
        out = model(input_ids=IDS, output_hidden_states=True)
    assert len(out.hidden_states) == LAYERS + 1


def test_the_graph_does_not_outlive_its_output() -> None:
    import gc
    import weakref

    model, kept = make_model("llama"), []
    for module in (model.model.norm, model.model.layers[2].input_layernorm):
        module.register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    with rpadiag.align(model, contract="fp32-output"):
        model(input_ids=IDS, labels=IDS)
        gc.collect()
        assert [ref() for ref in kept] == [None, None]


def test_accelerate_hooks_stay_in_front_of_the_aligned_forward() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model, fired = make_model("llama"), []

    class Counting(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            fired.append(module)
            return args, kwargs

    with rpadiag.align(model):
        expected = step(model)
    for module in model.modules():
        hooks.add_hook_to_module(module, Counting())
    with rpadiag.align(model):
        assert_same(expected, step(model))
    assert model.model.layers[1].mlp in fired and model.model.layers[2].self_attn in fired


def test_addends_do_not_outlive_the_forward() -> None:
    import gc
    import weakref

    model, kept = make_model("llama").eval(), []
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out.untyped_storage())))
    with rpadiag.align(model, contract="fp32-output"), torch.no_grad():
        model(input_ids=IDS)
        gc.collect()
        assert kept[0]() is None


# --- refusals --------------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_refused_with_the_known_families() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50))
    with pytest.raises(InputError) as caught:
        rpadiag.align(model)
    assert "GPT2LMHeadModel" in str(caught.value) and "llama, qwen2, qwen3, mistral" in str(caught.value)


def test_a_subclass_with_its_own_forward_is_refused() -> None:
    model = make_model("llama")
    mlp = model.model.layers[1].mlp

    class Other(type(mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return x

    mlp.__class__ = Other
    with pytest.raises(InputError, match="Other where transformers' LlamaMLP is expected"):
        rpadiag.align(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"regions": ("ropes",)}, "unknown region: ropes"),
        ({"contract": "vlm-eager"}, "unknown contract preset: vlm-eager"),
        ({"layers": [3]}, "there is no layer 3"),
        ({"layers": []}, "no layers to align"),
        ({"kernels": "cuda"}, "unknown kernel choice: cuda"),
        ({"contract": "torchtitan"}, "layout=interleaved"),
        ({"contract": RmsNormContract(weight="1+w")}, "weight=1[+]w"),
        ({"contract": SwigluContract(), "regions": ("rope",)}, "says nothing about region rope"),
        ({"regions": ("qk_norm",)}, "the model has no region qk_norm"),
        ({"contract": {}}, "names no regions"),
        ({"contract": "missing.json"}, "cannot read the contract file"),
    ],
)
def test_bad_arguments_are_refused_and_leave_the_model_as_it_was(arguments: dict[str, Any], message: str) -> None:
    model = make_model("llama")
    before = step(model)
    with pytest.raises(RpadiagError, match=message):
        rpadiag.align(model, **arguments)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert_same(before, step(model))


def test_a_region_that_the_family_lacks_is_named() -> None:
    model = make_model("gemma")
    with pytest.raises(UsageError, match="the model has no region swiglu"):
        rpadiag.align(model, regions=("swiglu",))
    with rpadiag.align(model) as alignment:
        assert set(alignment.contracts) == {"rope", "rmsnorm"}


def test_aligning_twice_is_refused_and_the_first_stays() -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract="vllm-eager"):
        expected = step(model)
        with pytest.raises(UsageError, match="already has a forward of its own"):
            rpadiag.align(model, regions=("swiglu",))
        assert_same(expected, step(model))


def test_undo_twice_is_once_and_out_of_order_is_refused() -> None:
    model = make_model("llama")
    alignment = rpadiag.align(model)
    layer = model.model.layers[0]
    ours, layer.forward = layer.forward, lambda *a, **k: None
    with pytest.raises(UsageError, match="was replaced since"):
        alignment.undo()
    layer.forward = ours
    alignment.undo()
    alignment.undo()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_alignment_is_undone_when_the_body_raises() -> None:
    model = make_model("llama")
    before = step(model)
    with pytest.raises(ZeroDivisionError), rpadiag.align(model):
        raise ZeroDivisionError
    assert_same(before, step(model))


def test_hidden_states_replaced_by_a_hook_are_refused_where_the_unrounded_sum_is_needed() -> None:
    model = make_model("llama")
    model.model.layers[0].register_forward_hook(lambda m, a, out: out + 0.5)
    with rpadiag.align(model, contract="fp32-output"), pytest.raises(InputError, match="did not reach layer 1"):
        model(input_ids=IDS)
    with rpadiag.align(model, contract="vllm-eager"):
        assert bool(model(input_ids=IDS).logits.isfinite().all())


def test_triton_kernels_asked_for_and_absent_are_an_error() -> None:
    from rpadiag.regions.ops import kernels_installed

    if kernels_installed():
        pytest.skip("the Triton kernels are installed here")
    with pytest.raises(RpadiagError, match="Triton kernels were asked for"):
        rpadiag.align(make_model("llama"), kernels="triton")


@pytest.mark.parametrize("preset", ["hf-eager", "fp32-output", "flashinfer", "vllm-cpu-ops-avx2"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_kernels_package_makes_the_same_model(preset: str, family: str) -> None:
    pytest.importorskip("rpadiag_kernels", reason="the kernels package is not installed")
    model = make_model(family)
    with rpadiag.align(model, contract=preset, kernels="reference"):
        expected = step(model)
    with rpadiag.align(model, contract=preset, kernels="triton"):
        assert_same(expected, step(model))


def test_the_kernels_package_compiles_in_one_graph() -> None:
    pytest.importorskip("rpadiag_kernels", reason="the kernels package is not installed")
    model = make_model("llama").eval()
    with rpadiag.align(model, kernels="triton"), torch.no_grad():
        torch._dynamo.reset()
        expected = model(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, expected)


def test_presets_survive_json() -> None:
    from rpadiag.regions.presets import preset_from_dict

    for preset in PRESETS.values():
        assert isinstance(preset, Preset)
        assert preset_from_dict(json.loads(json.dumps(preset.to_dict()))) == preset
        assert preset.versions and preset.source and preset.evidence


def test_fp32_output_is_vllm_compiled() -> None:
    assert PRESETS["fp32-output"].regions == PRESETS["vllm-compiled"].regions
