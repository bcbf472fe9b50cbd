"""Where each point of the site vocabulary is found in a stack's modules. Data, not code.

A :class:`Source` names a module by path and says which of its tensors is the point. Both stacks are
described by the same words; what differs is which words a stack needs:

======== =============================================================================================
take     meaning
======== =============================================================================================
output   what the module returned; element ``index`` where it returns a tuple (a lone tensor is index 0)
input    positional argument ``index`` of the call, seen before the module runs
slice    part ``index`` of output 0, which holds ``parts`` fused tensors side by side in the width
logits   the logits that the whole model returned, which may be capped after the head (trainer only)
query    the query handed to the attention function, heads after tokens (trainer only)
key      the key handed to the attention function (trainer only)
derived  computed from ``logits`` by the engine, in no module
======== =============================================================================================

Paths are relative to the model object; ``{n}`` is the layer. A path with ``{next}`` reads from the layer
above, and ``last`` is the path that serves the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rpadiag.engines.base import DENSE_MLP_POINTS, ModelFacts
from rpadiag.engines.config_facts import quantization_method
from rpadiag.errors import InputError
from rpadiag.sites import split_site

TAKES = ("output", "input", "slice", "logits", "query", "key", "derived")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One point in one stack: module path, and which of its tensors. See the module's table.

    parts: names of the points that share the fused output, in order, for ``slice``.
    heads_first: the tensor is [1, heads, T, head_dim] (trainer only).
    """

    module: str
    take: str = "output"
    index: int = 0
    parts: tuple[str, ...] = ()
    heads_first: bool = False
    last: str | None = None

    def path(self, layer: int | None, num_layers: int) -> str:
        """The module path at a layer."""
        if layer is None:
            return self.module
        if self.last is not None and layer == num_layers - 1:
            return self.last
        return self.module.format(n=layer, next=layer + 1)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: how to recognise it, and its points in both stacks.

    architectures: names in ``config.json`` that this map holds for.
    trainer, rollout: Source of every point, keyed by point name (``q_rope``, ``embed``, ...).
    trainer_rotary: module path of a rotary embedding that is handed the positions.
    fused: rollout parameter -> the checkpoint's parameters stacked in it along dimension 0, both as the last
        module name of the path.
    absent: points that the family does not have, with the reason.
    windows: who reads ``sliding_window``: ``none`` (ignored), ``all`` layers, or those that ``layer_types`` names.
    refused: configuration attributes this map does not hold for -> the reason; checked by ``facts``, which refuses
        quantised checkpoints of every family.
    activation: the gated MLP's, as the configuration writes it. experts: whether layers may have them (Qwen's rule).
    """

    name: str
    architectures: tuple[str, ...]
    qk_norm: bool
    trainer: Mapping[str, Source]
    rollout: Mapping[str, Source]
    windows: str = "none"
    trainer_rotary: str = "model.rotary_emb"
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    experts: bool = False

    def facts(self, config: Any) -> ModelFacts:
        """Facts from a transformers configuration object (vLLM's ``hf_config`` is one too)."""
        if quantised := getattr(config, "quantization_config", None):
            raise InputError(
                f"this checkpoint is quantised with {quantization_method(quantised)} (its quantization_config)",
                detail="quantised linears are not the ones this site map names; and what quantisation moves is not rounding",
                hint="take the checkpoint that it was made from; vLLM can quantise that while it loads, and a comparison then names "
                "it as a cause of its own: --engine-arg quantization=fp8",
            )
        for attribute, reason in self.refused.items():
            if getattr(config, attribute, None):
                raise InputError(f"{self.name} models with {attribute} are not supported", detail=reason)
        given = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or self.activation
        if given != self.activation:
            raise InputError(
                f"activation {given!r} is not supported",
                detail=f"the gated product of {self.name} models is that of {self.activation!r}",
            )
        heads = int(config.num_attention_heads)
        layers = int(config.num_hidden_layers)
        return ModelFacts(
            family=self.name,
            architecture=self.architectures[0],
            num_layers=layers,
            qk_norm=self.qk_norm,
            num_heads=heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            vocab_size=int(config.vocab_size),
            max_positions=int(config.max_position_embeddings),
            rms_eps=float(config.rms_norm_eps),
            tied_head=bool(getattr(config, "tie_word_embeddings", False)),
            sliding_windows=_sliding_windows(config, layers, self.windows),
            **self._experts(config, layers),
        )

    def _experts(self, config: Any, num_layers: int) -> dict[str, Any]:
        """Facts about experts, and the points that no layer has."""
        count = int(getattr(config, "num_experts", 0) or 0) if self.experts else 0
        step, dense = int(getattr(config, "decoder_sparse_step", 1)), getattr(config, "mlp_only_layers", None) or ()
        sparse = tuple(n for n in range(num_layers) if count and n not in dense and (n + 1) % step == 0)
        absent = dict(self.absent)
        if not sparse:
            return {"absent": absent | NO_EXPERTS}
        if len(sparse) == num_layers:
            absent |= dict.fromkeys(DENSE_MLP_POINTS, "every layer has experts in place of a dense MLP")
        return {
            "absent": absent,
            "expert_layers": sparse,
            "num_experts": count,
            "experts_per_token": int(config.num_experts_per_tok),
        }

    def source(self, site: str, *, stack: str, num_layers: int) -> tuple[str, Source]:
        """(module path, Source) of a site; ``stack`` is ``trainer`` or ``rollout``."""
        layer, point = split_site(site)
        if point in self.absent:
            raise InputError(f"site {site} does not exist in {self.name} models", detail=self.absent[point])
        source = (self.trainer if stack == "trainer" else self.rollout)[point]
        return source.path(layer, num_layers), source

    def widths(self, facts: ModelFacts) -> dict[str, int]:
        """Width W of every point, in elements."""
        q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        by_name = {"q": q, "q_norm": q, "q_rope": q, "attn": q, "k": kv, "k_norm": kv, "k_rope": kv, "v": kv}
        by_name |= dict.fromkeys(("gate", "up", "act", "geglu"), facts.intermediate_size)
        by_name |= {"router": facts.num_experts, "logits": facts.vocab_size, "logprob": 1}
        return {point: by_name.get(point, facts.hidden_size) for point in self.trainer}


def _sliding_windows(config: Any, num_layers: int, windows: str) -> tuple[int | None, ...]:
    """Attention window of each layer as both stacks read the configuration."""
    window = getattr(config, "sliding_window", None)
    if windows == "layer_types":
        kinds = getattr(config, "layer_types", None) or ()
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return ((int(window) if window and windows == "all" else None),) * num_layers


def trainer_points(*, qk_norm: bool) -> dict[str, Source]:
    """The transformers module layout that the Llama lineage shares."""
    layer, attn, mlp = "model.layers.{n}", "model.layers.{n}.self_attn", "model.layers.{n}.mlp"
    norms = {f"{x}_norm": Source(module=f"{attn}.{x}_norm") for x in "qk"} if qk_norm else {}
    return {
        "embed": Source(module="model.embed_tokens"),
        "input_norm": Source(module=f"{layer}.input_layernorm"),
        "q": Source(module=f"{attn}.q_proj"),
        "k": Source(module=f"{attn}.k_proj"),
        "v": Source(module=f"{attn}.v_proj"),
        **norms,
        "q_rope": Source(module=attn, take="query"),
        "k_rope": Source(module=attn, take="key"),
        "attn": Source(module=f"{attn}.o_proj", take="input"),
        "o": Source(module=f"{attn}.o_proj"),
        "resid_attn": Source(module=f"{layer}.post_attention_layernorm", take="input"),
        "post_norm": Source(module=f"{layer}.post_attention_layernorm"),
        "gate": Source(module=f"{mlp}.gate_proj"),
        "up": Source(module=f"{mlp}.up_proj"),
        "act": Source(module=f"{mlp}.down_proj", take="input"),
        "down": Source(module=f"{mlp}.down_proj"),
        "resid_mlp": Source(module="model.layers.{next}.input_layernorm", take="input", last="model.norm"),
        "final_norm": Source(module="model.norm"),
        "logits": Source(module="lm_head"),
        "logprob": Source(module="", take="derived"),
    }


def rollout_points(*, qk_norm: bool) -> dict[str, Source]:
    """vLLM's module layout for the same lineage: fused projections, fused residual add, packed tokens.

    The residual stream is output 1 of the norm that adds to it: what the kernel itself stored, rounded.
    """
    layer, attn, mlp = "model.layers.{n}", "model.layers.{n}.self_attn", "model.layers.{n}.mlp"
    qkv, gate_up = ("q", "k", "v"), ("gate", "up")
    norms = {f"{x}_norm": Source(module=f"{attn}.{x}_norm") for x in "qk"} if qk_norm else {}
    return {
        "embed": Source(module="model.embed_tokens"),
        "input_norm": Source(module=f"{layer}.input_layernorm"),
        "q": Source(module=f"{attn}.qkv_proj", take="slice", index=0, parts=qkv),
        "k": Source(module=f"{attn}.qkv_proj", take="slice", index=1, parts=qkv),
        "v": Source(module=f"{attn}.qkv_proj", take="slice", index=2, parts=qkv),
        **norms,
        "q_rope": Source(module=f"{attn}.attn", take="input", index=0),
        "k_rope": Source(module=f"{attn}.attn", take="input", index=1),
        "attn": Source(module=f"{attn}.o_proj", take="input"),
        "o": Source(module=f"{attn}.o_proj"),
        "resid_attn": Source(module=f"{layer}.post_attention_layernorm", index=1),
        "post_norm": Source(module=f"{layer}.post_attention_layernorm"),
        "gate": Source(module=f"{mlp}.gate_up_proj", take="slice", index=0, parts=gate_up),
        "up": Source(module=f"{mlp}.gate_up_proj", take="slice", index=1, parts=gate_up),
        "act": Source(module=f"{mlp}.down_proj", take="input"),
        "down": Source(module=f"{mlp}.down_proj"),
        "resid_mlp": Source(module="model.layers.{next}.input_layernorm", index=1, last="model.norm"),
        "final_norm": Source(module="model.norm"),
        "logits": Source(module="logits_processor"),
        "logprob": Source(module="", take="derived"),
    }


def trainer_gemma(*, qk_norm: bool) -> dict[str, Source]:
    """transformers' layout of Gemma 2 and 3: norms around attention and MLP, GeGLU, logits capped after the head."""
    layer, points = "model.layers.{n}", trainer_points(qk_norm=qk_norm)
    points["geglu"] = points.pop("act")
    return {
        **points,
        "attn_norm": Source(module=f"{layer}.post_attention_layernorm"),
        "resid_attn": Source(module=f"{layer}.pre_feedforward_layernorm", take="input"),
        "post_norm": Source(module=f"{layer}.pre_feedforward_layernorm"),
        "mlp_norm": Source(module=f"{layer}.post_feedforward_layernorm"),
        "logits": Source(module="", take="logits"),
    }


def rollout_gemma(*, qk_norm: bool) -> dict[str, Source]:
    """vLLM's layout of the same. The embedding is scaled after its module, so it is read where the first layer gets it."""
    layer, points = "model.layers.{n}", rollout_points(qk_norm=qk_norm)
    points["geglu"] = points.pop("act")
    return {
        **points,
        "embed": Source(module="model.layers.0", take="input", index=1),
        "attn_norm": Source(module=f"{layer}.post_attention_layernorm"),
        "resid_attn": Source(module=f"{layer}.pre_feedforward_layernorm", index=1),
        "post_norm": Source(module=f"{layer}.pre_feedforward_layernorm"),
        "mlp_norm": Source(module=f"{layer}.post_feedforward_layernorm"),
    }


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
NO_QK_NORM = {
    "q_norm": "this family has no per-head norm of the query",
    "k_norm": "this family has no per-head norm of the key",
}
PRE_NORM = {
    "attn_norm": "this family adds the attention output to the stream without a norm",
    "mlp_norm": "this family adds the MLP output to the stream without a norm",
}
NO_EXPERTS = {
    "router": "no layer of this model has experts",
    "expert_out": "no layer of this model has experts",
}
NO_GEGLU = {"geglu": "the gated product of this family is a SwiGLU: see act"}
NO_SWIGLU = {"act": "the gated product of this family is a GeGLU, outside the swiglu region: see geglu"}
