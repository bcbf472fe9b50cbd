"""Qwen2 and Qwen2.5: as Llama, with biases on q, k and v."""

from __future__ import annotations

from rpadiag.engines.families.sitemap import (
    FUSED,
    NO_EXPERTS,
    NO_GEGLU,
    NO_QK_NORM,
    PRE_NORM,
    Family,
    rollout_points,
    trainer_points,
)

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    qk_norm=False,
    trainer=trainer_points(qk_norm=False),
    rollout=rollout_points(qk_norm=False),
    windows="layer_types",
    fused=FUSED,
    absent={**NO_QK_NORM, **PRE_NORM, **NO_GEGLU, **NO_EXPERTS},
    refused={
        "dual_chunk_attention_config": "vLLM then computes attention in chunks with their own positions",
        "qk_norm": "vLLM then normalises q and k, transformers does not",
    },
)
