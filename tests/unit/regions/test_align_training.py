"""Everything that a training stack does to a model works while it is aligned: hooks, checkpointing, compile, adapters, copies, files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_models import IDS, LAYERS, WAYS, adapted, assert_same, make_model, step
from torch import nn

import rpadiag


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
    model = make_model("llama", num_hidden_layers=2)
    with rpadiag.align(model, contract=preset):
        expected = step(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        assert_same(expected, step(model, compiled))


def test_compiled_alignment_is_one_graph() -> None:
    model = make_model("llama", num_hidden_layers=2).eval()
    with rpadiag.align(model, contract="fp32-output"), torch.no_grad():
        torch._dynamo.reset()
        expected = model(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, expected)


def test_adapters_train_on_an_aligned_model() -> None:
    before_peft, base = adapted("llama"), make_model("llama")
    alignment = rpadiag.align(base)
    after_align = adapted("llama", base)
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
