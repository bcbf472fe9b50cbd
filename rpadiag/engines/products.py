"""BF16 matrix products by FP32 kernels, for CPUs that have no BF16 ones.

A product of two BF16 values is exact in FP32 and both kernels accumulate in FP32, so rounding once at the end gives the same
contract; only the order of accumulation, and with it about one output in 1e4, differs. On a CPU with AVX2 alone this is
six times as fast. Used where a forward is one of many replicates, never where a trainer is held against another stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def has_slow_products(model: nn.Module) -> bool:
    """Whether the model's matrix products are 16-bit on a CPU without instructions for them."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@contextlib.contextmanager
def fp32_products(model: nn.Module) -> Iterator[None]:
    """Every linear layer by an FP32 kernel, rounded to its dtype at the end, while the block runs.

    Holds an FP32 copy of the linear weights (twice their size). Parameters, hooks and state dict are untouched.
    """
    patched: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                patched.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = _forward(module)
        yield
    finally:
        for module, before in patched:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before


def _forward(module: nn.Linear) -> Any:
    weight = module.weight.detach().to(torch.float32)
    bias = None if module.bias is None else module.bias.detach().to(torch.float32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(torch.float32), weight, bias).to(x.dtype)

    return forward
