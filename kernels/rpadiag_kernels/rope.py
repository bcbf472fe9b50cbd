"""Rotary position embedding of queries and keys. Shape legend: B batch, T tokens, H heads, D head size, R rotary size.

Forward, per pair (x1, x2) and its angle's (c, s), all arithmetic in float32 (``lp`` is the dtype of q; axis cache=lp rounds
cos and sin to it first)::

    o1 = x1*c + (-x2)*s,  o2 = x2*c + x1*s
    products=fp32     store(a*c + b*s), with fma(a, c, b*s) or fma(b, s, a*c) where axis fma says c or s
    products=lp       store(lp(a*c) + lp(b*s))
    products=lp-fma   a*c + lp(b*s) rounded once, by store, or b*s + lp(a*c), where axis fused says c or s

Backward: d1 = g1*c + g2*s, d2 = g2*c + (-g1)*s by grad_products and grad_fused, to nearest. Columns from R on are copied.
The rounding points are those of ``rpadiag.regions.rope``; a test holds the two together. On CUDA the Triton kernel
of ``gpu/rope.py`` gives the bits of these references; on the CPU the references run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpadiag_kernels.axes import contract, from_string, lp_code
from rpadiag_kernels.operators import operator
from rpadiag_kernels.rounding import fma, fma_lp, store, to_lp

MAX_HEAD_SIZE = 512
FUSED_CODES = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2))  # of axis values --, cc, cs, sc, ss: no fma, with c, with s


def rope(q: Tensor, cos: Tensor, sin: Tensor, *, k: Tensor | None = None, **axes: str) -> Any:
    """``q`` turned, or (``q``, ``k``) turned by one kernel when ``k`` is given. The strides of dense inputs are kept.

    q, k: up to four axes, the last of D columns, equal but for one axis (heads). cos, sin: float32 or the dtype of q;
    they broadcast against q [..., R/2], and have size 1 on the heads axis when k is given: [T, 1, R/2] for q
    [T, H, D], [B, 1, T, R/2] for [B, H, T, D]. No gradient flows to cos and sin. axes: ``axes.AXES["rope"]``.
    Errors: TypeError for other dtypes; ValueError for shapes, devices, axes, or D > 512.
    """
    codes, carried = contract("rope", axes)
    if (codes["products"] == 2) != (codes["fused"] != 0):
        raise ValueError("rope: products=lp-fma needs fused=cc, cs, sc or ss; other products need fused=--")
    _check(q, k, cos, sin, codes)
    heads = _heads_axis(q, k, cos)
    if heads is None:  # every row has its own angle
        rows = [t.expand(*q.shape[:-1], t.shape[-1]).reshape(-1, 1, t.shape[-1]) for t in (q, cos, sin)]
        return rope(*rows, **axes).reshape(q.shape)
    missing = (None,) * (q.dim() - cos.dim())
    rest = q.shape[:heads] + q.shape[heads + 1 : -1]
    tables = [t[missing].select(heads, 0).expand(*rest, t.shape[-1]) for t in (cos, sin)]
    turned_q, turned_k = _op(q, k, *tables, heads, carried)
    return turned_q if k is None else (turned_q, turned_k)


def _check(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, codes: dict[str, int]) -> None:
    lp_code(q, "rope")
    if not 2 <= q.dim() <= 4 or q.shape[-1] > MAX_HEAD_SIZE:
        raise ValueError(
            f"rope takes two to four axes and head sizes up to {MAX_HEAD_SIZE}, not shape {tuple(q.shape)}"
        )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"rope: cos is {tuple(cos.shape)} {cos.dtype}, sin is {tuple(sin.shape)} {sin.dtype}")
    if cos.dim() == 0 or cos.shape[-1] == 0 or 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(f"rope: tables of shape {tuple(cos.shape)} do not fit a head size of {q.shape[-1]}")
    if cos.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"rope: tables are {cos.dtype}; they must be {q.dtype} like q, or float32")
    if codes["cache"] == 1 and cos.dtype != torch.float32:
        raise ValueError(f"rope: cache=fp32 needs float32 tables, not {cos.dtype}: a rounded table cannot be undone")
    devices = {t.device for t in (q, k, cos, sin) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"rope: tensors on {', '.join(sorted(map(str, devices)))}; they must share a device")
    if k is not None and (k.dim() != q.dim() or k.dtype != q.dtype or k.shape[-1] != q.shape[-1]):
        raise ValueError(f"rope: q is {tuple(q.shape)} {q.dtype}, k is {tuple(k.shape)} {k.dtype}")


def _heads_axis(q: Tensor, k: Tensor | None, cos: Tensor) -> int | None:
    """The axis along which rows share their angles; None when there is none."""
    sizes = (1,) * (q.dim() - cos.dim()) + tuple(cos.shape)
    shared = [i for i in range(q.dim() - 1) if sizes[i] == 1]
    if k is None:
        return _closest(q, shared)
    differing = [i for i in range(q.dim() - 1) if q.shape[i] != k.shape[i]]
    if len(differing) > 1 or any(i not in shared for i in differing):
        raise ValueError(
            f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} may differ on one axis only, where the tables have size 1"
        )
    if not (differing or shared):
        raise ValueError("rope: q and k together need tables of size 1 on the heads axis")
    return differing[0] if differing else _closest(q, shared)


def _closest(q: Tensor, axes: list[int]) -> int | None:
    """The axis whose rows lie closest together, those of size 1 last. Plain loops, which torch.compile can follow."""
    best = None
    for i in axes:
        if best is None or (q.shape[i] > 1 and (q.shape[best] == 1 or q.stride(i) < q.stride(best))):
            best = i
    return best


def _pair(
    a: Tensor, c: Tensor, b: Tensor, s: Tensor, lp: torch.dtype, products: int, fused: int, toward_zero: bool
) -> Tensor:
    if products == 0:
        return store(to_lp(a * c, lp) + to_lp(b * s, lp), lp, toward_zero=toward_zero)
    if products == 2:
        a, c, b, s = (a, c, b, s) if fused == 1 else (b, s, a, c)
        return fma_lp(a, c, to_lp(b * s, lp), lp, toward_zero=toward_zero)
    if fused == 0:
        return store(a * c + b * s, lp, toward_zero=toward_zero)
    a, c, b, s = (a, c, b, s) if fused == 1 else (b, s, a, c)
    return store(fma(a, c, b * s), lp, toward_zero=toward_zero)


def products_of(codes: dict[str, int], *, backward: bool) -> tuple[int, tuple[int, int]]:
    """(products code, fma of the two outputs) of a direction."""
    if backward:
        products = codes["grad_products"]
        return products, FUSED_CODES[codes["grad_fused"] + 1] if products == 2 else FUSED_CODES[0]
    products = codes["products"]
    return products, FUSED_CODES[codes["fused"] if products == 2 else codes["fma"]]


def reference(x: Tensor, cos: Tensor, sin: Tensor, codes: dict[str, int], *, backward: bool = False) -> Tensor:
    """``x`` [..., D] turned, or a gradient turned back; cos, sin broadcast against [..., R/2]."""
    lp, half = x.dtype, cos.shape[-1]
    c, s = cos.float(), sin.float()
    if codes["cache"] == 0:
        c, s = to_lp(c, lp), to_lp(s, lp)
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    neox = codes["layout"] == 0
    x1, x2 = (turned[..., :half], turned[..., half:]) if neox else (turned[..., 0::2], turned[..., 1::2])
    products, (fused_1, fused_2) = products_of(codes, backward=backward)
    toward_zero = codes["store"] == 1 and not backward
    o1 = _pair(x1, c, x2 if backward else -x2, s, lp, products, fused_1, toward_zero)
    o2 = _pair(x2, c, -x1 if backward else x1, s, lp, products, fused_2, toward_zero)
    return torch.cat((o1, o2, rest) if neox else (torch.stack((o1, o2), dim=-1).flatten(-2), rest), dim=-1)


def _outputs(q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results to fill: dense strides are kept. Without k, an empty second one."""
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


