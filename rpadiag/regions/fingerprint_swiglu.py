"""Fingerprint of a SwiGLU product from captured tensors. Shape legend: R rows, I columns (intermediate size)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from rpadiag.contracts import Contract, SwigluContract
from rpadiag.errors import UsageError
from rpadiag.regions.fingerprint import (
    Evaluate,
    Fingerprint,
    Search,
    check_capture,
    identify,
    is_power_of_two,
    not_low_precision,
)
from rpadiag.regions.swiglu import reference


def fingerprint_swiglu(gate: Tensor, up: Tensor, out: Tensor) -> Fingerprint:
    """Contracts of the product that turned ``gate`` and ``up`` [R, I] into ``out`` [R, I]."""
    dtype = check_capture("swiglu", out, gate, up)
    if gate.shape != out.shape or up.shape != out.shape:
        raise UsageError(
            f"fingerprint of swiglu: gate {tuple(gate.shape)}, up {tuple(up.shape)} and output {tuple(out.shape)} differ in shape"
        )
    if (early := not_low_precision("swiglu", out, dtype)) is not None:
        return early

    def at(rows: Tensor) -> Evaluate:
        g, u = gate[rows], up[rows]
        return lambda contract: reference(g, u, contract=contract)  # type: ignore[arg-type]

    search = Search(
        region="swiglu",
        candidates=list(SwigluContract.space()),
        at=at,
        blind_spot=lambda axis: blind_spot(axis, gate=gate, up=up),
        variants=level_two_variants,
        cause="flavour of the exponential or the reciprocal",
    )
    return identify(search, out)


def level_two_variants(contract: Contract) -> Iterable[Contract]:
    """The same rounding points with every formula and exponential."""
    one = {a.name: getattr(contract, a.name) for a in contract.axes if a.level == 1}
    return (c for c in SwigluContract.space(levels=(2,), **one) if c != contract)


def blind_spot(axis: str, *, gate: Tensor, up: Tensor) -> str | None:
    """Why this data cannot tell an axis of SwiGLU, where one of the known reasons applies."""
    if not gate.any() or not up.any():
        return "gate or up is zero everywhere"
    if axis in ("silu", "sigmoid") and is_power_of_two(up):
        return "up is a power of two everywhere, so rounding silu before or after the product gives the same bits"
    return None
