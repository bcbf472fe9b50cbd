"""What align refuses, and how it leaves the model then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aligned_models import IDS, assert_same, make_model, step
from torch import Tensor

import rpadiag
from rpadiag.contracts import RmsNormContract, SwigluContract
from rpadiag.errors import InputError, RpadiagError, UsageError
from rpadiag.regions.presets import PRESETS, Preset


def test_an_unknown_model_is_refused_with_the_known_families() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50))
    with pytest.raises(InputError) as caught:
        rpadiag.align(model)
    assert "GPT2LMHeadModel" in str(caught.value) and "llama, qwen2, qwen3" in str(caught.value)


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


READ_UNROUNDED = ("fp32-output", "vllm-compiled", "vllm-cpu-compiled")


@pytest.mark.parametrize("preset", READ_UNROUNDED)
@pytest.mark.parametrize(
    "where", ["model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm"]
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_norm_that_is_handed_another_tensor_than_the_sum_is_an_error_and_no_other_result(
    preset: str, where: str, grad: bool
) -> None:  # fmt: skip
    model = make_model("llama")
    with rpadiag.align(model, contract=preset), torch.set_grad_enabled(grad):
        wanted = model(input_ids=IDS).logits
        hook = model.get_submodule(where).register_forward_pre_hook(lambda m, args: (args[0].clone(),))
        with pytest.raises(
            InputError, match=r"did not reach (its second norm|the final norm|the first norm of layer 1)"
        ):
            model(input_ids=IDS)
        hook.remove()
        assert torch.equal(model(input_ids=IDS).logits, wanted)


def hooked(
    model: Any, preset: str, where: str, hook: Callable[[torch.Tensor], torch.Tensor | None], *, before: bool
) -> torch.Tensor:
    """Logits of an aligned model with a hook on the tensor before or behind a module."""
    module = model.get_submodule(where)
    if before:
        handle = module.register_forward_pre_hook(lambda m, args: None if (x := hook(args[0])) is None else (x,))
    else:
        handle = module.register_forward_hook(lambda m, args, out: hook(out))
    with handle, rpadiag.align(model, contract=preset):
        return model(input_ids=IDS).logits.detach()


def edit(x: torch.Tensor) -> None:
    x.detach().mul_(-1)


@pytest.mark.parametrize(
    ("where", "before", "change"),
    [
        ("model.layers.1.post_attention_layernorm", True, edit),
        ("model.layers.1", False, edit),
        ("model.layers.1", False, lambda x: x[:1].expand_as(x)),
        ("model.layers.1", False, lambda x: x.flip(0)),
    ],
    ids=["edited before the second norm", "edited behind a layer", "a view of other strides", "another tensor"],
)
def test_what_hooks_make_of_hidden_states_counts_or_is_refused(where: str, before: bool, change: Any) -> None:
    model = make_model("llama").eval()
    for preset in READ_UNROUNDED:
        with pytest.raises(InputError, match="did not reach"):
            hooked(model, preset, where, change, before=before)

    def apart(x: torch.Tensor) -> torch.Tensor:
        made = change(x)
        return (x if made is None else made).clone()

    if not before:  # a norm that is handed a copy leaves the residual stream as it was
        found, wanted = (hooked(model, "vllm-eager", where, f, before=before) for f in (change, apart))
        assert torch.equal(found, wanted)


def test_a_norm_that_is_handed_the_sum_of_another_forward_leaves_the_residual_stream_alone() -> None:
    model = make_model("llama").eval()
    kept: list[torch.Tensor] = []
    with model.model.layers[0].register_forward_hook(lambda m, args, out: kept.append(out)):
        with rpadiag.align(model, contract="vllm-eager"):
            model(input_ids=IDS.flip(1))
    found, wanted = (
        hooked(model, "vllm-eager", "model.layers.1.input_layernorm", lambda x, other=other: other, before=True)
        for other in (kept[0], kept[0].clone())
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("contract", ["fp32-output", "vllm-eager"])
def test_sums_of_another_alignment_are_not_read(contract: str) -> None:
    one, two = make_model("llama").eval(), make_model("llama", seed=1).eval()
    with rpadiag.align(one, contract=contract), rpadiag.align(two, contract="vllm-cpu-compiled"), torch.no_grad():
        hidden = one(input_ids=IDS, output_hidden_states=True).hidden_states[1]
        found, wanted = (two(inputs_embeds=h).logits for h in (hidden, hidden.clone()))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layers": ["1"]}, "layers takes whole numbers"), ({"layers": [1.0]}, "layers takes whole numbers"), ({"layers": [-1]}, "there is no layer -1"),
        ({"regions": 5}, "regions takes names in a list"), ({"regions": [5]}, "unknown region: 5"), ({"regions": ""}, "a region without a name"),
        ({"contract": {"regions": {"rmsnorm": 5}}}, "rmsnorm is 5, no object of axes"),
        ({"contract": {"regions": {"rmsnorm": {}}, "offset_rmsnorm": 5}}, "offset_rmsnorm is 5"),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_refused_with_a_hint(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RpadiagError, match=rf"{words}(.|\n)*hint: "):
        rpadiag.align(make_model("llama"), **given)


def test_layers_may_be_a_tensor() -> None:
    with rpadiag.align(make_model("llama"), "rmsnorm", layers=torch.tensor([2, 1])) as alignment:
        assert alignment.layers == (1, 2) and [type(n) for n in alignment.layers] == [int, int]


@pytest.mark.parametrize("preset", READ_UNROUNDED)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["all kept", "nonreentrant", "reentrant"])
def test_a_norm_may_be_called_by_itself_after_any_step(preset: str, reentrant: bool | None) -> None:
    model = make_model("llama")
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with rpadiag.align(model, contract=preset):
        before = model.model.norm(x)
        step(model)
        assert torch.equal(model.model.norm(x), before)


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


def test_fp32_output_has_the_regions_of_vllm_compiled_and_no_carry() -> None:
    assert PRESETS["fp32-output"].regions == PRESETS["vllm-compiled"].regions
    assert [PRESETS[name].carry for name in ("fp32-output", "vllm-compiled")] == ["lp", "layer"]


def test_regions_may_be_one_text_and_layers_are_a_list() -> None:
    model = make_model("llama")
    with rpadiag.align(model, "rope, rmsnorm") as alignment:
        assert list(alignment.contracts) == ["rope", "rmsnorm"]
    with rpadiag.align(model, "all") as alignment:
        assert list(alignment.contracts) == ["rope", "swiglu", "rmsnorm"]
    for layers in (3, "0"):
        with pytest.raises(UsageError, match=r"layers takes numbers in a list, not .*\nhint: layers=\["):
            rpadiag.align(model, layers=layers)  # type: ignore[arg-type]
