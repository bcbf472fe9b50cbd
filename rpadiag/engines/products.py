"""BF16 matrix products by FP32 kernels, for CPUs that have no BF16 ones.

A product of two BF16 values is exact in FP32 and both kernels accumulate in FP32, so rounding once at the end gives the same
contract; only the order of accumulation, and with it about one output in 1e4, differs. On a CPU with AVX2 alone this is
six times as fast. Used where a forward is one of many replicates, never where a trainer is held against another stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from rpadiag.engines.replay import replaced

Product = Callable[[torch.Tensor], torch.Tensor]


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
    with replaced({m: fp32_product(m.weight, m.bias) for m in model.modules() if isinstance(m, nn.Linear)}):
        yield


def fp32_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """``x @ weight.T + bias`` by an FP32 kernel, rounded once to the dtype of ``x``; holds FP32 copies of both."""
    wide = weight.detach().to(torch.float32)
    wide_bias = None if bias is None else bias.detach().to(torch.float32)

    def product(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(torch.float32), wide, wide_bias).to(x.dtype)

    return product


def own_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """``x @ weight.T + bias`` as torch computes it in the dtype of ``x``."""

    def product(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)

    return product
