"""Diagnosis of one operation of a decoder: the trainer's output and the rollout's, both from the same captured inputs.

Sites are token-major [T, W]; heads are unfolded here. Shape legend: T tokens, W width, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rpadiag.compare.diagnose import diagnose_sites
from rpadiag.compare.explain import ContractReader
from rpadiag.findings import Finding
from rpadiag.sites import split_site

_HEADS = ("q_norm", "k_norm", "q_rope", "k_rope")


def diagnose_operation(
    site: str,
    trainer: Tensor,
    rollout: Tensor,
    reads: Mapping[str, Tensor],
    *,
    head_dim: int,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
    inv_freq: Tensor | None = None,
    contracts: ContractReader | None = None,
) -> list[Finding]:
    """Why ``trainer`` and ``rollout`` [T, W] differ at ``site`` although both operations read ``reads`` (by site).

    positions: int64 [T] and inv_freq: float32 [D/2], for RoPE. weight, eps: of a norm, where known. Empty when they are equal.
    """
    _, point = split_site(site)
    given = {split_site(s)[1]: t for s, t in reads.items()}
    inputs: dict[str, Any] = {}
    if positions is not None:
        inputs["positions"] = positions
    if inv_freq is not None:
        inputs["inv_freq"] = inv_freq
    if weight is not None:
        inputs["weight"] = weight
    if eps is not None:
        inputs["eps"] = eps
    a, b = trainer, rollout
    if point in _HEADS:
        a, b = (t.unflatten(-1, (-1, head_dim)) for t in (a, b))
        source = next(iter(given.values()), None)
        if source is not None:
            inputs["k" if point.startswith("k") else "q"] = source.unflatten(-1, (-1, head_dim))
    elif point == "attn":
        a, b = (_heads_first(t, head_dim) for t in (a, b))
        for name, read in (("q", "q_rope"), ("k", "k_rope"), ("v", "v")):
            if read in given:
                inputs[name] = _heads_first(given[read], head_dim)
    elif point in ("act", "geglu"):
        inputs |= {k: given[k] for k in ("gate", "up") if k in given}
    elif point in ("resid_attn", "resid_mlp"):
        values = list(given.values())
        inputs |= dict(zip(("residual", "x"), values, strict=False))
    elif given:
        inputs["x"] = next(iter(given.values()))
    return list(diagnose_sites({site: a}, {site: b}, inputs, contracts=contracts).findings)


def _heads_first(x: Tensor, head_dim: int) -> Tensor:
    return torch.movedim(x.unflatten(-1, (-1, head_dim)), 1, 0)