def _on_cpu(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str, backward: bool
) -> tuple[Tensor, Tensor]:
    codes = from_string(contract)
    c, s = cos.unsqueeze(heads), sin.unsqueeze(heads)
    q_out, k_out = _outputs(q, k)
    q_out.copy_(reference(q, c, s, codes, backward=backward))
    if k is not None:
        k_out.copy_(reference(k, c, s, codes, backward=backward))
    return q_out, k_out


def _on_cuda(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str, backward: bool
) -> tuple[Tensor, Tensor]:
    from rpadiag_kernels.gpu import rope as gpu

    q_out, k_out = _outputs(q, k)
    rows = [None if t is None else t.movedim(heads, -2) for t in (q, k, q_out, k_out if k is not None else None)]
    missing = 4 - rows[0].dim()  # type: ignore[union-attr]
    rows = [None if t is None else t[(None,) * missing] for t in rows]
    tables = [t[(None,) * missing] for t in (cos, sin)]
    q_in, k_in, q_to, k_to = rows
    assert q_in is not None and q_to is not None
    gpu.rotate(q_in, k_in, *tables, q_to, k_to, from_string(contract), backward=backward)
    return q_out, k_out


@operator("rpadiag::rope")
def _op(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str) -> tuple[Tensor, Tensor]:
    """(q turned, k turned or [0]); cos and sin have the leading axes of q without axis ``heads``, then R/2."""
    return _on_cpu(q, k, cos, sin, heads, contract, False)


@_op.register_kernel("cuda")
def _(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str) -> tuple[Tensor, Tensor]:
    return _on_cuda(q, k, cos, sin, heads, contract, False)


@_op.register_fake
def _(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str) -> tuple[Tensor, Tensor]:
    return _outputs(q, k)


@operator("rpadiag::rope_backward")
def _backward_op(
    dq: Tensor, dk: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str
) -> tuple[Tensor, Tensor]:
    """Gradients turned back, as :func:`_op`."""
    return _on_cpu(dq, dk, cos, sin, heads, contract, True)


@_backward_op.register_kernel("cuda")
def _(dq: Tensor, dk: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str) -> tuple[Tensor, Tensor]:
    return _on_cuda(dq, dk, cos, sin, heads, contract, True)


@_backward_op.register_fake
def _(dq: Tensor, dk: Tensor | None, cos: Tensor, sin: Tensor, heads: int, contract: str) -> tuple[Tensor, Tensor]:
    return _outputs(dq, dk)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, k, cos, sin, ctx.heads, ctx.contract = inputs
    ctx.has_k = k is not None
    ctx.save_for_backward(cos, sin)


def _autograd(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dq, dk = _backward_op(dq, dk if ctx.has_k else None, cos, sin, ctx.heads, ctx.contract)
    return dq, dk if ctx.has_k else None, None, None, None, None


_op.register_autograd(_autograd, setup_context=_setup_context)
