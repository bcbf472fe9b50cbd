"""Fingerprint of a rotary embedding from captured tensors. Shape legend: T tokens, H heads, D head size."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from rpadiag.contracts import Contract, RopeContract
from rpadiag.errors import UsageError
from rpadiag.regions import rope
from rpadiag.regions.fingerprint import (
    Evaluate,
    Fingerprint,
    Search,
    check_capture,
    identify,
    not_low_precision,
)
from rpadiag.regions.rounding import store


def rope_table(positions: Tensor, inv_freq: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [T, D/2], of positions [T] and inverse frequencies [D/2]: one float32 product per angle.

    scale: YaRN's attention factor, by which both implementations multiply the float32 table.
    """
    angle = positions.float()[:, None] * inv_freq.float()[None, :]
    return angle.cos() * scale, angle.sin() * scale


def fingerprint_rope(
    x: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    inv_freq: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_dim: int | None = None,
) -> Fingerprint:
    """Contracts of the rotation that turned ``x`` into ``out``, both [T, H, D], at ``positions`` int64 [T].

    Angles come from ``inv_freq`` [rotary_dim/2] (float32), or as ``cos`` and ``sin`` [T, rotary_dim/2]; a table that is
    already rounded leaves the cache axis untold, and says so.
    """
    dtype = check_capture("rope", out, x, positions)
    if x.shape != out.shape or x.ndim != 3:
        raise UsageError(
            f"fingerprint of rope: input {tuple(x.shape)} and output {tuple(out.shape)}",
            hint="both must be [tokens, heads, head size]",
        )
    if (early := not_low_precision("rope", out, dtype)) is not None:
        return early
    rounded_table = False
    if cos is None or sin is None:
        if inv_freq is None:
            raise UsageError("fingerprint of rope needs inv_freq, or cos and sin")
        cos, sin = rope_table(positions, inv_freq)
    else:
        rounded_table = bool(
            (cos == cos.to(x.dtype).to(cos.dtype)).all() and (sin == sin.to(x.dtype).to(sin.dtype)).all()
        )
    table_cos, table_sin = (t.float()[:, None, :] for t in (cos, sin))
    rope.reference(
        x[:1], table_cos[:1, 0], table_sin[:1, 0], contract=RopeContract(), rotary_dim=rotary_dim
    )  # may refuse

    def at(rows: Tensor) -> Evaluate:
        return Rotations(x[rows], table_cos[rows], table_sin[rows], lp=x.dtype)

    search = Search(
        region="rope",
        candidates=candidates(),
        at=at,
        piecewise=True,
        blind_spot=lambda axis: blind_spot(axis, x=x, positions=positions, rounded_table=rounded_table),
        variants=level_two_variants,
        cause="float32 fused multiply-add, or the last bit of cos and sin",
    )
    found = identify(search, out)
    if found.status != "no known contract" and not positions.any():
        return replace(found, status="not determined", reasons=(*found.reasons, _POSITION_ZERO))
    return found


class Rotations:
    """The bits of :func:`rpadiag.regions.rope.rotate_values` for one ``x`` [..., D] under many contracts.

    Half of the outputs, the first or the second members of all pairs, is what several contracts share.
    """

    def __init__(self, x: Tensor, cos: Tensor, sin: Tensor, *, lp: torch.dtype) -> None:
        self._x, self._cos, self._sin, self._lp = x, cos, sin, lp
        self._unrounded: dict[tuple[int | str, ...], Tensor] = {}
        self._stored: dict[tuple[int | str, ...], Tensor] = {}

    def __call__(self, contract: Contract) -> Tensor:
        """Rotated x, lp."""
        assert isinstance(contract, RopeContract)
        rest = self._x[..., 2 * self._cos.shape[-1] :].to(torch.float32)
        first, second = self._half(0, contract), self._half(1, contract)
        return rope.join(first, second, store(rest, self._lp, contract.store), contract.layout)

    def _half(self, which: int, contract: RopeContract) -> Tensor:
        fused = rope.fused_products(contract)[which]
        key = (which, fused, contract.cache, contract.products, contract.layout)
        if key not in self._unrounded:
            c, s = rope.tables(self._cos, self._sin, self._lp, contract)
            x1, x2, _ = rope.split(self._x, c.shape[-1], contract.layout)
            a, b = (x1, -x2) if which == 0 else (x2, x1)
            self._unrounded[key] = rope.sum_of_products(a, c, b, s, self._lp, contract.products, fused)
        stored = (*key, contract.store)
        if stored not in self._stored:
            self._stored[stored] = store(self._unrounded[key], self._lp, contract.store)
        return self._stored[stored]


_POSITION_ZERO = "every token is at position 0, where every contract is the identity"


@functools.cache
def candidates() -> tuple[RopeContract, ...]:
    """Level-one contracts."""
    return tuple(RopeContract.space())


def level_two_variants(contract: Contract) -> Iterable[Contract]:
    """The same rounding points with each float32 fused multiply-add."""
    one = {a.name: getattr(contract, a.name) for a in contract.axes if a.level == 1}
    if one["products"] != "fp32":
        return iter(())
    return (c for c in RopeContract.space(levels=(2,), **one) if c != contract)


def blind_spot(axis: str, *, x: Tensor, positions: Tensor, rounded_table: bool) -> str | None:
    """Why this data cannot tell an axis of RoPE, where one of the known reasons applies."""
    if not torch.any(positions):
        return _POSITION_ZERO
    if axis == "cache" and rounded_table:
        return "cos and sin were given already rounded, so an unrounded table cannot be tried"
    if not torch.any(x):
        return "the input is zero"
    return None
