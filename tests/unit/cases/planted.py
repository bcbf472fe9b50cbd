"""Faults planted in small tensors of our own: what each kind looks like, and what the diagnosis must say about it.

A is the reference, B the other side. The kinds are those of public bug reports of training and serving stacks.
Shape legend: R rows, C columns, T tokens, H heads, D head size, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16
Sites = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """words: fragments the diagnosis must contain. numbers: entries of the first finding, to 2 %."""

    region: str | None
    severity: str
    first_site: str | None
    words: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


Build = Callable[[], tuple[Sites, Sites, dict[str, Any]]]
CASES: dict[str, tuple[Build, Planted]] = {}


def case(
    name: str, region: str | None, severity: str, first_site: str | None, *words: str, **numbers: float
) -> Callable[[Build], Build]:
    def keep(build: Build) -> Build:
        assert name not in CASES
        CASES[name] = (
            build,
            Planted(region=region, severity=severity, first_site=first_site, words=words, numbers=numbers),
        )
        return build

    return keep


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def lp(x: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    """Rounded, still float32."""
    return x.float().to(dtype).float()
