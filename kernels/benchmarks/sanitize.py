"""Small launches of every kernel, forward and backward, for compute-sanitizer.

PYTHONPATH=kernels compute-sanitizer --tool memcheck python kernels/benchmarks/sanitize.py
PYTHONPATH=kernels compute-sanitizer --tool racecheck python kernels/benchmarks/sanitize.py
"""

from __future__ import annotations

import rpadiag_kernels
import torch


def main() -> None:
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda").bfloat16().requires_grad_()  # noqa: E731
    for num_tokens, num_columns in ((3, 64), (70, 1000), (9, 4096), (5, 16384)):
        x, r, w = make(num_tokens, num_columns), make(num_tokens, num_columns), make(num_columns)
        for axes in ({}, {"sum": "fp32", "variance": "unrounded", "scale": "fp32"}):
            y, s = rpadiag_kernels.rmsnorm(x, w, eps=1e-6, residual=r, **axes)
            torch.autograd.grad((y, s), (x, r, w), (torch.ones_like(y), torch.ones_like(s)))
        gate, up = make(num_tokens, 2 * num_columns).chunk(2, dim=-1)
        out = rpadiag_kernels.swiglu(gate, up)
        torch.autograd.grad(out, (gate, up), torch.ones_like(out))
        rpadiag_kernels.ulp_stats(x.detach(), r.detach())
        bad = x.detach().clone()
        bad[0, 0] = float("nan")
        rpadiag_kernels.ulp_stats(bad, r.detach())
    for head_size, heads, layout in ((64, 3, "neox"), (96, 8, "interleaved"), (256, 2, "neox")):
        q, k = make(5, heads, head_size), make(5, 1, head_size)
        cos, sin = (torch.rand(5, 1, head_size // 4, device="cuda") for _ in range(2))
        turned = rpadiag_kernels.rope(q, cos, sin, k=k, layout=layout)
        torch.autograd.grad(turned, (q, k), tuple(torch.ones_like(t) for t in turned))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
