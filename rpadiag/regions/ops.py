"""The regions as differentiable PyTorch operators: whole under torch.compile, on the references or the Triton kernels.

An operator of ``torch.library`` is opaque to the compiler, so Inductor cannot drop the roundings inside (it elides
casts to lp and back). They are named ``rpadiag_reference::*``, beside the kernels' ``rpadiag::*``. A contract travels as its key, a JSON string, because operators take plain values only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from typing import Any

import torch
from torch import Tensor

from rpadiag.contracts import Contract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.errors import MissingDependencyError, unknown_name
from rpadiag.regions import qk_norm as qk_norm_region
from rpadiag.regions import rmsnorm as rmsnorm_region
from rpadiag.regions import rope as rope_region
from rpadiag.regions import swiglu as swiglu_region

KERNEL_CHOICES = ("auto", "reference", "triton")


@functools.lru_cache(maxsize=256)
def contract_key(contract: Contract) -> str:
    """The contract as an operator argument."""
    return json.dumps(contract.to_dict(), sort_keys=True)


@functools.lru_cache(maxsize=256)
def _rmsnorm_contract(key: str) -> RmsNormContract:
    return RmsNormContract.from_dict(json.loads(key))


@functools.lru_cache(maxsize=256)
def _rope_contract(key: str) -> RopeContract:
    return RopeContract.from_dict(json.loads(key))


@functools.lru_cache(maxsize=256)
def _swiglu_contract(key: str) -> SwigluContract:
    return SwigluContract.from_dict(json.loads(key))


def _laid_out(value: Tensor, x: Tensor) -> Tensor:
    """``value`` with the strides that ``empty_like(x)`` has, as the fake implementations promise."""
    strides = torch.empty_like(x, device="meta").stride()
    return value if value.stride() == strides else torch.empty_like(x).copy_(value)


# --- rmsnorm -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rpadiag_reference::rmsnorm", mutates_args=())
def rmsnorm_op(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, contract: str
) -> tuple[Tensor, Tensor]:
    """``(y, stored)``; ``stored`` has no elements without a residual."""
    result = rmsnorm_region.reference(x, weight, eps=eps, contract=_rmsnorm_contract(contract), residual=residual)
    if isinstance(result, Tensor):
        return _laid_out(result, x), x.new_empty(0)
    return _laid_out(result[0], x), _laid_out(result[1], x)


@rmsnorm_op.register_fake
def _(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, contract: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if residual is None else torch.empty_like(x)


@torch.library.custom_op("rpadiag_reference::rmsnorm_backward", mutates_args=())
def rmsnorm_backward_op(
    grad_y: Tensor,
    grad_stored: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    contract: str,
) -> tuple[Tensor, Tensor]:
    """``(grad_x, grad_weight)``; ``grad_weight`` has no elements without a weight."""
    grad_x, grad_weight = rmsnorm_region.reference_backward(
        grad_y, grad_stored, x, weight, eps=eps, contract=_rmsnorm_contract(contract), residual=residual
    )
    return _laid_out(grad_x, x), x.new_empty(0) if grad_weight is None else grad_weight


@rmsnorm_backward_op.register_fake
def _(
    grad_y: Tensor,
    grad_stored: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    contract: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _rmsnorm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, residual, ctx.eps, ctx.contract = inputs
    contract = _rmsnorm_contract(ctx.contract)
    ctx.has_residual = residual is not None
    only_stored = contract.sum == "lp" and contract.variance == "rounded" and contract.reduction != "warps8"
    if residual is not None and only_stored:
        x, residual = (
            output[1],
            None,
        )  # nothing but the rounded sum is read (warps8 adds in another order without a residual)
    ctx.save_for_backward(x, weight, residual)


def _rmsnorm_backward(ctx: Any, grad_y: Tensor | None, grad_stored: Tensor | None) -> tuple[Any, ...]:
    x, weight, residual = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    grad_x, grad_weight = rmsnorm_backward_op(
        grad_y, grad_stored if ctx.has_residual else None, x, weight, residual, ctx.eps, ctx.contract
    )
    return grad_x, None if weight is None else grad_weight, grad_x if ctx.has_residual else None, None, None


rmsnorm_op.register_autograd(_rmsnorm_backward, setup_context=_rmsnorm_setup)

# --- rope ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rpadiag_reference::rope", mutates_args=())
def rope_op(x: Tensor, cos: Tensor, sin: Tensor, contract: str) -> Tensor:
    """Rotated ``x`` with its strides; tables broadcast against ``[..., R/2]``."""
    return _laid_out(rope_region.rotate(x, cos, sin, contract=_rope_contract(contract)), x)


@rope_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, contract: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rpadiag_reference::rope_backward", mutates_args=())
def rope_backward_op(grad: Tensor, cos: Tensor, sin: Tensor, contract: str) -> Tensor:
    """Gradient of :func:`rope_op` with respect to x."""
    return _laid_out(rope_region.rotate_backward(grad, cos, sin, contract=_rope_contract(contract)), grad)


@rope_backward_op.register_fake
def _(grad: Tensor, cos: Tensor, sin: Tensor, contract: str) -> Tensor:
    return torch.empty_like(grad)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.contract = inputs
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return rope_backward_op(grad, cos, sin, ctx.contract), None, None, None


rope_op.register_autograd(_rope_backward, setup_context=_rope_setup)

# --- swiglu --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rpadiag_reference::swiglu", mutates_args=())
def swiglu_op(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    """``silu(gate) * up``."""
    return _laid_out(swiglu_region.reference(gate, up, contract=_swiglu_contract(contract)), gate)


@swiglu_op.register_fake
def _(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("rpadiag_reference::swiglu_backward", mutates_args=())
def swiglu_backward_op(grad: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    """``(grad_gate, grad_up)``."""
    grad_gate, grad_up = swiglu_region.reference_backward(grad, gate, up, contract=_swiglu_contract(contract))
    return _laid_out(grad_gate, gate), _laid_out(grad_up, up)


@swiglu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _swiglu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.contract = inputs
    ctx.save_for_backward(gate, up)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    return *swiglu_backward_op(grad, gate, up, ctx.contract), None


swiglu_op.register_autograd(_swiglu_backward, setup_context=_swiglu_setup)

# --- per-head norm and rope in one ---------------------------------------------------------------------------------


@torch.library.custom_op("rpadiag_reference::norm_rope", mutates_args=())
def norm_rope_op(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, norm: str, rope: str
) -> Tensor:
    """RoPE of the normed ``x`` without a rounding in between, with the strides of ``x``."""
    return torch.empty_like(x).copy_(
        qk_norm_region.reference(x, weight, cos, sin, eps=eps, norm=_rmsnorm_contract(norm), rope=_rope_contract(rope))
    )


@norm_rope_op.register_fake
def _(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, norm: str, rope: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rpadiag_reference::norm_rope_backward", mutates_args=())
def norm_rope_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, norm: str, rope: str
) -> tuple[Tensor, Tensor]:
    """``(grad_x, grad_weight)``; ``grad_weight`` has no elements without a weight."""
    grad_x, grad_weight = qk_norm_region.reference_backward(
        grad, x, weight, cos, sin, eps=eps, norm=_rmsnorm_contract(norm), rope=_rope_contract(rope)
    )
    return _laid_out(grad_x, x), x.new_empty(0) if grad_weight is None else grad_weight


@norm_rope_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, norm: str, rope: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _norm_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, ctx.eps, ctx.norm, ctx.rope = inputs
    ctx.save_for_backward(x, weight, cos, sin)


def _norm_rope_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, cos, sin = ctx.saved_tensors
    grad_x, grad_weight = norm_rope_backward_op(grad, x, weight, cos, sin, ctx.eps, ctx.norm, ctx.rope)
    return grad_x, None if weight is None else grad_weight, None, None, None, None, None


norm_rope_op.register_autograd(_norm_rope_backward, setup_context=_norm_rope_setup)

# --- dispatch ------------------------------------------------------------------------------------------------------


class Operation:
    """One contract bound to a choice of kernels. Everything that needs Python beyond tensors happens here, once, so
    that a call is plain to torch.compile.

    kernels: ``auto`` uses the Triton kernels on CUDA where they are installed, ``reference`` never, ``triton`` always.
    Errors: MissingDependencyError when ``triton`` is asked for and not installed.
    """

    def __init__(self, contract: Contract, kernels: str = "auto") -> None:
        if kernels not in KERNEL_CHOICES:
            raise unknown_name("kernel choice", kernels, KERNEL_CHOICES)
        if kernels == "triton" and not kernels_installed():
            raise MissingDependencyError(
                "the Triton kernels were asked for and triton is not installed", hint="pip install triton"
            )
        self.contract = contract
        self.key = contract_key(contract)
        self.kernels = kernels
        self.module: Any = None
        self.axes: dict[str, str] = {}
        if kernels != "reference" and kernels_installed():
            self.module = _triton()
            self.axes = triton_axes(contract)

    def on_triton(self, x: Tensor) -> bool:
        """Does a call with ``x`` run on the Triton kernels? ``auto`` leaves other orders of addition to the reference."""
        if self.module is None or self.kernels == "triton":
            return self.module is not None
        return x.device.type == "cuda" and getattr(self.contract, "reduction", "native") == "native"


class RmsNormOperation(Operation):
    """Differentiable :func:`rpadiag.regions.rmsnorm.reference`."""

    def __call__(
        self, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.on_triton(x):
            return self.module.rmsnorm(x, weight, eps=eps, residual=residual, **self.axes)
        y, stored = rmsnorm_op(x, weight, residual, eps, self.key)
        return y if residual is None else (y, stored)


class RopeOperation(Operation):
    """Differentiable :func:`rpadiag.regions.rope.rotate`."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.on_triton(x):
            return self.module.rope(x, cos, sin, **self.axes)
        return rope_op(x, cos, sin, self.key)

    def pair(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key, in one kernel where there is one."""
        if self.on_triton(query):
            return self.module.rope(query, cos, sin, k=key, **self.axes)
        return rope_op(query, cos, sin, self.key), rope_op(key, cos, sin, self.key)


class SwigluOperation(Operation):
    """Differentiable :func:`rpadiag.regions.swiglu.reference`."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.on_triton(gate):
            return self.module.swiglu(gate, up, **self.axes)
        return swiglu_op(gate, up, self.key)


class NormRopeOperation:
    """Differentiable :func:`rpadiag.regions.qk_norm.reference`; always on the reference."""

    def __init__(self, norm: RmsNormContract, rope: RopeContract) -> None:
        self.norm_key, self.rope_key = contract_key(norm), contract_key(rope)

    def __call__(self, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        return norm_rope_op(x, weight, cos, sin, eps, self.norm_key, self.rope_key)


@functools.cache
def kernels_installed() -> bool:
    """Are the Triton kernels and Triton itself importable?"""
    return all(importlib.util.find_spec(name) is not None for name in ("rpadiag_kernels", "triton"))


def triton_axes(contract: Contract) -> dict[str, str]:
    """The contract as the kernels take it: the axes they know."""
    known = importlib.import_module("rpadiag_kernels.axes").AXES[contract.region]
    return {axis: value for axis, value in contract.to_dict().items() if axis in known}


def _triton() -> Any:
    return importlib.import_module("rpadiag_kernels")
