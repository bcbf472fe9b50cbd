"""ULP statistics of two bf16 tensors: the kernel beside plain and compiled PyTorch, as a share of the copy bandwidth."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from timing import time_calls
from torch import Tensor

TOKENS, COLUMNS = 16384, 12288


def pair() -> tuple[Tensor, Tensor]:
    """A bf16 tensor and another one in which a fifth of the elements moved, most of them by one ULP."""
    a = torch.randn(TOKENS, COLUMNS, device="cuda")
    b = a * (1 + 0.002 * torch.randn_like(a)) + 1e-4 * torch.randn_like(a)
    return a.bfloat16(), b.bfloat16()


def plain(a: Tensor, b: Tensor) -> Any:
    from rpadiag_kernels.ulp import reference

    return reference(a, b)


def few_columns(a: Tensor, b: Tensor) -> Tensor:
    """Five of the columns, written for Inductor to fuse: differing, largest, clipped sum, two sums of squares."""
    x, y = a.view(torch.int16).int(), b.view(torch.int16).int()
    line_x = torch.where(x < 0, -(x & 0x7FFF), x)
    line_y = torch.where(y < 0, -(y & 0x7FFF), y)
    d = line_y - line_x
    diff = b.float() - a.float()
    return torch.stack([
        (d != 0).sum().float(), d.abs().max().float(), d.clamp(-8, 8).sum().float(), (diff * diff).sum(),
        (a.float() * a.float()).sum(),
    ])  # fmt: skip


def measure_ulp(copy: float) -> list[dict[str, Any]]:
    """``hot``: after two seconds of the same, when the GPU has lowered its clock to stay within its power."""
    a, b = pair()
    unrelated = torch.randn_like(a)
    num_bytes = 2 * a.numel() * 2
    compiled = torch.compile(few_columns)
    rows = []
    for name, function in (
        ("rpadiag", lambda: torch.ops.rpadiag.ulp_counts(a, b)),
        ("rpadiag, unrelated tensors", lambda: torch.ops.rpadiag.ulp_counts(a, unrelated)),
        ("torch, chunk of 1/8", lambda: plain(a[: TOKENS // 8], b[: TOKENS // 8])),
        ("torch.compile, 5 of 26 numbers", lambda: compiled(a, b)),
        ("rpadiag, hot", lambda: torch.ops.rpadiag.ulp_counts(a, b)),
    ):
        if "hot" in name:
            for _ in range(8000):
                function()
        share_of = num_bytes // 8 if "1/8" in name else num_bytes
        timing = time_calls(function)
        rows.append(
            {"region": "ulp", "name": name, "forward": {**asdict(timing), "share": timing.share(share_of, copy)}}
        )
    return rows
