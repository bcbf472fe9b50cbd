"""Merged projections in a transformers forward: one matrix product for q/k/v and one for gate/up, as vLLM lays them out.

The products are the same numbers; a kernel may choose its tiles, and so its accumulation order, by the width of the
output. Merging takes that out of a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rpadiag.engines.products import Product, own_product
from rpadiag.engines.replay import replaced

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]


@contextlib.contextmanager
def merged_projections(model: nn.Module) -> Iterator[None]:
    """Replace the forward of each projection in a group by its slice of one product while the block runs.

    Weights are concatenated once, so the block holds a second copy of them; parameters and state dict are untouched.
    Modules keep firing their hooks. The slices of a group must be asked for with the same input tensor.
    """
    with replaced(dict(merged_forwards(model))):
        yield


def merged_forwards(model: nn.Module, product: MakeProduct = own_product) -> list[tuple[nn.Module, Product]]:
    """Each projection of a group inside ``model`` with the forward that slices it from the group's one product.

    product: makes the merged product of a weight [out, in] and its bias.
    """
    out: list[tuple[nn.Module, Product]] = []
    for module in model.modules():
        for group in GROUPS:
            members = [m for m in (getattr(module, name, None) for name in group) if isinstance(m, nn.Linear)]
            if len(members) == len(group):
                out += zip(members, _slices(members, product), strict=True)
    return out


def _slices(members: Sequence[nn.Linear], product: MakeProduct) -> list[Product]:
    with torch.no_grad():
        weight = torch.cat([m.weight for m in members])
        bias = torch.cat([m.bias for m in members]) if all(m.bias is not None for m in members) else None
    merged = product(weight, bias)
    widths = [m.out_features for m in members]
    last: dict[str, Any] = {}

    def answer(index: int) -> Product:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if last.get("input") is not x:
                last["input"], last["parts"] = x, merged(x).split(widths, dim=-1)
            part: torch.Tensor = last["parts"][index]
            if index == len(members) - 1:
                last.clear()
            return part

        return forward

    return [answer(index) for index in range(len(members))]
