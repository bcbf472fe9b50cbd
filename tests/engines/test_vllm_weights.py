"""Digests and completeness of weights that an engine quantised while it loaded them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm_weights import check_complete, live_digests
from rpadiag.errors import InputError

QUANTISED = "model.layers.0.self_attn.o_proj"


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
