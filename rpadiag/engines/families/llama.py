"""Llama, and SmolLM2 and others that use its architecture."""

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
    name="llama",
    architectures=("LlamaForCausalLM",),
    qk_norm=False,
    trainer=trainer_points(qk_norm=False),
    rollout=rollout_points(qk_norm=False),
    windows="none",
    fused=FUSED,
    absent={**NO_QK_NORM, **PRE_NORM, **NO_GEGLU, **NO_EXPERTS},
)
