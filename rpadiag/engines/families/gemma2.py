"""Gemma 2: 1 + w norms around attention and MLP, GeGLU, a scaled embedding, soft-capped attention and logits."""

from __future__ import annotations

from rpadiag.engines.families.sitemap import (
    FUSED,
    NO_EXPERTS,
    NO_QK_NORM,
    NO_SWIGLU,
    Family,
    rollout_gemma,
    trainer_gemma,
)

FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    qk_norm=False,
    trainer=trainer_gemma(qk_norm=False),
    rollout=rollout_gemma(qk_norm=False),
    windows="layer_types",
    fused=FUSED,
    absent={**NO_QK_NORM, **NO_SWIGLU, **NO_EXPERTS},
    refused={
        "use_bidirectional_attention": "a token then attends to later ones, so no logprob is that of a next token",
    },
    activation="gelu_pytorch_tanh",
)
