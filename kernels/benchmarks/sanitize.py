"""Small launches of every kernel, forward and backward, for compute-sanitizer; of the regions named, or all.

PYTHONPATH=kernels compute-sanitizer --tool memcheck python kernels/benchmarks/sanitize.py [rmsnorm swiglu rope ulp]
PYTHONPATH=kernels compute-sanitizer --tool racecheck python kernels/benchmarks/sanitize.py [rmsnorm swiglu rope ulp]
"""

from __future__ import annotations

import sys

import rpadiag_kernels
import torch
from torch import Tensor

SHAPES = ((3, 64), (70, 1000), (9, 4096), (5, 16384))


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()


def rmsnorm() -> None:
    for num_tokens, num_columns in SHAPES:
        x, r, w = make(num_tokens, num_columns), make(num_tokens, num_columns), make(num_columns)
        for axes in ({}, {"sum": "fp32", "variance": "unrounded", "scale": "fp32"}):
            y, s = rpadiag_kernels.rmsnorm(x, w, eps=1e-6, residual=r, **axes)
            torch.autograd.grad((y, s), (x, r, w), (torch.ones_like(y), torch.ones_like(s)))


def swiglu() -> None:
    for num_tokens, num_columns in SHAPES:
        gate, up = make(num_tokens, 2 * num_columns).chunk(2, dim=-1)
        out = rpadiag_kernels.swiglu(gate, up)
        torch.autograd.grad(out, (gate, up), torch.ones_like(out))


def ulp() -> None:
    for num_tokens, num_columns in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            a, b = (make(num_tokens, num_columns).detach().to(dtype) for _ in range(2))
            rpadiag_kernels.ulp_stats(a, b)
            a[0, 0] = float("nan")
            rpadiag_kernels.ulp_stats(a, b)


def rope() -> None:
    for head_size, heads, layout in ((64, 3, "neox"), (96, 8, "interleaved"), (256, 2, "neox")):
        q, k = make(5, heads, head_size), make(5, 1, head_size)
        cos, sin = (torch.rand(5, 1, head_size // 4, device="cuda") for _ in range(2))
        turned = rpadiag_kernels.rope(q, cos, sin, k=k, layout=layout)
        torch.autograd.grad(turned, (q, k), tuple(torch.ones_like(t) for t in turned))


def main() -> None:
    torch.manual_seed(0)
    regions = {"rmsnorm": rmsnorm, "swiglu": swiglu, "rope": rope, "ulp": ulp}
    for name in sys.argv[1:] or regions:
        regions[name]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
