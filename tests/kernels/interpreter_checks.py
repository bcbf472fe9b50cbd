"""Runs the Triton kernels on the CPU in Triton's interpreter and prints the elements that differ from the references.

    TRITON_INTERPRET=1 PYTHONPATH=kernels:tests/kernels:. python tests/kernels/interpreter_checks.py swiglu ulp

A separate process, because the interpreter is chosen when the kernels are imported. The interpreter adds rows and takes
exponentials as numpy does: rows whose rstd differs are left out, and SwiGLU rounds its silu to 16 bits.
"""

from __future__ import annotations

import json
import sys

import torch
from kernel_data import DTYPES, angles, num_mismatches, pairs, values
from rpadiag_kernels import reduction
from rpadiag_kernels.axes import encode

EPS = 1e-6
RMSNORM = (
    {},
    {"sum": "fp32", "variance": "unrounded", "scale": "fp32", "dn": "fp32", "dw": "fp32", "dsum": "fp32"},
    {"store": "truncate", "rstd": "lp", "weight": "1+w", "scale": "fp32", "order": "x*(r*w)", "dw": "lp-xhat"},
    {"weight": "lp(1+w)", "root": "1/sqrt", "mean": "sum*(1/n)", "variance": "unrounded"},
)
ROPE = (
    {},
    {"products": "fp32", "cache": "fp32", "fma": "cs", "grad_products": "fp32"},
    {"products": "lp-fma", "fused": "sc", "layout": "interleaved", "store": "truncate", "grad_products": "lp-fma"},
)
SWIGLU = ({}, {"sigmoid": "lp", "dact": "fp32"}, {"formula": "x*(1/(1+e))", "store": "truncate"})


def rmsnorm() -> list[int]:
    from rpadiag_kernels.gpu import rmsnorm as gpu
    from rpadiag_kernels.rmsnorm import reference_backward, reference_forward

    # 5 programs of 8 rows: each takes rows twice, the last of them a rest, and the 40 partials are more than stage two adds at once
    reduction.WARPS_IN_FLIGHT, reduction.MIN_PROGRAMS = 0, 5
    found = []
    for i, axes in enumerate(RMSNORM):
        codes, dtype = encode("rmsnorm", axes), DTYPES[i % 2]
        x, r, dy, ds = (values(75, 72, dtype=dtype, seed=s, spread=1) for s in range(4))
        w = values(72, dtype=dtype, seed=9, spread=0)
        y, s, rstd = gpu.forward(x, r, w, EPS, codes)
        want_y, want_s, want_rstd = reference_forward(x, r, w, EPS, codes)
        same = rstd == want_rstd
        found += [num_mismatches(y[same], want_y[same]), num_mismatches(s, want_s), int(not same.any())]
        row_sum = lambda t: torch.from_numpy(t.numpy().sum(-1, keepdims=True))  # noqa: E731
        dx, dw = gpu.backward(dy, ds, x, r, w, rstd, codes, True)
        want_dx, want_dw = reference_backward(
            dy, ds, x, r, w, rstd, codes, row_sum=row_sum, column_sum=reduction.column_sum
        )
        close = (dx.float() - want_dx.float()).abs() <= 0.02 * want_dx.float().abs() + 1e-6
        found += [int((~close).sum()), num_mismatches(dw, want_dw)]
    return found


def swiglu() -> list[int]:
    from rpadiag_kernels.gpu import swiglu as gpu
    from rpadiag_kernels.swiglu import reference_backward, reference_forward

    found = []
    for i, axes in enumerate(SWIGLU):
        codes, dtype = encode("swiglu", axes), DTYPES[i % 2]
        gate, up = values(7, 66, dtype=dtype, seed=1, spread=0.5).chunk(2, dim=-1)
        dy = values(7, 33, dtype=dtype, seed=2, spread=0)
        got = (gpu.forward(gate, up, codes), *gpu.backward(dy, gate, up, codes))
        want = (reference_forward(gate, up, codes), *reference_backward(dy, gate, up, codes))
        found += [num_mismatches(a, b) for a, b in zip(got, want, strict=True)]
    return found


def rope() -> list[int]:
    from rpadiag_kernels.gpu import rope as gpu
    from rpadiag_kernels.rope import reference

    found = []
    cos, sin = angles(1, 2, 20)
    for i, axes in enumerate(ROPE):
        codes, dtype = encode("rope", axes), DTYPES[i % 2]
        q, k = (values(1, 2, heads, 44, dtype=dtype, seed=heads) for heads in (3, 1))
        for backward in (False, True):
            outputs = torch.empty_like(q), torch.empty_like(k)
            gpu.rotate(q, k, cos, sin, *outputs, codes, backward=backward)
            found += [
                num_mismatches(out, reference(x, cos[:, :, None], sin[:, :, None], codes, backward=backward))
                for x, out in zip((q, k), outputs, strict=True)
            ]
    return found


def ulp() -> list[int]:
    from rpadiag_kernels.gpu import ulp as gpu
    from rpadiag_kernels.ulp import reference

    found = []
    gpu.STEPS, gpu.NUM_PROGRAMS = 1, 2  # the pairs make more groups than programs, and a rest
    cases = (
        (torch.bfloat16, "noise"),
        (torch.bfloat16, "patterns"),
        (torch.float16, "noise"),
        (torch.float32, "zeros"),
    )
    for dtype, kind in cases:
        a, b = pairs(3333, kind=kind, dtype=dtype)
        counts, sums = gpu.ulp_counts(a, b)
        want_counts, want_sums = reference(a, b)
        found += [int((counts != want_counts).sum()), int(((sums - want_sums).abs() > 1e-5 * want_sums.abs()).sum())]
    return found


if __name__ == "__main__":
    checks = {"rmsnorm": rmsnorm, "swiglu": swiglu, "rope": rope, "ulp": ulp}
    print(json.dumps({name: checks[name]() for name in sys.argv[1:]}))
