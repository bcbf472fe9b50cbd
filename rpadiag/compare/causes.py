"""Causes of a difference that the stacks' own manifests name: quantised weights or KV cache, another configuration, other
logprobs than raw ones, a head in another dtype.

They are facts, not measurements: what an engine says it ran with. A difference that has one of these causes is not
called rounding, however small it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rpadiag.findings import Finding

BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
QUANTISED_WEIGHTS = "quantised-weights"
QUANTISED_CACHE = "quantised-kv-cache"
CONFIG_DIFFERS = "config-differs"
PROCESSED_LOGPROBS = "processed-logprobs"
HEAD_DTYPE = "head-dtype"
BATCH_INVARIANT = "batch-invariant"
# Points whose own operation a cause reaches; everything else that is off has another cause.
REACHES = {
    QUANTISED_WEIGHTS: ("q", "k", "v", "o", "gate", "up", "down", "router", "expert_out", "logits", "embed"),
    QUANTISED_CACHE: ("attn",),
}
# Manifest entry -> (region, what it is in words). Compared where both manifests have it.
CONFIG = {
    "rms_eps": ("rmsnorm", "the epsilon of RMSNorm"),
    "rope": ("rope", "RoPE"),
    "hidden_act": ("swiglu", "the activation"),
    "attention_bias": ("matmul", "the bias of q, k and v"),
    "final_logit_softcapping": ("lm_head", "the cap of the logits"),
    "logit_scale": ("lm_head", "the scale of the logits"),
    "tie_word_embeddings": ("lm_head", "whether the head is the embedding"),
}


def known_causes(trainer: Mapping[str, Any], rollout: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Findings from two manifests: of engines that ran, or the ``meta`` of two bundles. What the floors say to them: ``batch_invariance``."""
    stacks = (("trainer", trainer), ("rollout", rollout))
    return (
        *(f for name, meta in stacks if (f := _weights(name, meta)) is not None),
        *(f for name, meta in stacks if (f := _cache(name, meta)) is not None),
        *_configs(trainer, rollout),
        *_sampling(rollout),
        *_head(trainer, rollout),
    )


def is_quantised(meta: Mapping[str, Any]) -> str | None:
    """The method that a stack's weights are quantised with, None where its manifest names none."""
    config = meta.get("config")
    method = meta.get("quantization") or (config.get("quantization") if isinstance(config, Mapping) else None)
    return None if not method or str(method).lower() == "none" else str(method)


def narrow_cache(meta: Mapping[str, Any]) -> str | None:
    """Dtype of a KV cache that holds fewer bits than the model computes with; None where it does not, or is not named."""
    cache, model = str(meta.get("cache_dtype") or "auto").lower(), str(meta.get("dtype") or "bfloat16")
    if cache in ("auto", "none"):
        return None
    return None if BYTES.get(cache, 1) >= BYTES.get(model, 2) else cache


def _weights(stack: str, meta: Mapping[str, Any]) -> Finding | None:
    method = is_quantised(meta)
    if method is None:
        return None
    text = (
        f"The {stack} ran with quantised weights ({method}): its matrix products are of other numbers than those of the "
        "checkpoint in 16 bits. What this moves is quantisation, not rounding, and no rounding position takes it back."
    )
    return Finding(
        code=QUANTISED_WEIGHTS, severity="warning", region="matmul", text=text, numbers={"method": method}, rank=0
    )


def _cache(stack: str, meta: Mapping[str, Any]) -> Finding | None:
    cache = narrow_cache(meta)
    if cache is None:
        return None
    text = (
        f"The {stack} kept keys and values in a {cache} KV cache, while it computes in {meta.get('dtype') or 'bfloat16'}: attention "
        "reads them back with fewer bits. What this moves is the cache, not rounding."
    )
    return Finding(
        code=QUANTISED_CACHE, severity="warning", region="attention", text=text, numbers={"cache_dtype": cache}, rank=0
    )


