"""Qwen3: per-head norms of q and k between the projections and RoPE."""

from __future__ import annotations

from rpadiag.engines.families.sitemap import (
    FUSED,
    NO_EXPERTS,
    NO_GEGLU,
    PRE_NORM,
    Family,
    rollout_points,
    trainer_points,
)

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    qk_norm=True,
    trainer=trainer_points(qk_norm=True),
    rollout=rollout_points(qk_norm=True),
    windows="layer_types",
    fused=FUSED,
    absent={**PRE_NORM, **NO_GEGLU, **NO_EXPERTS},
    refused={
        "dual_chunk_attention_config": "vLLM then computes attention in chunks with their own positions",
    },
)
