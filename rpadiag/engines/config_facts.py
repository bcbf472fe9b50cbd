"""What a loaded model's configuration says that decides the function it computes, by one name whatever library wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COPIED = (
    "model_type",
    "hidden_act",
    "tie_word_embeddings",
    "attention_bias",
    "final_logit_softcapping",
    "logit_scale",
)


def config_facts(config: Any) -> dict[str, Any]:
    """Plain JSON values from a transformers configuration object; what it does not say is left out.

    rope: theta, type and whatever else its scaling takes. quantization: the method, of a checkpoint that is quantised.
    """
    facts: dict[str, Any] = {name: getattr(config, name) for name in _COPIED if getattr(config, name, None) is not None}
    facts["rms_eps"] = getattr(config, "rms_norm_eps", None)
    facts["rope"] = _rope(config)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        facts["quantization"] = quantization_method(quantization)
    return {name: value for name, value in facts.items() if value is not None}


def quantization_method(given: Any) -> str:
    """Name of the method in a ``quantization_config``: ``fp8``, ``awq``, ``compressed-tensors``."""
    if isinstance(given, Mapping):
        return str(given.get("quant_method") or given.get("quant_algo") or "unnamed method")
    return str(getattr(given, "quant_method", None) or "unnamed method")


def _rope(config: Any) -> dict[str, Any] | None:
    """transformers 5 has ``rope_parameters``, before that ``rope_theta`` and ``rope_scaling``; both give the same here."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, Mapping) for value in found.values()):  # by kind of layer
        return {str(kind): _plain(value) for kind, value in found.items() if isinstance(value, Mapping)}
    theta = found.get("rope_theta", getattr(config, "rope_theta", None))
    return None if theta is None else _plain({**found, "rope_theta": theta})


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    kind = found.get("rope_type", found.get("type", "default"))
    rest = {k: v for k, v in found.items() if k not in ("rope_theta", "rope_type", "type")}
    return {"theta": float(found["rope_theta"]), "type": str(kind), **rest} if "rope_theta" in found else dict(found)
