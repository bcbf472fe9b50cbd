"""Planted mistakes against the real vLLM engine: each gets the right verdict and the right site.

Every mistake is planted in the trainer, in the model's dtype and in FP32 alike, as a user's own code would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.regions.align import align
from rpadiag.runs import open_run
from rpadiag.sites import split_site
from rpadiag.workflows.compare import Comparison, run_compare
from rpadiag.workflows.options import CompareOptions

PROMPTS = (
    "The quick brown fox jumps over the lazy dog while the rain falls.",
    "Rounding to sixteen bits after every step is not the same as rounding once.",
    "import numpy as np\\n\\ndef mean(values): return sum(values)",
)


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def engine(model: Path, vllm_on: Callable[..., VllmEngine]) -> VllmEngine:
    return vllm_on(model, max_model_len=128)


@pytest.fixture
def compared(model: Path, engine: VllmEngine, tmp_path: Path) -> Callable[..., Comparison]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))

    def compare(plant: Callable[[TrainerEngine], None] | None = None, **changes: Any) -> Comparison:
        options = CompareOptions(model=str(model), prompts=prompts, run=tmp_path / "run", device="cpu", **changes)
        return run_compare(options, prepare_trainer=plant, running=engine)

    return compare


def norms(trainer: TrainerEngine) -> list[torch.nn.Module]:
    return [m for m in trainer.model.modules() if hasattr(m, "variance_epsilon")]


def test_the_stacks_as_they_are_differ_by_rounding_only(compared: Callable[..., Comparison]) -> None:
    result = compared()
    assert result.verdict.kind == "rounding only"
    assert result.metrics["mean_abs_d"] > 1e-3
    run = open_run(result.run)
    local = {f["region"]: f["numbers"]["local_differing"] for f in run.findings if f["code"] == "local-divergence"}
    assert local["swiglu"] == 0.0
    assert local["matmul"] < 1e-3
    assert local["rmsnorm"] > 0.05
    assert local["rope"] > 0.05
    control = next(f for f in run.findings if f["code"] == "fp32-control")
    assert control["numbers"]["mean_abs_d_fp32"] < 1e-4


def test_a_wrong_epsilon_is_a_different_computation_at_a_norm(compared: Callable[..., Comparison]) -> None:
    def plant(trainer: TrainerEngine) -> None:
        for norm in norms(trainer):
            norm.variance_epsilon = norm.variance_epsilon / 10

    verdict = compared(plant).verdict
    assert verdict.kind == "different computation"
    assert split_site(verdict.site or "")[1] in ("input_norm", "post_norm", "final_norm")
    assert "epsilon" in verdict.sentence
    told = verdict.sentence.partition("What it looks like: ")[2]
    assert "eps A = 1e-06, B = 1e-05" in told


def test_a_wrong_rope_base_is_a_different_computation_at_rope(compared: Callable[..., Comparison]) -> None:
    def plant(trainer: TrainerEngine) -> None:
        rotary = trainer.model.model.rotary_emb
        width = 2 * len(rotary.inv_freq)
        scale = 1.01 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        rotary.inv_freq = rotary.inv_freq * scale  # base 1 % larger

    verdict = compared(plant).verdict
    assert verdict.kind == "different computation"
    assert split_site(verdict.site or "")[1] in ("q_rope", "k_rope")
    assert "theta" in verdict.sentence


def test_inverse_frequencies_in_bfloat16_are_a_different_computation_at_rope(
    compared: Callable[..., Comparison],
) -> None:
    def plant(trainer: TrainerEngine) -> None:
        rotary = trainer.model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16).to(torch.float32)

    verdict = compared(plant).verdict
    assert verdict.kind == "different computation"
    assert split_site(verdict.site or "")[1] in ("q_rope", "k_rope")


def test_one_layers_stale_weights_are_not_comparable_and_are_named(compared: Callable[..., Comparison]) -> None:
    def plant(trainer: TrainerEngine) -> None:
        with torch.no_grad():
            trainer.model.model.layers[1].mlp.down_proj.weight.mul_(1.01)

    result = compared(plant)
    assert result.verdict.kind == "not comparable"
    assert "model.layers.1.mlp.down_proj.weight" in result.verdict.sentence
    assert open_run(result.run).verdict["kind"] == "not comparable"


def test_positions_shifted_by_three_are_harmless_and_said(compared: Callable[..., Comparison]) -> None:
    def plant(trainer: TrainerEngine) -> None:
        def shift(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": kwargs["position_ids"] + 3}
            return (args[0], args[1] + 3, *args[2:]), kwargs

        trainer.model.model.rotary_emb.register_forward_pre_hook(shift, with_kwargs=True)

    result = compared(plant)
    assert result.verdict.kind == "rounding only"
    shifted = next(f for f in open_run(result.run).findings if f["code"] == "positions-shifted")
    assert shifted["numbers"]["offset"] == 3


def test_a_moved_rounding_point_stays_rounding_only(compared: Callable[..., Comparison]) -> None:
    def plant(trainer: TrainerEngine) -> None:
        align(trainer.model, regions=("rmsnorm",), contract="fp32-output")

    verdict = compared(plant).verdict
    assert verdict.kind == "rounding only"


def test_without_the_control_a_gross_mistake_is_still_found(compared: Callable[..., Comparison]) -> None:
    def plant(trainer: TrainerEngine) -> None:
        trainer.model.model.layers[0].mlp.act_fn = torch.nn.GELU()

    verdict = compared(plant, control="none").verdict
    assert verdict.kind == "different computation"
    assert verdict.site == "layers.0.act"
