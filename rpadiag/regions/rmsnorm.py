"""RMSNorm and the residual add in front of it. Shape legend: [..., H], H columns; weight [H]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rpadiag.contracts import RmsNormContract
from rpadiag.errors import InputError
from rpadiag.regions.presets import known_contracts
from rpadiag.regions.rounding import LP_DTYPES, store, to_lp

# --- sites spanned -------------------------------------------------------------------------------------------------

SITES = ("input_norm", "resid_attn", "post_norm", "resid_mlp", "final_norm")

# --- known contracts -----------------------------------------------------------------------------------------------

KNOWN = known_contracts("rmsnorm")

# --- reference -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Intermediates:
    """float32 values inside the norm. source: what is scaled; squared: what is squared; rstd: [..., 1] unrounded;
    scaled_by: rstd as the product reads it; stored: the residual stream after the add, lp."""

    source: Tensor
    squared: Tensor
    rstd: Tensor
    scaled_by: Tensor
    stored: Tensor


def reference(
    x: Tensor, weight: Tensor | None, *, eps: float, contract: RmsNormContract, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``y``, or ``(y, new_residual)`` with a residual. x, residual, y: [..., H] of one dtype; weight: [H], None when
    the contract's weight is ``none``.

    Rounding points as in :class:`RmsNormContract`; all else in float32 with IEEE operations and no fused multiply-add.
    Not differentiable: see :func:`aligned`. Errors: InputError for shapes, dtypes or devices that do not fit.
    """
    check_inputs(x, weight, residual, contract)
    inner = intermediates(x, residual, eps, contract)
    y = store(unrounded_output(inner, weight, x.dtype, contract), x.dtype, contract.store)
    return y if residual is None else (y, inner.stored)


def intermediates(x: Tensor, residual: Tensor | None, eps: float, contract: RmsNormContract) -> Intermediates:
    """The values that forward and backward share."""
    lp = x.dtype
    if residual is None:
        stored, source = x, x.to(torch.float32)
        squared = source
    else:
        total = x.to(torch.float32) + residual.to(torch.float32)
        stored = store(total, lp, contract.store)
        rounded = stored.to(torch.float32)
        source = rounded if contract.sum == "lp" else total
        squared = rounded if contract.variance == "rounded" else total
    rstd = _inverse_root(_mean_square(squared, contract, fused=residual is not None) + eps, contract.root)
    scaled_by = to_lp(rstd, lp) if contract.rstd == "lp" else rstd
    return Intermediates(source=source, squared=squared, rstd=rstd, scaled_by=scaled_by, stored=stored)


def _mean_square(squared: Tensor, contract: RmsNormContract, *, fused: bool) -> Tensor:
    """Row mean of squares, [..., 1]. sum/n equals torch.mean on the CPU, sum*(1/n) equals it on CUDA."""
    num_columns = squared.shape[-1]
    squares = squared.pow(2)
    if contract.reduction == "lanes8":
        total = _lane_sum(squares, lanes=8)
    elif contract.reduction == "warps8":
        total = _warp_sum(squares, pairs=fused)
    else:
        total = squares.sum(-1, keepdim=True)
    if contract.mean == "sum/n":
        # a tensor on the same device: CUDA divides by a Python number as a product with its reciprocal
        return total / _scalar(num_columns, total)
    return total * _scalar(1.0 / num_columns, total)


def _scalar(value: float, like: Tensor) -> Tensor:
    """``value`` as a float32 tensor without dimensions, filled on the device: a copy from the host would wait for the GPU."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _lane_sum(x: Tensor, *, lanes: int) -> Tensor:
    """Running sums over columns i mod ``lanes``, then the sums one after another; short rows are padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % lanes))
    running = padded[..., :lanes]
    for start in range(lanes, padded.shape[-1], lanes):
        running = running + padded[..., start : start + lanes]
    total = running[..., :1]
    for lane in range(1, lanes):
        total = total + running[..., lane : lane + 1]
    return total


