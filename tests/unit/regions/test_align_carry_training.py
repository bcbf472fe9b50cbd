"""What a training stack does to a model while it carries residual sums: checkpointing, compilers, adapters, files, sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_models import IDS, Result, adapted, assert_same, differs, make_model, step

import rpadiag
from rpadiag.errors import InputError, UsageError
from rpadiag.regions.presets import PRESETS

CARRYING = ("vllm-compiled", "vllm-cpu-compiled")  # within a layer, and through the whole model
BOTH = pytest.mark.parametrize("preset", CARRYING)


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_bit(preset: str, family: str, reentrant: bool) -> None:
    model = make_model(family)
    model.enable_input_require_grads()
    with rpadiag.align(model, contract=preset):
        expected = step(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(expected, step(model))


@BOTH
def test_compiled_forward_and_backward_are_one_graph_each_with_the_bits_of_the_uncompiled_ones(preset: str) -> None:
    model = make_model("llama", num_hidden_layers=2)
    with rpadiag.align(model, contract=preset):
        expected = step(model)
        torch._dynamo.reset()
        assert_same(expected, step(model, torch.compile(model, backend="aot_eager", fullgraph=True)))


def test_the_default_compiler_carries_within_a_layer_and_no_further() -> None:
    model = make_model("llama", num_hidden_layers=2).eval()
    with rpadiag.align(model, contract="vllm-compiled"), torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model)(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("preset", ["fp32-output", *CARRYING])
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_a_sum_that_checkpointing_keeps_from_the_next_graph_is_an_error_and_no_other_result(
    preset: str, by_layer: bool
) -> None:
    model = make_model("llama")
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    with rpadiag.align(model, contract=preset):
        for layer in model.model.layers if by_layer else ():
            layer.compile(backend="aot_eager")
        forward = None if by_layer else torch.compile(model, backend="aot_eager")
        with pytest.raises(
            InputError, match=r"(?s)did not reach .*hint: .*torch\.compile together with gradient checkp"
        ):
            step(model, forward)


@pytest.mark.parametrize("preset", ["fp32-output", *CARRYING])
@pytest.mark.parametrize("norm_as_well", [False, True])
def test_layers_compiled_one_by_one_hand_sums_on(preset: str, norm_as_well: bool) -> None:
    model = make_model("llama")
    model.config.use_cache = False
    with rpadiag.align(model, contract=preset):
        expected = step(model)
        torch._dynamo.reset()
        for module in (*model.model.layers, *([model.model.norm] if norm_as_well else [])):
            module.compile(backend="aot_eager", fullgraph=True)
        assert_same(expected, step(model))
        assert differs(expected, step(model, ids=IDS.flip(0)))
        assert_same(expected, step(model))


@pytest.mark.parametrize("axis", ["scale", "rstd"])
def test_a_norm_that_rounds_inside_is_refused_where_sums_are_carried(axis: str) -> None:
    contract = PRESETS["vllm-compiled"].to_dict()
    contract["regions"]["rmsnorm"] |= {axis: "lp"}  # type: ignore[index]
    with pytest.raises(UsageError, match="round nothing inside"):
        rpadiag.align(make_model("llama"), ("rmsnorm",), contract=contract)


@BOTH
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["all kept", "nonreentrant", "reentrant"])
def test_adapters_train_on_an_aligned_model(preset: str, reentrant: bool | None) -> None:
    before_peft, base = adapted("llama"), make_model("llama")
    rpadiag.align(base, contract=preset)
    after_align = adapted("llama", base)
    if reentrant is not None:
        after_align.enable_input_require_grads()
        after_align.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with rpadiag.align(before_peft, contract=preset):
        one, two = step(before_peft), step(after_align)
    assert_same(one, two)
    assert one[1] and all("lora" in name for name in one[1])


@BOTH
def test_saved_files_are_those_of_the_unaligned_model(preset: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("qwen3")
    before, names = step(model), list(model.state_dict())
    with rpadiag.align(model, contract=preset):
        assert list(model.state_dict()) == names
        aligned = step(model)
        model.save_pretrained(tmp_path)
        model.load_state_dict(model.state_dict())
        assert_same(aligned, step(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    assert_same(before, step(loaded))
    with rpadiag.align(loaded, contract=preset):
        assert_same(aligned, step(loaded))
    assert differs(before, aligned)


@BOTH
def test_nothing_of_a_step_is_left_for_the_next(preset: str) -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract=preset):
        first = step(model)
        step(model, ids=IDS.flip(0))
        assert_same(first, step(model))


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Any, **policy: torch.dtype) -> None:
    """FSDP2, each layer and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy))


def whole(result: Result) -> Result:
    return result[0], {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in result[1].items()}


@BOTH
@pytest.mark.parametrize("wrapped_as", ["fsdp2", "fsdp2 checkpointed", "ddp"])
@pytest.mark.parametrize("wrap_first", [False, True], ids=["aligned-then-wrapped", "wrapped-then-aligned"])
def test_fsdp2_and_ddp_change_no_bit(preset: str, wrapped_as: str, wrap_first: bool, one_process: None) -> None:
    model = make_model("llama")
    with rpadiag.align(model, contract=preset):
        expected = step(model)
    wrapped: Any = model
    if not wrap_first:
        rpadiag.align(model, contract=preset)
    if "checkpointed" in wrapped_as:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapped_as == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        shard(model)
    if wrap_first:
        rpadiag.align(wrapped, contract=preset)
    assert_same(expected, whole(step(model, wrapped)))


@BOTH
def test_fsdp2_over_fp32_weights_has_the_logits_of_the_bfloat16_model(preset: str, one_process: None) -> None:
    narrow = make_model("llama")
    with rpadiag.align(narrow, contract=preset):
        expected = step(narrow)[0]
    model = make_model("llama", dtype=torch.float32)
    model.load_state_dict(narrow.state_dict())
    shard(model, reduce_dtype=torch.float32)
    rpadiag.align(model, contract=preset)
    logits, gradients = step(model)
    assert torch.equal(logits, expected)
    assert {g.dtype for g in gradients.values()} == {torch.float32}
