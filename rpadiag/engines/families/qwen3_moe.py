"""Qwen3-MoE: as Qwen3, with experts in place of the MLP in the layers that the configuration names."""

from __future__ import annotations

from rpadiag.engines.families.sitemap import (
    FUSED,
    NO_GEGLU,
    PRE_NORM,
    Family,
    Source,
    rollout_points,
    trainer_points,
)

# Both stacks run the router as a module of its own that returns the logits first; vLLM calls it inside its expert layer.
EXPERTS = {
    "router": Source(module="model.layers.{n}.mlp.gate"),
    "expert_out": Source(module="model.layers.{n}.mlp"),
}
FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    qk_norm=True,
    trainer=trainer_points(qk_norm=True) | EXPERTS,
    rollout=rollout_points(qk_norm=True) | EXPERTS,
    windows="none",
    fused=FUSED,
    absent={**PRE_NORM, **NO_GEGLU},
    refused={
        "dual_chunk_attention_config": "vLLM then computes attention in chunks with their own positions",
        "use_sliding_window": "transformers then attends within a window, and vLLM does not",
        "shared_expert_intermediate_size": "vLLM then adds a shared expert, and transformers does not",
    },
    experts=True,
)
