"""RMSNorm, alone or fused with the residual add that feeds it. Shape legend: T tokens, H columns.

Forward, all arithmetic in float32 (``lp`` is the dtype of x; ``lp(.)`` rounds to nearest even)::

    s    = x + r; new residual = store(s)                       r absent: s = x
    rstd = root(mean(square(stored or s)) + eps)                axes variance, mean, reduction, root
    y    = store(w * (lp(source * rstd) or unrounded)), source = stored or s     axes sum, rstd, scale, weight, order

Backward of an incoming dy and, with a residual, ds::

    dn = lp(dy * w) or dy * w                                   axis dn
    dx = dn * rstd + ((-0.5 * sum(dn * source)) * rstd^3 / H) * (2 * squared)
    dx = lp(lp(dx) + ds) or lp(dx + ds)                         axis dsum
    dw = sum over tokens of lp(dy * xhat), dy * lp(xhat) or dy * xhat            axis dw; xhat = source * rstd

Roundings have gradient one. The rounding points are those of ``rpadiag.regions.rmsnorm``; a test holds the two
together. On CUDA the Triton kernels of ``gpu/rmsnorm.py`` give the bits of these references with the sums of
``reduction.py``; on the CPU the references run with PyTorch's sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpadiag_kernels.axes import check_same, contract, from_string, lp_code
from rpadiag_kernels.operators import operator
from rpadiag_kernels.reduction import MAX_COLUMNS
from rpadiag_kernels.rounding import store, to_lp

Sum = Callable[[Tensor], Tensor]


def rmsnorm(
    x: Tensor, weight: Tensor | None, /, *, eps: float, residual: Tensor | None = None, **axes: str
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalised ``x`` [..., H], or (normalised, new residual) when ``residual`` [..., H] is given.

    weight: [H] in the dtype of x or float32, or None. axes: as in ``axes.AXES["rmsnorm"]``.
    Errors: TypeError for other dtypes; ValueError for shapes, devices, axes or H > 16384.
    """
    if weight is None:
        axes.setdefault("weight", "none")
    codes, carried = contract("rmsnorm", axes)
    _check(x, weight, residual, codes)
    y, summed, _ = _op(x, residual, weight, float(eps), carried)
    return y if residual is None else (y, summed)


def _check(x: Tensor, weight: Tensor | None, residual: Tensor | None, codes: dict[str, int]) -> None:
    lp_code(x, "rmsnorm")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_COLUMNS:
        raise ValueError(f"rmsnorm takes 1 to {MAX_COLUMNS} columns, not a tensor of shape {tuple(x.shape)}")
    if residual is not None:
        check_same("rmsnorm", x=x, residual=residual)
    if (weight is None) != (codes["weight"] == 3):
        raise ValueError("rmsnorm: axis weight=none and a weight tensor exclude each other")
    if weight is not None:
        if weight.shape != x.shape[-1:] or weight.device != x.device:
            raise ValueError(
                f"rmsnorm: weight has shape {tuple(weight.shape)} on {weight.device} for x of shape {tuple(x.shape)} on {x.device}"
            )
        if weight.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"rmsnorm: weight is {weight.dtype}; it must be {x.dtype} like x, or float32")


def torch_sum(x: Tensor) -> Tensor:
    """Row sums [T, 1] in PyTorch's order."""
    return x.sum(-1, keepdim=True)


def _divide(x: Tensor, n: int) -> Tensor:
    """x / n, rounded to nearest; by a tensor, as dividing by a number on CUDA multiplies with its reciprocal."""
    return x / torch.full_like(x, n)


def lane_sum(x: Tensor) -> Tensor:
    """Row sums [T, 1]: eight running sums over columns i mod 8, then one after another (reduction=lanes8)."""
    total, *rest = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).split(8, dim=-1)
    for part in rest:
        total = total + part
    return _in_order(total)


