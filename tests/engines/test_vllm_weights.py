"""Digests and completeness of what vLLM loaded, weights that it quantised on the way included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, planted_copy

from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.engines.vllm_weights import check_complete, live_digests
from rpadiag.errors import InputError
from rpadiag.runs.manifest import differing_tensors

QUANTISED = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], vllm_on: Callable[..., VllmEngine]) -> VllmEngine:
    return vllm_on(tiny("llama"), max_model_len=64)


def test_quantised_parameters_have_no_live_digest_and_their_scales_are_not_missing(
    tiny: Callable[[str], Path],
) -> None:
    # the module tree of transformers stands for vLLM's: o_proj and the norms have the same names in both
    engine = TrainerEngine.load(tiny("llama"))
    delivered = engine.weight_digests()
    module = engine.model.get_submodule(QUANTISED)
    module.weight = torch.nn.Parameter(module.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    module.register_parameter("weight_scale", torch.nn.Parameter(torch.ones(1), requires_grad=False))
    check_complete(engine.model, delivered, name="model")
    found = live_digests(engine.model, known=delivered)
    assert f"{QUANTISED}.weight" not in found
    assert {**delivered, **found} == delivered
    with pytest.raises(InputError, match=r"half a model: model lacks model\.norm\.weight"):
        check_complete(engine.model, [n for n in delivered if n != "model.norm.weight"], name="model")


@pytest.mark.parametrize(("given", "method"), [({"quant_method": "fp8"}, "fp8"), ({"bits": 4}, "unnamed method")])
def test_a_quantised_checkpoint_is_refused_by_the_name_of_its_method(
    tiny: Callable[[str], Path], tmp_path: Path, given: dict[str, object], method: str
) -> None:
    from transformers import AutoConfig

    from rpadiag.engines.families import family_for

    config = AutoConfig.from_pretrained(tiny("llama"))
    config.quantization_config = given
    with pytest.raises(InputError, match=f"quantised with {method}") as caught:
        family_for(config.architectures).facts(config)
    assert caught.value.hint is not None and "--engine-arg quantization=fp8" in caught.value.hint


@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_digests_equal_those_of_the_trainer(
    engine: VllmEngine, tiny: Callable[[str], Path], family: str
) -> None:
    engine.reload(model=tiny(family), dtype="bfloat16")
    ours = TrainerEngine.load(tiny(family), dtype="bfloat16").weight_digests()
    assert differing_tensors(ours, engine.weight_digests()) == []


@pytest.mark.vllm
def test_the_digest_of_a_changed_weight_changes(
    engine: VllmEngine, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    def stale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1

    engine.reload(model=tiny("llama"), dtype="bfloat16")
    before = engine.weight_digests()
    engine.reload(model=planted_copy(tiny("llama"), tmp_path / "m", tensors=stale))
    after = engine.weight_digests()
    assert [n for n in before if before[n] != after[n]] == ["model.layers.1.self_attn.k_proj.weight"]
