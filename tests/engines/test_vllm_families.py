"""Experts and Gemma on both stacks: every site captured, weights equal, rounding only, and planted mistakes found where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.runs import open_run
from rpadiag.workflows.compare import Comparison, run_compare
from rpadiag.workflows.options import CompareOptions

pytestmark = pytest.mark.vllm
PROMPTS = (
    "The quick brown fox jumps over the lazy dog while the rain falls.",
    "Rounding to sixteen bits after every step is not the same as rounding once.",
    "import numpy as np\\n\\ndef mean(values): return sum(values)",
)
ATTENTION = {"gemma2": "eager"}
Compare = Callable[..., Comparison]


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], vllm_on: Callable[..., VllmEngine]) -> VllmEngine:
    return vllm_on(tiny("qwen3_moe"), max_model_len=128)


@pytest.fixture
def compared(engine: VllmEngine, tiny: Callable[[str], Path], tmp_path: Path) -> Compare:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))

    def compare(family: str, plant: Callable[[TrainerEngine], None] | None = None, **changes: Any) -> Comparison:
        model = str(tiny(family))
        if engine.manifest()["model"] != model:
            engine.reload(model=model, dtype="bfloat16")
        options = CompareOptions(
            model=model,
            prompts=prompts,
            run=tmp_path / "run",
            device="cpu",
            attention=ATTENTION.get(family, "sdpa"),
            **changes,
        )
        return run_compare(options, prepare_trainer=plant, running=engine)

    return compare


def finding(result: Comparison, code: str) -> dict[str, Any]:
    return next(f for f in open_run(result.run).findings if f["code"] == code)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "gemma3"])
def test_every_site_is_compared_and_the_stacks_differ_by_rounding_only(compared: Compare, family: str) -> None:
    result = compared(family)
    run = open_run(result.run)
    assert result.verdict.kind == "rounding only", result.verdict.sentence
    assert finding(result, "fp32-control")["numbers"]["mean_abs_d_fp32"] < 1e-5
    assert run.manifest["weights"]["trainer"] == run.manifest["weights"]["rollout"]
    trainer = TrainerEngine.load(run.manifest["trainer"]["model"])
    sites = run.sites()
    assert set(sites["site"]) == set(trainer.facts.sites)
    local = sites[(sites.precision == "fp32") & ~sites.point.isin(["logprob"])]
    assert local.local_rel_l2.max() < 2e-6
    assert run.manifest["sites"]["absent"] == trainer.facts.absent_reasons


def test_experts_are_counted_where_the_stacks_choose_others(compared: Compare) -> None:
    result = compared("qwen3_moe")
    run = open_run(result.run)
    rows = run.sites()
    routers = rows[(rows.point == "router") & (rows.precision == "model")]
    assert sorted(routers.layer.unique()) == [0, 2]
    assert rows[rows.point != "router"].expert_flips.isna().all()
    numbers = finding(result, "expert-flips")["numbers"]
    assert numbers["num_flips"] == routers.expert_flips.sum()
    assert numbers["num_choices"] == routers.n.sum() // 8
    assert numbers["num_local_flips"] == routers.local_expert_flips.sum() <= numbers["num_flips"]
    assert numbers["num_flips_fp32"] == 0  # in FP32 no choice of these prompts is that close


def test_a_router_that_does_not_normalise_its_weights_is_found_at_the_experts(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        for n in trainer.facts.expert_layers:
            trainer.model.model.layers[n].mlp.gate.norm_topk_prob = False

    verdict = compared("qwen3_moe", plant).verdict
    assert verdict.kind == "different computation"
    assert verdict.site in ("layers.0.expert_out", "layers.2.expert_out")
    assert "normalisation of their weights" in verdict.sentence


def test_a_token_that_goes_to_the_wrong_expert_is_found_at_the_experts_and_is_no_flip(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        gate = trainer.model.model.layers[2].mlp.gate
        original = gate.forward

        def forward(hidden: torch.Tensor) -> Any:
            logits, weights, chosen = original(hidden)
            return logits, weights, (chosen + 1) % 8

        gate.forward = forward

    result = compared("qwen3_moe", plant)
    assert result.verdict.kind == "different computation"
    assert result.verdict.site == "layers.2.expert_out"
    assert finding(result, "expert-flips")["numbers"]["num_local_flips"] == 0  # the logits are right


def test_stale_weights_of_one_expert_are_not_comparable_and_are_named(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        with torch.no_grad():
            trainer.model.model.layers[0].mlp.experts.gate_up_proj[5, 64:].mul_(1.01)

    verdict = compared("qwen3_moe", plant).verdict
    assert verdict.kind == "not comparable"
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in verdict.sentence
    assert "1 weight tensors differ" in verdict.sentence


def test_a_gelu_that_is_not_the_tanh_one_is_found_at_the_gated_product(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        for layer in trainer.model.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()

    verdict = compared("gemma3", plant).verdict
    assert verdict.kind == "different computation"
    assert (verdict.site or "").endswith(".geglu")
    assert "GELU exact or by tanh" in verdict.sentence


def test_norms_that_forget_the_one_of_one_plus_w_are_found_at_a_norm(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        norm = trainer.model.model.layers[1].post_attention_layernorm
        norm.forward = lambda x: (norm._norm(x.float()) * norm.weight.float()).type_as(x)

    verdict = compared("gemma2", plant).verdict
    assert verdict.kind == "different computation"
    assert verdict.site == "layers.1.attn_norm"


def test_one_rope_base_for_both_kinds_of_layer_is_found_at_rope(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        rotary = trainer.model.model.rotary_emb
        rotary.full_attention_inv_freq = rotary.sliding_attention_inv_freq.clone()

    verdict = compared("gemma3", plant).verdict
    assert verdict.kind == "different computation"
    assert verdict.site in ("layers.1.q_rope", "layers.1.k_rope")  # layer 1 attends fully


def test_an_uncapped_trainer_is_found_at_attention_and_uncapped_logits_at_the_head(compared: Compare) -> None:
    def uncap_attention(trainer: TrainerEngine) -> None:
        for layer in trainer.model.model.layers:
            layer.self_attn.attn_logit_softcapping = None

    verdict = compared("gemma2", uncap_attention).verdict
    assert verdict.kind == "different computation"
    assert (verdict.site or "").endswith(".attn")


def test_logits_without_their_soft_cap_are_found_at_the_head(compared: Compare) -> None:
    def plant(trainer: TrainerEngine) -> None:
        trainer.model.config.final_logit_softcapping = None

    verdict = compared("gemma2", plant).verdict
    assert verdict.kind == "different computation"
    assert verdict.site == "logits"
    assert "soft-capping" in verdict.sentence