def warp_sum(x: Tensor, *, fused: bool) -> Tensor:
    """Row sums [T, 1] as vLLM's CUDA norms add (reduction=warps8): threads take vectors of 8 columns in turn. A thread adds
    all its columns one after another, or, ``fused`` with the residual add, each vector in pairs and then the vectors;
    neighbours of a warp in a tree; warps one after another. A block has 1024 threads for fewer than 256 rows, else 256, and
    no more warps than there are vectors."""
    vectors = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).reshape(x.shape[0], -1, 8)
    if fused:
        vectors = _in_order(vectors[:, :, 0::2] + vectors[:, :, 1::2])
    threads = min(-(-vectors.shape[1] // 32) * 32, 1024 if x.shape[0] < 256 else 256)
    turns = torch.nn.functional.pad(vectors, (0, 0, 0, -vectors.shape[1] % threads))
    of_thread = turns.reshape(x.shape[0], -1, threads, vectors.shape[2]).transpose(1, 2).flatten(2)
    lanes = _in_order(of_thread).reshape(x.shape[0], -1, 32)
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return _in_order(lanes.squeeze(-1))


def _in_order(x: Tensor) -> Tensor:
    """Sum over the last axis, kept with size 1, from the first element to the last."""
    total, *rest = x.split(1, dim=-1)
    for part in rest:
        total = total + part
    return total


def _sum_of(x: Tensor, row_sum: Sum, codes: dict[str, int], *, fused: bool) -> Tensor:
    if codes["reduction"] == 1:
        return lane_sum(x)
    return warp_sum(x, fused=fused) if codes["reduction"] == 2 else row_sum(x)


def _effective_weight(weight: Tensor, lp: torch.dtype, codes: dict[str, int]) -> Tensor:
    w = weight.float()
    if codes["weight"] == 1:
        return 1.0 + w
    return to_lp(1.0 + w, lp) if codes["weight"] == 2 else w


def _sources(x: Tensor, residual: Tensor | None, codes: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(the stored sum in lp, the sum that is squared, the sum that is scaled)."""
    if residual is None:
        return x, x.float(), x.float()
    total = x.float() + residual.float()
    stored = store(total, x.dtype, toward_zero=codes["store"] == 1)
    rounded = stored.float()
    return stored, rounded if codes["variance"] == 0 else total, rounded if codes["sum"] == 0 else total


def reference_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    codes: dict[str, int],
    row_sum: Sum = torch_sum,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [T, H], new residual [T, H] or [0, H], unrounded rstd [T] float32) of ``x`` [T, H]."""
    lp, num_columns = x.dtype, x.shape[-1]
    stored, squared, source = _sources(x, residual, codes)
    total = _sum_of(squared * squared, row_sum, codes, fused=residual is not None)
    mean = _divide(total, num_columns) if codes["mean"] == 0 else total * (1.0 / num_columns)
    # torch.sqrt on CPUs is not always rounded to nearest; the float64 root, rounded, is.
    rstd = torch.rsqrt(mean + eps) if codes["root"] == 0 else 1.0 / (mean + eps).double().sqrt().float()
    scaled_by = to_lp(rstd, lp) if codes["rstd"] == 1 else rstd
    w = None if weight is None else _effective_weight(weight, lp, codes)
    if codes["scale"] == 0 or w is None or codes["order"] == 0:
        y = source * scaled_by
        y = to_lp(y, lp) if codes["scale"] == 0 else y
        y = y if w is None else y * w
    elif codes["order"] == 1:
        y = source * (scaled_by * w)
    else:
        y = (source * w) * scaled_by
    summed = x.new_empty(0, num_columns) if residual is None else stored
    return store(y, lp, toward_zero=codes["store"] == 1), summed, rstd.reshape(-1)


def reference_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None, rstd: Tensor,
    codes: dict[str, int], row_sum: Sum = torch_sum, column_sum: Sum = lambda terms: terms.sum(0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [T, H], dweight [H] or [0]) of ``dy`` [T, H] and ``dsummed`` [T, H]; the residual's gradient equals dx."""
    lp, num_columns = x.dtype, x.shape[-1]
    _, squared, source = _sources(x, residual, codes)
    rstd = rstd.reshape(-1, 1)
    scaled_by = to_lp(rstd, lp) if codes["rstd"] == 1 else rstd
    dn, dw = dy.float(), x.new_empty(0)
    if weight is not None:
        xhat = source * scaled_by
        if codes["dw"] == 1 or (codes["dw"] == 0 and codes["scale"] == 0):
            xhat = to_lp(xhat, lp)
        terms = dn * xhat
        dw = column_sum(to_lp(terms, lp) if codes["dw"] == 0 else terms).to(weight.dtype)
        dn = dn * _effective_weight(weight, lp, codes)
        dn = to_lp(dn, lp) if codes["dn"] == 0 else dn
    dmean = (-0.5 * row_sum(dn * source)) * (rstd * rstd * rstd)
    dx = dn * scaled_by + _divide(dmean, num_columns) * (2.0 * squared)
    if dsummed is not None:
        dx = (to_lp(dx, lp) if codes["dsum"] == 0 else dx) + dsummed.float()
    return dx.to(lp), dw


def _rows(x: Tensor | None, num_columns: int) -> Tensor | None:
    return None if x is None else x.reshape(-1, num_columns)


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A result in another shape, contiguous, and not as a view: callers may add to it in place."""
    return torch.ops.aten._unsafe_view.default(x.contiguous(), shape)


@operator("rpadiag::rmsnorm")
def _op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, contract: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(y like x, new residual like x or [0], rstd like x without its last axis)."""
    return _run(reference_forward, x, residual, weight, eps, contract)


@_op.register_kernel("cuda")
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, contract: str
) -> tuple[Tensor, Tensor, Tensor]:
    from rpadiag_kernels.gpu import rmsnorm as gpu

    return _run(gpu.forward, x, residual, weight, eps, contract)


def _run(
    forward: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, contract: str
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.shape[-1]
    y, summed, rstd = forward(x.reshape(-1, h), _rows(residual, h), weight, eps, from_string(contract))
    summed = _shaped(summed, (0,) if residual is None else x.shape)
    return _shaped(y, x.shape), summed, _shaped(rstd, x.shape[:-1])


@_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, contract: str
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape)
    return y, x.new_empty(0 if residual is None else x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator("rpadiag::rmsnorm_backward")
def _backward_op(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None, rstd: Tensor,
    contract: str, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx like x, dweight [H] or [0])."""

    def reference(*args: Any) -> tuple[Tensor, Tensor]:
        dx, dw = reference_backward(*args[:-1])
        return dx, dw if need_dw else x.new_empty(0)

    return _run_backward(reference, dy, dsummed, x, residual, weight, rstd, contract, need_dw)


@_backward_op.register_kernel("cuda")
def _(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None, rstd: Tensor,
    contract: str, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from rpadiag_kernels.gpu import rmsnorm as gpu

    return _run_backward(gpu.backward, dy, dsummed, x, residual, weight, rstd, contract, need_dw)


def _run_backward(
    backward: Any, dy: Tensor, dsummed: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None, rstd: Tensor,
    contract: str, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = x.shape[-1]
    dx, dw = backward(
        _rows(dy, h),
        _rows(dsummed, h),
        _rows(x, h),
        _rows(residual, h),
        weight,
        rstd.reshape(-1),
        from_string(contract),
        need_dw,
    )
    return _shaped(dx, x.shape), dw


@_backward_op.register_fake
def _(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor | None, rstd: Tensor,
    contract: str, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dw = weight.new_empty(weight.shape) if weight is not None and need_dw else x.new_empty(0)
    return x.new_empty(x.shape), dw


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, contract = inputs
    _, summed, rstd = output
    codes = from_string(contract)
    ctx.contract, ctx.has_residual = contract, residual is not None
    ctx.set_materialize_grads(False)
    if residual is not None and codes["sum"] == codes["variance"] == 0:
        x, saved_residual = summed, None  # the rounded sum is all the backward needs: one tensor less to keep and read
    else:
        saved_residual = residual
    ctx.save_for_backward(x, saved_residual, weight, rstd)


def _autograd(
    ctx: Any, dy: Tensor | None, dsummed: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    x, residual, weight, rstd = ctx.saved_tensors
    need_x, need_residual, need_w, *_ = ctx.needs_input_grad
    if dy is None:
        dy = torch.zeros_like(x)
    dx, dw = _backward_op(dy, dsummed if ctx.has_residual else None, x, residual, weight, rstd, ctx.contract, need_w)
    return dx if need_x else None, dx if need_residual else None, dw if need_w else None, None, None


_op.register_autograd(_autograd, setup_context=_setup_context)
