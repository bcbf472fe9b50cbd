"""The all-reduce of a row-parallel layer (o_proj, down_proj) of vLLM, seen from one rank.

``RowParallelLinear.forward`` hands its partial product to the tensor-parallel group, whose ``all_reduce`` gives the sum; on a CPU in
place. Read in the source of vLLM 0.26.0 and 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def tap_reductions(
    sites: Mapping[torch.nn.Module, str], record: Callable[[str, torch.Tensor], None]
) -> list[Callable[[], None]]:
    """Call ``record(site, partial [T, W])`` before each all-reduce of the modules that are keys; returns what undoes it."""
    from vllm.distributed.parallel_state import get_tp_group

    group: Any = get_tp_group()
    reduce = group.all_reduce
    running: list[str] = []  # the site of the module that is being called, until it has reduced

    def all_reduce(partial: torch.Tensor) -> torch.Tensor:
        if running:
            record(running.pop(), partial)
        summed: torch.Tensor = reduce(partial)
        return summed

    def enter(site: str) -> Callable[..., None]:
        def before(_module: torch.nn.Module, _args: Any) -> None:
            running[:] = [site]

        return before

    def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
        running.clear()

    group.all_reduce = all_reduce
    undo: list[Callable[[], None]] = [lambda: delattr(group, "all_reduce")]
    for module, site in sites.items():
        undo += [module.register_forward_pre_hook(enter(site)).remove, module.register_forward_hook(leave).remove]
    return undo