def _configs(trainer: Mapping[str, Any], rollout: Mapping[str, Any]) -> list[Finding]:
    ours, theirs = trainer.get("config"), rollout.get("config")
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return []
    out = []
    for name, (region, words) in CONFIG.items():
        if name in ours and name in theirs and ours[name] != theirs[name]:
            a, b = _shown(ours[name], theirs[name]), _shown(theirs[name], ours[name])
            text = f"The stacks were configured differently: {words} is {a} in the trainer and {b} in the rollout."
            numbers = {"name": name, "trainer": ours[name], "rollout": theirs[name]}
            out.append(
                Finding(code=CONFIG_DIFFERS, severity="error", region=region, text=text, numbers=numbers, rank=0)
            )
    return out


def _sampling(rollout: Mapping[str, Any]) -> list[Finding]:
    """Logprobs of the distribution that was sampled from, where that is not the model's own."""
    mode, sampling = str(rollout.get("logprobs_mode") or ""), rollout.get("sampling")
    if not mode.startswith("processed") or not isinstance(sampling, Mapping):
        return []
    temperature, top_p = float(sampling.get("temperature", 1.0)), float(sampling.get("top_p", 1.0))
    if (temperature, top_p) == (1.0, 1.0):
        return []
    text = (
        f"The rollout's logprobs of sampled tokens are those after temperature {temperature:g} and top-p {top_p:g} ({mode}), the "
        "trainer's are raw. This is another quantity, not another rounding"
    )
    numbers = {"temperature": temperature, "top_p": top_p, "logprobs_mode": mode}
    return [
        Finding(code=PROCESSED_LOGPROBS, severity="error", region="sampling", text=f"{text}.", numbers=numbers, rank=0)
    ]


def _head(trainer: Mapping[str, Any], rollout: Mapping[str, Any]) -> list[Finding]:
    """Logits that one stack computes in another dtype than its model."""
    ours, theirs = trainer.get("head_dtype") or trainer.get("dtype"), rollout.get("head_dtype")
    if not ours or not theirs or ours == theirs:
        return []
    text = (
        f"The heads compute in different dtypes: logits are {theirs} in the rollout and {ours} in the trainer. That moves every "
        "logprob, in the head alone; no region aligns it. Give both the same: head_dtype in vLLM, or logits computed in float32 in the "
        "trainer."
    )
    numbers = {"trainer": str(ours), "rollout": str(theirs)}
    return [Finding(code=HEAD_DTYPE, severity="warning", region="lm_head", text=text, numbers=numbers, rank=1)]


def batch_invariance(rollout: Mapping[str, Any], floors: Sequence[Mapping[str, Any]] = ()) -> tuple[Finding, ...]:
    """A rollout whose kernels should not depend on the batch: its own floors are a control with a known answer, zero.

    Args:
        rollout: Its manifest; ``env.VLLM_BATCH_INVARIANT`` says that the mode was on.
        floors: Rows of metrics.json's ``floors``; of these the rollout's, in nats. Without them nothing was controlled.
    """
    environment = rollout.get("env")
    if not isinstance(environment, Mapping) or environment.get("VLLM_BATCH_INVARIANT", "0") in ("", "0"):
        return ()
    own = {str(f["name"]): float(f["mean_abs_d"]) for f in floors if f["stack"] == "rollout"}
    broken = {name: d for name, d in own.items() if d != 0}
    mode = (
        "The rollout ran in batch-invariant mode, in which what it computes for a token should not depend on its batch"
    )
    if broken:
        measured = ", ".join(f"{name} {d:.3g}" for name, d in broken.items())
        text = (
            f"{mode}, and it does: its own noise floors are not 0 ({measured} nats, mean |d|). Some kernel of this model, GPU or version is outside the "
            "mode, so it does not take batch noise out of this comparison."
        )
        return (Finding(code=BATCH_INVARIANT, severity="warning", text=text, numbers=broken, rank=2),)
    says = (
        "and its own noise floors are 0: what remains is the difference of the stacks"
        if own
        else "so its own noise floors would be 0; they were not measured here"
    )
    return (Finding(code=BATCH_INVARIANT, severity="info", text=f"{mode}, {says}.", rank=6),)


def _shown(value: Any, other: Any) -> str:
    """A value in a sentence; of an object only what the other side has differently."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        differing = [k for k in sorted(value.keys() | other.keys()) if value.get(k) != other.get(k)]
        return ", ".join(f"{k} {_shown(value.get(k, 'absent'), None)}" for k in differing)
    return f"{value:g}" if isinstance(value, float) else str(value)
