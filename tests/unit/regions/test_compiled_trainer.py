"""What torch.compile makes of an unaligned transformers model on a CPU: no rounding of RoPE's tables, and none of the residual stream that Inductor can avoid."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from aligned_models import IDS, make_model, step

import rpadiag
from rpadiag.regions.presets import Preset, find_preset


def unrounded(*, carry: str = "stream", cache: str = "fp32") -> Preset:
    base = find_preset("fp32-output")
    return dataclasses.replace(
        base, carry=carry, regions={**base.regions, "rope": base.regions["rope"].replace(cache=cache)}
    )


def share_differing(num_layers: int, contracts: list[Preset], **limits: int) -> list[float]:
    """Share of logits in which the compiled model differs from one aligned to each contract."""
    model: Any = make_model("llama", num_hidden_layers=num_layers).eval()
    torch._dynamo.reset()
    with torch.no_grad(), inductor.patch(limits | {"fx_graph_cache": False}):
        compiled = torch.compile(model)(input_ids=IDS, use_cache=False).logits
        shares = []
        for contract in contracts:
            with rpadiag.align(model, contract=contract):
                aligned = model(input_ids=IDS, use_cache=False).logits
            shares.append((aligned != compiled).float().mean().item())
    return shares


def test_one_layer_is_never_rounded_and_other_roundings_are_told_apart() -> None:
    right, *others = share_differing(
        1, [unrounded(), unrounded(cache="lp"), unrounded(carry="lp"), find_preset("hf-eager")]
    )
    assert right == 0
    assert min(others) > 0.2


def test_deeper_models_round_where_inductor_will_not_read_more_addends_again() -> None:
    carries = [unrounded(carry=carry) for carry in ("stream", "layer", "lp")]
    assert min(share_differing(2, carries)) > 0.2  # the limit is 4 as it comes
    stream, *others = share_differing(2, carries, realize_reads_threshold=10**6)
    assert stream == 0
    assert min(others) > 0.2


@pytest.mark.parametrize("contract", [None, "hf-eager", "fp32-output"])
def test_a_compiled_trainer_scores_as_it_trains_only_where_it_is_aligned(contract: str | None) -> None:
    model: Any = make_model("llama", num_hidden_layers=2)
    model.config.use_cache = False
    torch._dynamo.reset()
    with nullcontext() if contract is None else rpadiag.align(model, contract=contract):
        compiled = torch.compile(model)
        with torch.no_grad():
            scored = compiled(input_ids=IDS).logits
        trained, _ = step(model, compiled)
        uncompiled, _ = step(model)
    assert torch.equal(scored, trained) == (contract is not None)
    assert torch.equal(trained, uncompiled) == (contract is not None)
