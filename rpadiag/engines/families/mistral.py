"""Mistral: as Llama, with a sliding attention window on every layer."""

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
    name="mistral",
    architectures=("MistralForCausalLM",),
    qk_norm=False,
    trainer=trainer_points(qk_norm=False),
    rollout=rollout_points(qk_norm=False),
    windows="all",
    fused=FUSED,
    absent={**NO_QK_NORM, **PRE_NORM, **NO_GEGLU, **NO_EXPERTS},
    refused={
        "llama_4_scaling": "its query is scaled by position after RoPE, which no site shows",
    },
)
