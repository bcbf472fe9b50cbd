"""Rotary position embedding of queries and keys. Shape legend: T tokens, H heads, D head size, R rotary size <= D."""

from __future__ import annotations

import torch
from torch import Tensor

from rpadiag.contracts import RopeContract
from rpadiag.errors import InputError
from rpadiag.regions.presets import known_contracts
from rpadiag.regions.rounding import LP_DTYPES, fma, fma_before_lp, store, to_lp

# --- sites spanned -------------------------------------------------------------------------------------------------

SITES = ("q_rope", "k_rope")

# --- known contracts -----------------------------------------------------------------------------------------------

KNOWN = known_contracts("rope")

# --- reference -----------------------------------------------------------------------------------------------------


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, contract: RopeContract, rotary_dim: int | None = None) -> Tensor:
    """Rotated ``x`` [T, H, D]; cos, sin [T, R/2], float32 (unrounded) or lp.

    The cache axis is applied here: cache=lp rounds cos and sin to lp. cache=fp32 needs float32 tables, because a
    rounded one cannot be undone. Columns from ``rotary_dim`` on pass through. Not differentiable: see :func:`aligned`.
    Errors: InputError for shapes, dtypes or devices that do not fit.
    """
    if x.dim() != 3:
        raise InputError(f"rope takes x of shape [tokens, heads, head size], got {tuple(x.shape)}")
    if rotary_dim is not None and cos.shape[-1] * 2 != rotary_dim:
        raise InputError(
            f"rope: rotary size {rotary_dim} needs tables of {rotary_dim // 2} columns, got {cos.shape[-1]}"
        )
    return rotate(x, cos[:, None, :], sin[:, None, :], contract=contract)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, contract: RopeContract) -> Tensor:
    """As :func:`reference` for x [..., D] and tables that broadcast against [..., R/2]."""
    check_inputs(x, cos, sin, contract)
    return rotate_values(x, cos, sin, lp=x.dtype, contract=contract)


def rotate_values(x: Tensor, cos: Tensor, sin: Tensor, *, lp: torch.dtype, contract: RopeContract) -> Tensor:
    """:func:`rotate` of values that may be float32 while the output is lp."""
    c, s = tables(cos, sin, lp, contract)
    x1, x2, rest = split(x, c.shape[-1], contract.layout)
    fused = fused_products(contract)
    o1 = store(sum_of_products(x1, c, -x2, s, lp, contract.products, fused[0]), lp, contract.store)
    o2 = store(sum_of_products(x2, c, x1, s, lp, contract.products, fused[1]), lp, contract.store)
    return join(o1, o2, store(rest.to(torch.float32), lp, contract.store), contract.layout)


def rotate_backward(
    grad: Tensor, cos: Tensor, sin: Tensor, *, contract: RopeContract, out: torch.dtype | None = None
) -> Tensor:
    """Gradient of :func:`rotate` with respect to x: the rotation by the negative angle, rounded to nearest as
    grad_products says, in dtype ``out`` (that of ``grad`` by default). For products=lp these are the operations of
    autograd on transformers' function."""
    lp = grad.dtype if out is None else out
    c, s = tables(cos, sin, grad.dtype, contract)
    g1, g2, rest = split(grad, c.shape[-1], contract.layout)
    fused = contract.grad_fused if contract.grad_products == "lp-fma" else "--"
    d1 = sum_of_products(g1, c, g2, s, lp, contract.grad_products, fused[0]).to(lp)
    d2 = sum_of_products(g2, c, -g1, s, lp, contract.grad_products, fused[1]).to(lp)
    return join(d1, d2, rest.to(lp), contract.layout)


def tables(cos: Tensor, sin: Tensor, lp: torch.dtype, contract: RopeContract) -> tuple[Tensor, Tensor]:
    """float32 tables under the cache axis."""
    c, s = cos.to(torch.float32), sin.to(torch.float32)
    return (to_lp(c, lp), to_lp(s, lp)) if contract.cache == "lp" else (c, s)


def fused_products(contract: RopeContract) -> str:
    """The product of each output that is not rounded before the sum."""
    return contract.fused if contract.products == "lp-fma" else contract.fma


def sum_of_products(a: Tensor, c: Tensor, b: Tensor, s: Tensor, lp: torch.dtype, products: str, fused: str) -> Tensor:
    """The float32 value of ``a*c + b*s`` that is stored; ``fused`` names the product that is not rounded first."""
    if products == "lp":
        return to_lp(a * c, lp) + to_lp(b * s, lp)
    if products == "lp-fma":
        return fma_before_lp(a, c, to_lp(b * s, lp), lp) if fused == "c" else fma_before_lp(b, s, to_lp(a * c, lp), lp)
    if fused == "c":
        return fma(a, c, b * s)
    if fused == "s":
        return fma(b, s, a * c)
    return a * c + b * s


def split(x: Tensor, half: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """float32 first and second members of each pair, and the lp columns that pass through."""
    turned = x[..., : 2 * half].to(torch.float32)
    rest = x[..., 2 * half :]
    if layout == "neox":
        return turned[..., :half], turned[..., half:], rest
    return turned[..., 0::2], turned[..., 1::2], rest


def join(o1: Tensor, o2: Tensor, rest: Tensor, layout: str) -> Tensor:
    if layout == "neox":
        return torch.cat((o1, o2, rest), dim=-1)
    return torch.cat((torch.stack((o1, o2), dim=-1).flatten(-2), rest), dim=-1)


def check_inputs(x: Tensor, cos: Tensor, sin: Tensor, contract: RopeContract) -> None:
    """Raise InputError unless the tensors fit together and the contract."""
    if x.dtype not in LP_DTYPES:
        raise InputError(f"rope takes bfloat16, float16 or float32, not {x.dtype}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise InputError(f"rope: cos is {tuple(cos.shape)} {cos.dtype}, sin is {tuple(sin.shape)} {sin.dtype}")
    if x.device != cos.device:
        raise InputError(f"rope: x is on {x.device}, the tables are on {cos.device}")
    if cos.shape[-1] == 0 or 2 * cos.shape[-1] > x.shape[-1]:
        raise InputError(f"rope: tables of {cos.shape[-1]} columns do not fit a head size of {x.shape[-1]}")
    if cos.dtype not in (x.dtype, torch.float32):
        raise InputError(f"rope: tables are {cos.dtype} and x is {x.dtype}")
    if contract.cache == "fp32" and cos.dtype != torch.float32:
        raise InputError(
            f"rope: the contract says cache=fp32 and the tables are {cos.dtype}",
            hint="pass cos and sin as computed, before they are cast",
        )


# --- aligned -------------------------------------------------------------------------------------------------------


def aligned(x: Tensor, cos: Tensor, sin: Tensor, *, contract: RopeContract, kernels: str = "auto") -> Tensor:
    """:func:`rotate` as a differentiable operation, on the Triton kernels where they are chosen."""
    from rpadiag.regions.ops import RopeOperation

    return RopeOperation(contract, kernels)(x, cos, sin)
