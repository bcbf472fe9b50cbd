"""SwiGLU: silu(gate) * up. Shape legend: [..., I], I intermediate columns."""

from __future__ import annotations

import torch
from torch import Tensor

from rpadiag.contracts import SwigluContract
from rpadiag.errors import InputError
from rpadiag.regions.presets import known_contracts
from rpadiag.regions.rounding import LP_DTYPES, store, to_lp

# --- sites spanned -------------------------------------------------------------------------------------------------

SITES = ("act",)

# --- known contracts -----------------------------------------------------------------------------------------------

KNOWN = known_contracts("swiglu")

# --- reference -----------------------------------------------------------------------------------------------------

LOG2_E = 1.4426950408889634


def reference(gate: Tensor, up: Tensor, *, contract: SwigluContract) -> Tensor:
    """``store(round_silu(silu(gate)) * up)``; gate, up and the result: [..., I] of one dtype.

    Not differentiable: see :func:`aligned`. Errors: InputError for shapes, dtypes or devices that do not fit.
    """
    check_inputs(gate, up)
    lp = gate.dtype
    g, u = gate.to(torch.float32), up.to(torch.float32)
    if contract.formula == "x*u/(1+e)" and contract.silu == "fp32" and contract.sigmoid == "fp32":
        return store((g * u) / _one_plus_exp(g, contract), lp, contract.store)
    return store(_silu(g, lp, contract) * u, lp, contract.store)


def _one_plus_exp(g: Tensor, contract: SwigluContract) -> Tensor:
    return 1.0 + (torch.exp(-g) if contract.exp == "exp" else torch.exp2(-g * LOG2_E))


def _silu(g: Tensor, lp: torch.dtype, contract: SwigluContract) -> Tensor:
    """silu of float32 ``g``, rounded where the contract says so; float32."""
    if contract.sigmoid == "lp":
        silu = g * to_lp(1.0 / _one_plus_exp(g, contract), lp)
    elif contract.formula == "x*(1/(1+e))":
        silu = g * (1.0 / _one_plus_exp(g, contract))
    elif contract.exp == "exp" and g.device.type == "cpu":
        # PyTorch's own silu: its vector exponential on CPUs is another one than torch.exp's.
        silu = torch.nn.functional.silu(g)
    else:
        silu = g / _one_plus_exp(g, contract)
    return to_lp(silu, lp) if contract.silu == "lp" else silu


def reference_backward(grad: Tensor, gate: Tensor, up: Tensor, *, contract: SwigluContract) -> tuple[Tensor, Tensor]:
    """``(grad_gate, grad_up)``.

    ``dact = grad * up`` (rounded when dact=lp), ``grad_gate = dact * s * (1 + g * (1 - s))`` with s = sigmoid(gate), and
    ``grad_up = grad * silu(gate)`` (silu rounded when grad_silu=lp); float32 in between, one rounding each at the end.
    The operations of autograd on transformers' MLP, bit for bit, for the contract of hf-eager.
    """
    lp = gate.dtype
    g, u, d = gate.to(torch.float32), up.to(torch.float32), grad.to(torch.float32)
    silu = _silu(g, lp, contract.replace(silu=contract.grad_silu))
    dact = d * u
    if contract.dact == "lp":
        dact = to_lp(dact, lp)
    return _silu_backward(dact, g, contract).to(lp), (d * silu).to(lp)


def _silu_backward(dact: Tensor, g: Tensor, contract: SwigluContract) -> Tensor:
    if g.device.type == "cpu" and contract.exp == "exp":
        return torch.ops.aten.silu_backward(dact, g)
    sigmoid = 1.0 / _one_plus_exp(g, contract)
    return dact * sigmoid * (1.0 + g * (1.0 - sigmoid))


def check_inputs(gate: Tensor, up: Tensor) -> None:
    """Raise InputError unless the two tensors fit together."""
    if gate.dtype not in LP_DTYPES:
        raise InputError(f"swiglu takes bfloat16, float16 or float32, not {gate.dtype}")
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise InputError(
            "swiglu: gate and up do not fit together",
            detail=f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device}, "
            f"up is {tuple(up.shape)} {up.dtype} on {up.device}",
        )


# --- aligned -------------------------------------------------------------------------------------------------------


def aligned(gate: Tensor, up: Tensor, *, contract: SwigluContract, kernels: str = "auto") -> Tensor:
    """:func:`reference` as a differentiable operation, on the Triton kernels where they are chosen."""
    from rpadiag.regions.ops import SwigluOperation

    return SwigluOperation(contract, kernels)(gate, up)
