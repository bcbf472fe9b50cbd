"""Parameters that a stack keeps stacked, one by one under the names that the checkpoint has for them.

transformers stacks the experts of a layer: ``experts.gate_up_proj`` [E, 2 I, H] and ``experts.down_proj`` [E, H, I], where
the checkpoint has ``experts.<e>.gate_proj.weight`` [I, H], ``up_proj.weight`` and ``down_proj.weight`` of each. Shape legend: E
experts, I width inside an expert, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def checkpoint_tensors(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each named parameter of a transformers model under the checkpoint's name; stacked experts one at a time."""
    for name, parameter in parameters:
        path, _, leaf = name.rpartition(".")
        if not path.endswith(".experts") or parameter.dim() != 3:
            yield name, parameter
            continue
        for number, expert in enumerate(parameter):
            yield from expert_tensors(f"{path}.{number}", leaf, expert)


def expert_tensors(path: str, leaf: str, expert: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One expert's checkpoint tensors from what is stacked of it: ``gate_up_proj`` [2 I, H] or another projection whole."""
    if leaf == "gate_up_proj":
        for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
            yield f"{path}.{part}.weight", half
    else:
        yield f"{path}.{leaf}.weight", expert
