"""Gemma 3 (text): as Gemma 2, with per-head norms in place of soft-capped attention, and a RoPE base per kind of layer."""

from __future__ import annotations

from rpadiag.engines.families.sitemap import (
    FUSED,
    NO_EXPERTS,
    NO_SWIGLU,
    Family,
    Source,
    rollout_gemma,
    trainer_gemma,
)

# transformers turns the heads before the tokens ahead of these norms.
HEAD_NORMS = {f"{x}_norm": Source(module=f"model.layers.{{n}}.self_attn.{x}_norm", heads_first=True) for x in "qk"}
FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    qk_norm=True,
    trainer=trainer_gemma(qk_norm=True) | HEAD_NORMS,
    rollout=rollout_gemma(qk_norm=True),
    windows="layer_types",
    fused=FUSED,
    absent={**NO_SWIGLU, **NO_EXPERTS},
    refused={
        "attn_logit_softcapping": "vLLM does not cap the attention scores of this family",
        "use_bidirectional_attention": "a token then attends to later ones, so no logprob is that of a next token",
    },
    activation="gelu_pytorch_tanh",
)
