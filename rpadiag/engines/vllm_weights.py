"""vLLM's parameters under the checkpoint's names: which tensors a model needs, and digests of what it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from rpadiag.engines.digests import tensor_digest
from rpadiag.engines.families import family_for
from rpadiag.errors import InputError

# What a checkpoint holds; scales and zero points are vLLM's own, of weights that it quantised while loading.
KINDS = ("weight", "bias")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# vLLM's parameter of all experts of a layer -> the projections that it stacks of each
STACKED_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def check_complete(model: torch.nn.Module, delivered: Collection[str], *, name: str) -> None:
    """InputError unless the checkpoint delivered every tensor: vLLM leaves memory as it was where one is missing."""
    needed = [key for keys, _ in _parameters(model) for key in keys if key.rpartition(".")[2] in KINDS]
    missing = sorted(set(needed) - set(delivered))
    if missing:
        raise InputError(
            f"half a model: {name} lacks {missing[0]}",
            detail=f"{len(missing)} of {len(needed)} tensors are missing",
            hint="download the checkpoint again",
        )


def noted(get_all_weights: Any, delivered: dict[str, str]) -> Any:
    """vLLM's ``DefaultModelLoader.get_all_weights``, noting the digest of each tensor it hands to the model.

    CPU linears keep no readable weight afterwards. A tied head, which some checkpoints store twice, counts once.
    """

    def tee(loader: Any, config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        for name, tensor in get_all_weights(loader, config, model):
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")):
                delivered[name] = tensor_digest(tensor.to(config.dtype))
            yield name, tensor

    return tee


def live_digests(model: torch.nn.Module, *, known: Collection[str]) -> dict[str, str]:
    """Digest of each checkpoint tensor that can be read back from vLLM's parameters; ``known`` limits the names.

    Fused parameters are cut along dimension 0; padded vocabulary rows are cut off. Skipped, because a kernel
    replaced them by a packed form: parameters that are empty, quantised or of another shape, and experts, whose packed form may have
    the same shape.
    """
    config: Any = model.config
    family = family_for(config.architectures)
    facts = family.facts(config)
    widths = family.widths(facts)
    found: dict[str, str] = {}
    for keys, parameter in _parameters(model):
        if parameter.numel() == 0 or parameter.dtype not in FLOATS or ".experts." in keys[0]:
            continue
        if len(keys) > 1:
            sizes = [widths[key.split(".")[-2].removesuffix("_proj")] for key in keys]
            if sum(sizes) != parameter.shape[0]:
                continue
            pieces = list(parameter.split(sizes))
        elif keys[0].split(".")[-2] in ("embed_tokens", "lm_head"):
            pieces = [parameter[: facts.vocab_size]]
        else:
            pieces = [parameter]
        found |= {key: tensor_digest(t.data) for key, t in zip(keys, pieces, strict=True) if key in known}
    return found


def _parameters(model: torch.nn.Module) -> Iterator[tuple[list[str], torch.nn.Parameter]]:
    """(checkpoint names stacked in it, parameter) of every parameter; a tied head counts once."""
    config: Any = model.config
    family = family_for(config.architectures)
    fused, facts = family.fused, family.facts(config)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        if tied and leaf == "lm_head":
            continue
        if kind in STACKED_EXPERTS and parameter.dim() == 3:
            experts = name.partition(".experts.")[0] + ".experts"
            parts = STACKED_EXPERTS[kind]
            yield [f"{experts}.{n}.{part}.weight" for n in range(facts.num_experts) for part in parts], parameter
            continue
        yield [f"{parent}.{part}.{kind}" for part in fused[leaf]] if leaf in fused else [name], parameter
