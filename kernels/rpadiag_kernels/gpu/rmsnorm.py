"""RMSNorm with and without the residual add, in Triton. Shape legend: T tokens, H columns, P partials.

Contract: the formulas, rounding points and dtypes of ``rpadiag_kernels.rmsnorm.reference_forward`` and
``reference_backward``; accumulation in float32 in the order of ``rpadiag_kernels.reduction``; fma never.
One program covers ``Tile.rows`` rows. The backward walks rows in a fixed stride and leaves P partial sums
of the weight gradient, which a second kernel adds in a fixed order: no atomics.
Proof: tests/kernels/test_gpu_bits.py (on a GPU), tests/kernels/test_interpreter.py (on a CPU).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpadiag_kernels import reduction
from rpadiag_kernels.axes import LP_CODES
from rpadiag_kernels.gpu.device import INTERPRETING, on_device, store_lp, to_lp
from rpadiag_kernels.reduction import PAIRED_COLUMNS, Tile

MAX_STAGES = 3  # rows of a backward program in flight, where shared memory has room
NO_DW = 3  # code of the dw axis when no weight gradient is wanted


@triton.jit
def _tile(pointer, rows, cols, stride_row, mask):
    """A float32 tile [ROWS, COLUMNS]; zeros outside the mask."""
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _effective_weight(pointer, cols, H, LP: tl.constexpr, WEIGHT: tl.constexpr, INTERPRET: tl.constexpr):
    """What multiplies the normalised value, float32 [1, COLUMNS]."""
    w = tl.load(pointer + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if WEIGHT == 1:
        w = 1.0 + w
    elif WEIGHT == 2:
        w = to_lp(1.0 + w, LP, INTERPRET)
    return w


@triton.jit
def _forward(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr,
    T, H, x_row, r_row, eps, inv_h,
    LP: tl.constexpr, RESIDUAL: tl.constexpr,
    SUM: tl.constexpr, VARIANCE: tl.constexpr, SCALE: tl.constexpr, WEIGHT: tl.constexpr, RSTD: tl.constexpr,
    STORE: tl.constexpr, ROOT: tl.constexpr, MEAN: tl.constexpr, ORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLUMNS)
    mask = (rows < T)[:, None] & (cols < H)[None, :]
    out = rows[:, None] * H + cols[None, :]
    total = _tile(x_ptr, rows, cols, x_row, mask)
    rounded = total
    if RESIDUAL:
        total = total + _tile(r_ptr, rows, cols, r_row, mask)
        rounded = store_lp(total, LP, STORE == 1, INTERPRET).to(tl.float32)
    if PAIRED and WEIGHT != 3:  # read before the wait for the sum; elsewhere the registers it takes cost more
        w = _effective_weight(w_ptr, cols, H, LP, WEIGHT, INTERPRET)
    squared = rounded if VARIANCE == 0 else total
    scaled = rounded if SUM == 0 else total
    total_sq = tl.sum(squared * squared, axis=1)[:, None]
    if MEAN == 0:
        variance = tl.div_rn(total_sq, tl.full(total_sq.shape, H, tl.float32)) + eps
    else:
        variance = total_sq * inv_h + eps
    if ROOT == 0:
        rstd = tl.rsqrt(variance)
    else:
        rstd = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance))
    tl.store(rstd_ptr + rows[:, None], rstd, mask=(rows < T)[:, None])
    if RSTD == 1:
        rstd = to_lp(rstd, LP, INTERPRET)
    if WEIGHT == 3:
        y = scaled * rstd
        if SCALE == 0:
            y = to_lp(y, LP, INTERPRET)
    else:
        if not PAIRED:
            w = _effective_weight(w_ptr, cols, H, LP, WEIGHT, INTERPRET)
        if SCALE == 0:
            y = to_lp(scaled * rstd, LP, INTERPRET) * w
        elif ORDER == 0:
            y = (scaled * rstd) * w
        elif ORDER == 1:
            y = scaled * (rstd * w)
        else:
            y = (scaled * w) * rstd
    y = store_lp(y, LP, STORE == 1, INTERPRET)
    if RESIDUAL:  # both outputs together: the reads of other programs are interrupted once
        stored = store_lp(rounded if SUM == 0 and VARIANCE == 0 else total, LP, STORE == 1, INTERPRET)
        tl.store(s_ptr + out, stored, mask=mask)
    tl.store(y_ptr + out, y, mask=mask)


@triton.jit
def _backward(
    dy_ptr, ds_ptr, x_ptr, r_ptr, w_ptr, rstd_ptr, dx_ptr, partial_ptr,
    T, H, num_steps, dy_row, ds_row, x_row, r_row,
    LP: tl.constexpr, RESIDUAL: tl.constexpr, HAS_DS: tl.constexpr,
    SUM: tl.constexpr, VARIANCE: tl.constexpr, SCALE: tl.constexpr, WEIGHT: tl.constexpr, RSTD: tl.constexpr,
    STORE: tl.constexpr, DN: tl.constexpr, DW: tl.constexpr, DSUM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLUMNS)
    lane_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    stride = tl.num_programs(0).to(tl.int64) * ROWS
    if WEIGHT != 3:
        w = _effective_weight(w_ptr, cols, H, LP, WEIGHT, INTERPRET)
    if DW != 3:
        dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        rows = lane_rows + stride * step
        mask = (rows < T)[:, None] & (cols < H)[None, :]
        total = _tile(x_ptr, rows, cols, x_row, mask)
        rounded = total
        if RESIDUAL:
            total = total + _tile(r_ptr, rows, cols, r_row, mask)
            rounded = store_lp(total, LP, STORE == 1, INTERPRET).to(tl.float32)
        dy = _tile(dy_ptr, rows, cols, dy_row, mask)
        if HAS_DS:
            ds = _tile(ds_ptr, rows, cols, ds_row, mask)
        rstd = tl.load(rstd_ptr + rows[:, None], mask=(rows < T)[:, None], other=0.0)
        source = rounded if SUM == 0 else total
        squared = rounded if VARIANCE == 0 else total
        scaled_by = to_lp(rstd, LP, INTERPRET) if RSTD == 1 else rstd
        if DW != 3:
            xhat = source * scaled_by
            if DW == 1 or (DW == 0 and SCALE == 0):
                xhat = to_lp(xhat, LP, INTERPRET)
            if DW == 0:
                dw += to_lp(dy * xhat, LP, INTERPRET)
            else:
                dw += dy * xhat
        dn = dy
        if WEIGHT != 3:
            dn = dy * w
            if DN == 0:
                dn = to_lp(dn, LP, INTERPRET)
        dr = tl.sum(dn * source, axis=1)[:, None]
        dmean = (-0.5 * dr) * (rstd * rstd * rstd)
        dx = dn * scaled_by + tl.div_rn(dmean, tl.full(dmean.shape, H, tl.float32)) * (2.0 * squared)
        if HAS_DS:
            if DSUM == 0:
                dx = to_lp(dx, LP, INTERPRET)
            dx = dx + ds
        out = rows[:, None] * H + cols[None, :]
        tl.store(dx_ptr + out, store_lp(dx, LP, False, INTERPRET), mask=mask)
    if DW != 3:
        tl.store(partial_ptr + lane_rows[:, None] * H + cols[None, :], dw, mask=(cols < H)[None, :])


@triton.jit
def _add_partials(
    partial_ptr, dw_ptr, num_partials, H,
    LP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, num_partials, ROWS, num_stages=4):
        offsets = (start + rows).to(tl.int64)[:, None] * H + cols[None, :]
        mask = ((start + rows) < num_partials)[:, None] & (cols < H)[None, :]
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    width: tl.constexpr = ROWS
    total = tl.sum(tl.reshape(total, [2, width // 2, COLUMNS]), axis=0)
    total = tl.sum(tl.reshape(total, [2, width // 4, COLUMNS]), axis=0)
    total = tl.sum(tl.reshape(total, [2, width // 8, COLUMNS]), axis=0)
    total = tl.sum(tl.reshape(total, [2, width // 16, COLUMNS]), axis=0)
    total = tl.sum(total, axis=0)
    tl.store(dw_ptr + cols, store_lp(total, LP, False, INTERPRET), mask=cols < H)


def _row_major(x: Tensor) -> Tensor:
    """``x`` [T, H] as the kernels read it: a copy where rows are not laid out so that a thread reads 16 bytes at once
    whenever H is a multiple of 16, and never otherwise. The order of addition follows from that."""
    num_columns = x.shape[1]
    if num_columns % 16:
        return x.contiguous()
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _stages(x: Tensor, tile: Tile) -> int:
    """Rows in flight: all but one of them wait in shared memory, four tensors each."""
    if not x.is_cuda:
        return 1
    room = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin - 16384
    return max(1, min(MAX_STAGES, 1 + room // (4 * tile.rows * tile.columns * x.element_size())))


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, codes: dict[str, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [T, H], summed residual [T, H] or [0, H], rstd [T]) of ``x`` [T, H] and ``residual`` [T, H], any strides."""
    if codes["reduction"] != 0:
        raise ValueError("rmsnorm: the CUDA kernel adds in its own order (reduction=native) only")
    num_tokens, num_columns = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = torch.empty_like(y) if residual is not None else y.new_empty(0, num_columns)
    rstd = x.new_empty(num_tokens, dtype=torch.float32)
    if num_tokens == 0:
        return y, summed, rstd
    tile = Tile.of(num_columns, forward=True)
    x = _row_major(x)
    r = x if residual is None else _row_major(residual)
    w = x if weight is None else weight.contiguous()
    flags = {
        k.upper(): codes[k] for k in ("sum", "variance", "scale", "weight", "rstd", "store", "root", "mean", "order")
    }
    with on_device(x):
        _forward[(triton.cdiv(num_tokens, tile.rows),)](
            x, r, w, y, summed, rstd,
            num_tokens, num_columns, x.stride(0), r.stride(0), eps, 1.0 / num_columns,
            LP=LP_CODES[x.dtype], RESIDUAL=residual is not None, **flags,
            ROWS=tile.rows, COLUMNS=tile.columns, PAIRED=num_columns == PAIRED_COLUMNS, INTERPRET=INTERPRETING,
            num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y, summed, rstd


def backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None, rstd: Tensor,
    codes: dict[str, int], need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [T, H], dweight [H], or [0] when not needed); the gradient of the residual equals dx."""
    num_tokens, num_columns = x.shape
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = x.new_empty(0)
    if weight is None or not need_dw:
        codes = {**codes, "dw": NO_DW}
    else:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return dx, dw.zero_()
    tile = Tile.of(num_columns)
    partials = reduction.num_partials(num_columns)
    partial = torch.empty(partials if dw.numel() else 0, num_columns, dtype=torch.float32, device=x.device)
    dy, x = _row_major(dy), _row_major(x)
    ds, r = (x if t is None else _row_major(t) for t in (dsummed, residual))
    w = x if weight is None else weight.contiguous()
    flags = {k.upper(): codes[k] for k in ("sum", "variance", "scale", "weight", "rstd", "store", "dn", "dw", "dsum")}
    with on_device(x):
        _backward[(reduction.num_programs(num_columns),)](
            dy, ds, x, r, w, rstd, dx, partial,
            num_tokens, num_columns, triton.cdiv(num_tokens, partials),
            dy.stride(0), ds.stride(0), x.stride(0), r.stride(0),
            LP=LP_CODES[x.dtype], RESIDUAL=residual is not None, HAS_DS=dsummed is not None, **flags,
            ROWS=tile.rows, COLUMNS=tile.columns, STAGES=_stages(x, tile), INTERPRET=INTERPRETING,
            num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if dw.numel():
            _add_partials[(triton.cdiv(num_columns, 32),)](
                partial, dw, partials, num_columns,
                LP=LP_CODES[dw.dtype], ROWS=reduction.STAGE_TWO_ROWS, COLUMNS=32, INTERPRET=INTERPRETING,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return dx, dw
