"""What a captured tensor is, from its name: rpadiag's own sites, and the names that other tools give theirs.

Captures of engines that rpadiag does not ship are named by their authors (``q_rope``, ``norm_out``, ``topk_weights``,
``logprobs``). A role is the region and the kind of value; it decides which explanations are tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rpadiag.sites import HEAD_POINTS, LAYER_POINTS, POINTS

DIAGNOSED_REGIONS = (
    "rope", "swiglu", "rmsnorm", "qk_norm", "attention", "matmul", "lm_head", "embed", "sampling", "data", "weights", "router", "unknown",
)  # fmt: skip

REGION_WORDS = {
    "rope": "rope",
    "swiglu": "swiglu",
    "rmsnorm": "residual-rmsnorm",
    "qk_norm": "qk-norm",
    "attention": "attention",
    "matmul": "matmul",
    "lm_head": "lm_head",
    "embed": "embedding",
    "sampling": "sampling",
    "data": "data",
    "weights": "weights",
    "router": "moe router",
    "unknown": "unnamed activation",
}


@dataclass(frozen=True, kw_only=True)
class Role:
    """region: one of DIAGNOSED_REGIONS. kind: the sort of value, e.g. ``table``, ``rstd``, ``tokens``, ``output``."""

    region: str
    kind: str = "output"


_OWN_REGIONS = {"geglu": "swiglu", "experts": "unknown", "all_reduce": "unknown"}
_OWN_KINDS = {"resid_attn": "residual", "resid_mlp": "residual", "logprob": "logprob", "logits": "logits"}

# First match wins; names are lower case with separators as "_".
_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (r"position|(^|_)pos(_|$)|cu_seqlens|seq_lens", "data", "positions"),
    (r"(attention|causal|attn|loss|padding|label)_mask|(^|_)mask(_|$)", "data", "mask"),
    (r"expert_(set|ids?|index|indices)|topk_(ids?|idx|index|indices)|selected_experts", "router", "experts"),
    (r"(^|_)(input|token|prompt|completion)?_?ids$|^tokens$|^input_tokens|labels|eos_|bos_", "data", "tokens"),
    (r"topk_(weights?|probs?|scores?)|routing_weights?|combine_weights?|expert_weights?", "router", "combine"),
    (r"router|moe_gate|gate_logits|gating|routing|expert|moe", "router", "output"),
    (r"(^|_)(k|v|kv|key|value)_?cache|cache_(k|v)|kv_scale", "attention", "cache"),
    (r"inv_?freq", "rope", "inv_freq"),
    (r"^(cos|sin)(_|$)|(^|_)(cos|sin)(_cache|_sin|_table)?$|rope_(table|cache)|freqs?(_cis)?$|angles?$|rotary_(table|emb)", "rope", "table"),
    (r"(^|_)(q|k|query|key)_?(final|norm_rope|normed_rope)", "qk_norm", "rotated"),
    (r"(q|k|query|key|qk|head)_?_?norm", "qk_norm", "output"),
    (r"rope|rotary|rotated|_rot(_|$)|^rot_", "rope", "output"),
    (r"logits?(_|$)", "lm_head", "logits"),
    (r"log_?probs?|logps?(_|$)|entropy|importance|ratio|nll|(^|_)loss", "sampling", "logprob"),
    (r"(inv|inverse|r)_?(rms|std)|rstd|variance|(^|_)var(_|$)|mean_sq|(^|_)rms(_|$)|sum_?sq", "rmsnorm", "rstd"),
    (r"resid", "rmsnorm", "residual"),
    (r"norm|(^|_)ln\d?(_|$)", "rmsnorm", "output"),
    (r"scores?(_|$)|softmax|(^|_)lse|attn_(weights|probs)", "attention", "scores"),
    (r"attn|attention|context|sdpa|flash", "attention", "output"),
    (r"embed|(^|_)emb(_|$)|wte", "embed", "output"),
    (r"silu|swiglu|geglu|(^|_)glu(_|$)|gated|(^|_)act(_|$)|activation|gelu|(^|_)sig(moid)?(_|$)", "swiglu", "output"),
    (r"^w(eights?)?(_|\d|$)|(^|_)weights?(_|$)|param|checkpoint|scale_inv|(^|_)bias(_|$)", "weights", "weights"),
    (r"(^|_)probs?(_|$)|samples?(_|$)", "sampling", "probs"),
    (r"proj|gemm|matmul|linear|(^|_)mm(_|$)|(^|_)out(put)?(_|$)|hidden|mlp|ffn|(^|_)[qkvo]$|gate|up|down|qkv|acc(um)?(_|$)", "matmul", "output"),
)  # fmt: skip

INPUT_ALIASES: dict[str, tuple[str, ...]] = {
    "x": ("x", "hidden_states", "hidden", "input", "inputs", "x_in"),
    "q": ("q", "query", "q_raw", "queries"),
    "k": ("k", "key", "k_raw", "keys"),
    "v": ("v", "value", "values"),
    "residual": ("residual", "res", "resid", "r", "residual_in"),
    "weight": ("weight", "w", "gamma", "norm_weight", "q_weight", "q_norm_weight", "scale_weight"),
    "positions": ("positions", "pos", "position_ids", "position", "pos_ids"),
    "inv_freq": ("inv_freq", "inv_freqs"),
    "cos": ("cos",),
    "sin": ("sin",),
    "gate": ("gate", "g", "x_gate"),
    "up": ("up", "u", "x_up"),
    "h": ("h", "hidden", "hidden_states", "final_norm", "x"),
    "logits": ("logits", "router_logits", "scores", "lg"),
    "targets": ("targets", "tok", "token", "tokens", "target", "labels", "next_token", "token_ids"),
    "ids": ("ids", "input_ids", "token_ids", "tokens"),
    "emb": ("emb", "embed", "embedding", "embeddings", "x"),
    "eps": ("eps", "epsilon", "rms_eps", "variance_epsilon", "rms_norm_eps"),
    "bias": ("bias", "b"),
    "sinks": ("sinks", "sink"),
}


def find_role(site: str, *, inputs: Mapping[str, Any] | None = None, sites: Iterable[str] = ()) -> Role:
    """Role of a site, from its name, then from what was fed to it."""
    point = site.rsplit(".", 1)[-1]
    if (site.startswith("layers.") or site in {p.name for p in HEAD_POINTS}) and point in POINTS:
        region = POINTS[point].region
        return Role(region=_OWN_REGIONS.get(region, region), kind=_OWN_KINDS.get(point, "output"))
    have = set(inputs or {})
    names = [s.lower() for s in sites]
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", site).lower()).strip("_")
    if re.search(r"(^|_)probs?(_|$)", name) and any(re.search("router|expert|moe|topk", s) for s in names):
        return Role(region="router", kind="probs")
    for pattern, region, kind in _PATTERNS:
        if re.search(pattern, name):
            if region == "matmul" and (guess := _from_inputs(have)) is not None and guess.region != "sampling":
                return guess
            return Role(region=region, kind=kind)
    if name in {p.name for p in LAYER_POINTS}:
        return Role(region=POINTS[name].region)
    return _from_inputs(have) or Role(region="unknown")


def _from_inputs(have: set[str]) -> Role | None:
    """Role of an output whose name says nothing, from the names of what was fed to the operation."""

    def given(*roles: str) -> bool:
        return all(any(alias in have for alias in INPUT_ALIASES[r][:4]) for r in roles)

    if given("gate", "up"):
        return Role(region="swiglu")
    if given("q", "k", "v"):
        return Role(region="attention")
    if given("q", "positions", "weight"):
        return Role(region="qk_norm", kind="rotated")
    if given("q", "positions"):
        return Role(region="rope")
    if given("x", "residual"):
        return Role(region="rmsnorm")
    if "h" in have and given("weight"):
        return Role(region="lm_head", kind="logits")
    if "emb" in have:
        return Role(region="embed")
    if given("x", "weight"):
        return Role(region="matmul")
    if given("logits"):
        return Role(region="sampling", kind="logprob")
    return None


def find_input(role: str, inputs: Mapping[str, Any], *, site: str = "", shape_of: Tensor | None = None) -> Any:
    """The input that plays a role: by alias, else alias plus the site's own suffix (``q`` for ``scores_d128``: ``qd128``)."""
    for alias in INPUT_ALIASES[role]:
        if alias in inputs and (shape_of is None or _fits(inputs[alias], shape_of)):
            return inputs[alias]
    suffix = site.rsplit("_", 1)[-1] if "_" in site else ""
    for alias in INPUT_ALIASES[role]:
        for name in (alias + suffix, f"{alias}_{suffix}"):
            if suffix and name in inputs:
                return inputs[name]
    return None


def _fits(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == like.shape
