"""Digests of the parameters that vLLM holds, under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from rpadiag.engines.digests import tensor_digest
from rpadiag.engines.families import family_for


def live_digests(model: torch.nn.Module, *, known: Collection[str]) -> dict[str, str]:
    """Digest of each checkpoint tensor that can be read back from vLLM's parameters.

    Fused parameters are cut along dimension 0; padded vocabulary rows are cut off. Skipped, because a kernel
    replaced them by a packed form: parameters that are empty or of another shape. ``known`` limits the names.
    """
    config: Any = model.config
    family = family_for(config.architectures)
    facts = family.facts(config)
    widths = family.widths(facts)
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        if leaf in family.fused:
            parts = family.fused[leaf]
            sizes = [widths[part.removesuffix("_proj")] for part in parts]
            if sum(sizes) != parameter.shape[0]:
                continue
            pieces = {f"{parent}.{p}.{kind}": t for p, t in zip(parts, parameter.split(sizes), strict=True)}
        elif leaf in ("embed_tokens", "lm_head"):
            pieces = {name: parameter[: facts.vocab_size]}
        else:
            pieces = {name: parameter}
        found |= {key: tensor_digest(tensor.data) for key, tensor in pieces.items() if key in known}
    return found
