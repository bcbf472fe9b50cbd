"""Merged projections in a transformers forward: one matrix product for q/k/v and one for gate/up, as vLLM lays them out.

The products are the same numbers; a kernel may choose its tiles, and so its accumulation order, by the width of the
output. Merging takes that out of a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@contextlib.contextmanager
def merged_projections(model: nn.Module) -> Iterator[None]:
    """Replace the forward of each projection in a group by its slice of one product while the block runs.

    Weights are concatenated once, so the block holds a second copy of them; parameters and state dict are untouched.
    Modules keep firing their hooks. The slices of a group must be asked for with the same input tensor.
    """
    patched: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules():
            for group in GROUPS:
                members = [m for m in (getattr(module, name, None) for name in group) if isinstance(m, nn.Linear)]
                if len(members) == len(group):
                    patched += [(m, m.__dict__.get("forward")) for m in members]
                    _merge(members)
        yield
    finally:
        for member, before in patched:
            member.__dict__.pop("forward", None)
            if before is not None:
                member.__dict__["forward"] = before


def _merge(members: Sequence[nn.Linear]) -> None:
    with torch.no_grad():
        weight = torch.cat([m.weight for m in members])
        bias = torch.cat([m.bias for m in members]) if all(m.bias is not None for m in members) else None
    widths = [m.out_features for m in members]
    last: dict[str, Any] = {}

    def answer(index: int) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if last.get("input") is not x:
                last["input"], last["parts"] = x, nn.functional.linear(x, weight, bias).split(widths, dim=-1)
            part: torch.Tensor = last["parts"][index]
            if index == len(members) - 1:
                last.clear()
            return part

        return forward

    for index, member in enumerate(members):
        member.__dict__["forward"] = answer(index)