def _warp_sum(x: Tensor, *, pairs: bool) -> Tensor:
    """[..., 1]: vectors of 8 columns dealt to a block's threads in turn, a tree of neighbours in each warp, warps in order.

    A thread adds all its columns one after another; with ``pairs`` each vector in pairs, and then the vectors. The block
    has 1024 threads below 256 rows and 256 from there on.
    """
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    vectors = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    if pairs:
        vectors = _running_sum(vectors[..., 0::2] + vectors[..., 1::2])
    threads = min(-(-vectors.shape[-2] // 32) * 32, 1024 if rows < 256 else 256)
    turns = torch.nn.functional.pad(vectors, (0, 0, 0, -vectors.shape[-2] % threads)).unflatten(-2, (-1, threads))
    warps = _running_sum(turns.transpose(-3, -2).flatten(-2)).squeeze(-1).unflatten(-1, (-1, 32))
    while warps.shape[-1] > 1:
        warps = warps[..., 0::2] + warps[..., 1::2]
    return _running_sum(warps.squeeze(-1))


def _running_sum(x: Tensor) -> Tensor:
    """Sum over the last axis from the first element to the last, kept with size 1."""
    total, *rest = x.split(1, dim=-1)
    for part in rest:
        total = total + part
    return total


def _inverse_root(x: Tensor, root: str) -> Tensor:
    """rsqrt of the backend (on the CPU the same as 1/sqrt), or the quotient of 1 and the correctly rounded root.

    The root is taken in float64: torch.sqrt on CPUs is off by an ULP in a fifth of the cases.
    """
    return torch.rsqrt(x) if root == "rsqrt" else 1.0 / x.to(torch.float64).sqrt().to(torch.float32)


def weight_factor(weight: Tensor | None, lp: torch.dtype, contract: RmsNormContract) -> Tensor | None:
    """What multiplies the normalised value, float32 [H]."""
    if weight is None:
        return None
    if contract.weight == "w":
        return weight.to(torch.float32)
    factor = 1.0 + weight.to(torch.float32)
    return to_lp(factor, lp) if contract.weight == "lp(1+w)" else factor


def unrounded_output(inner: Intermediates, weight: Tensor | None, lp: torch.dtype, contract: RmsNormContract) -> Tensor:
    """The float32 value that is stored as y."""
    factor = weight_factor(weight, lp, contract)
    source, rstd = inner.source, inner.scaled_by
    if contract.scale == "lp":
        normed = to_lp(source * rstd, lp)
        return normed if factor is None else normed * factor
    if factor is None:
        return source * rstd
    if contract.order == "(x*r)*w":
        return (source * rstd) * factor
    if contract.order == "x*(r*w)":
        return source * (rstd * factor)
    return (source * factor) * rstd


def reference_backward(
    grad_y: Tensor,
    grad_stored: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    contract: RmsNormContract,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(grad_x, grad_weight)``; the gradient of the residual equals that of x.

    Roundings of the forward pass count as the identity. Per row, in float32 and in this order: ``dn = grad_y * w``
    (rounded to lp when dn=lp), ``dr = sum(dn * source)``, ``dx = dn * rstd + ((-0.5 * dr * rstd^3) / H) * (2 * squared)``.
    ``grad_weight`` sums ``grad_y * xhat`` over rows in float32 and rounds once to the weight's dtype; each term is first
    rounded to lp (dw=lp, with xhat rounded as well where scale=lp), or only xhat is (lp-xhat), or none (fp32).
    These are the operations of autograd on transformers' modules, bit for bit, for the contracts of hf-eager.
    """
    lp = x.dtype
    inner = intermediates(x, residual, eps, contract)
    factor = weight_factor(weight, lp, contract)
    grad = grad_y.to(torch.float32)
    dn = grad if factor is None else grad * factor
    if contract.dn == "lp":
        dn = to_lp(dn, lp)
    dr = (dn * inner.source).sum(-1, keepdim=True)
    dmean = -0.5 * dr * inner.rstd.pow(3)
    dx = dn * inner.scaled_by + (dmean / x.shape[-1]) * (2.0 * inner.squared)
    if grad_stored is None:
        grad_x = dx.to(lp)
    elif contract.dsum == "lp":
        grad_x = dx.to(lp) + grad_stored
    else:
        grad_x = (dx + grad_stored.to(torch.float32)).to(lp)
    grad_weight = None if weight is None else _weight_gradient(grad, inner, weight, lp, contract)
    return grad_x, grad_weight


def _weight_gradient(
    grad: Tensor, inner: Intermediates, weight: Tensor, lp: torch.dtype, contract: RmsNormContract
) -> Tensor:
    xhat = inner.source * inner.scaled_by
    if contract.dw == "lp-xhat" or (contract.dw == "lp" and contract.scale == "lp"):
        xhat = to_lp(xhat, lp)
    terms = grad * xhat
    if contract.dw == "lp":
        terms = terms.to(lp)
    rows = tuple(range(terms.dim() - 1))
    total = terms.sum(rows) if rows else terms
    return total.to(weight.dtype)


def check_inputs(x: Tensor, weight: Tensor | None, residual: Tensor | None, contract: RmsNormContract) -> None:
    """Raise InputError unless the tensors fit together and the contract."""
    if x.dtype not in LP_DTYPES:
        raise InputError(f"rmsnorm takes bfloat16, float16 or float32, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InputError(f"rmsnorm needs at least one column, got shape {tuple(x.shape)}")
    if residual is not None and (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise InputError(
            "rmsnorm: the residual does not fit the input",
            detail=f"x is {describe(x)}, residual is {describe(residual)}",
        )
    if (weight is None) != (contract.weight == "none"):
        raise InputError(
            f"rmsnorm: the contract says weight={contract.weight}, and {'no' if weight is None else 'a'} weight was given"
        )
    if weight is not None and (weight.shape != x.shape[-1:] or weight.device != x.device):
        raise InputError(
            "rmsnorm: the weight does not fit the input", detail=f"x is {describe(x)}, weight is {describe(weight)}"
        )
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        raise InputError(f"rmsnorm: weight is {weight.dtype} and x is {x.dtype}", hint="cast the weight or the input")


def describe(x: Tensor) -> str:
    """Shape, dtype and device for error messages."""
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


# --- aligned -------------------------------------------------------------------------------------------------------


def aligned(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    contract: RmsNormContract,
    residual: Tensor | None = None,
    kernels: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`reference` as a differentiable operation, on the Triton kernels where they are chosen."""
    from rpadiag.regions.ops import RmsNormOperation

    return RmsNormOperation(contract, kernels)(x, weight, residual, eps)
