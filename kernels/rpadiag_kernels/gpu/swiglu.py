"""SwiGLU in Triton, forward and backward. Shape legend: T rows, N columns.

Contract: the formulas, rounding points and dtypes of ``rpadiag_kernels.swiglu.reference_forward`` and
``reference_backward``; elementwise, so no order; divisions rounded to nearest; fma never outside the exponential.
Proof: tests/kernels/test_gpu_bits.py (on a GPU), tests/kernels/test_interpreter.py (on a CPU).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpadiag_kernels.axes import LP_CODES
from rpadiag_kernels.gpu.device import INTERPRETING, exp_negative, on_device, store_lp, to_lp

BLOCK = 2048
WARPS = 4


@triton.jit
def _one_over(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _silu(x, one_plus_e, sig, FORMULA: tl.constexpr, SIGMOID: tl.constexpr):
    """silu in float32; ``sig`` is read only where the formula uses it."""
    if FORMULA != 1 and SIGMOID == 0:
        return tl.div_rn(x, one_plus_e)
    else:
        return x * sig


@triton.jit
def _where(block, N, BLOCK_N: tl.constexpr):
    """Row, columns and mask of the block-th block of a [T, N] array, rows cut into blocks of BLOCK_N columns."""
    per_row = tl.cdiv(N, BLOCK_N)
    row = block // per_row
    cols = (block - row * per_row) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, cols, cols < N


@triton.jit
def _forward(
    gate_ptr, up_ptr, out_ptr, N, gate_row, gate_col, up_row, up_col,
    LP: tl.constexpr, SILU: tl.constexpr, SIGMOID: tl.constexpr, STORE: tl.constexpr, FORMULA: tl.constexpr,
    EXP: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _where(tl.program_id(0).to(tl.int64), N, BLOCK_N)
    x = tl.load(gate_ptr + row * gate_row + cols * gate_col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_row + cols * up_col, mask=mask, other=0.0).to(tl.float32)
    one_plus_e = 1.0 + exp_negative(x, EXP, INTERPRET)
    if FORMULA == 2 and SILU == 1 and SIGMOID == 0:
        out = tl.div_rn(x * u, one_plus_e)
    else:
        sig = x
        if FORMULA == 1 or SIGMOID == 1:
            sig = _one_over(one_plus_e)
        if SIGMOID == 1:
            sig = to_lp(sig, LP, INTERPRET)
        silu = _silu(x, one_plus_e, sig, FORMULA, SIGMOID)
        if SILU == 0:
            silu = to_lp(silu, LP, INTERPRET)
        out = silu * u
    tl.store(out_ptr + row * N + cols, store_lp(out, LP, STORE == 1, INTERPRET), mask=mask)


@triton.jit
def _backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, N, dy_row, dy_col, gate_row, gate_col, up_row, up_col,
    LP: tl.constexpr, SIGMOID: tl.constexpr, FORMULA: tl.constexpr, EXP: tl.constexpr,
    DACT: tl.constexpr, GRAD_SILU: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _where(tl.program_id(0).to(tl.int64), N, BLOCK_N)
    dy = tl.load(dy_ptr + row * dy_row + cols * dy_col, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate_ptr + row * gate_row + cols * gate_col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_row + cols * up_col, mask=mask, other=0.0).to(tl.float32)
    one_plus_e = 1.0 + exp_negative(x, EXP, INTERPRET)
    sig = _one_over(one_plus_e)
    rounded_sig = to_lp(sig, LP, INTERPRET) if SIGMOID == 1 else sig
    silu = _silu(x, one_plus_e, rounded_sig, FORMULA, SIGMOID)
    if GRAD_SILU == 0:
        silu = to_lp(silu, LP, INTERPRET)
    dact = dy * u
    if DACT == 0:
        dact = to_lp(dact, LP, INTERPRET)
    dgate = (dact * sig) * (1.0 + x * (1.0 - sig))
    offsets = row * N + cols
    tl.store(dup_ptr + offsets, store_lp(dy * silu, LP, False, INTERPRET), mask=mask)
    tl.store(dgate_ptr + offsets, store_lp(dgate, LP, False, INTERPRET), mask=mask)


def _rows(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """The tensors as [T, N] views, and T and I: one long row when all are contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors], 1, tensors[0].numel()
    num_columns = tensors[0].shape[-1]
    return [t.reshape(-1, num_columns) for t in tensors], tensors[0].numel() // num_columns, num_columns


def forward(gate: Tensor, up: Tensor, codes: dict[str, int]) -> Tensor:
    """``out`` (contiguous) of ``gate`` and ``up`` of one shape, any strides."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    (g, u), num_rows, num_columns = _rows(gate, up)
    flags = {k.upper(): codes[k] for k in ("silu", "sigmoid", "store", "formula", "exp")}
    with on_device(gate):
        _forward[(num_rows * triton.cdiv(num_columns, BLOCK),)](
            g, u, out, num_columns, *g.stride(), *u.stride(),
            LP=LP_CODES[gate.dtype], **flags, BLOCK_N=BLOCK, INTERPRET=INTERPRETING,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def backward(dy: Tensor, gate: Tensor, up: Tensor, codes: dict[str, int]) -> tuple[Tensor, Tensor]:
    """(dgate, dup), contiguous."""
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(dgate)
    if dgate.numel() == 0:
        return dgate, dup
    (d, g, u), num_rows, num_columns = _rows(dy, gate, up)
    flags = {k.upper(): codes[k] for k in ("sigmoid", "formula", "exp", "dact", "grad_silu")}
    with on_device(gate):
        _backward[(num_rows * triton.cdiv(num_columns, BLOCK),)](
            d, g, u, dgate, dup, num_columns, *d.stride(), *g.stride(), *u.stride(),
            LP=LP_CODES[gate.dtype], **flags, BLOCK_N=BLOCK, INTERPRET=INTERPRETING,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return dgate, dup
