"""Fingerprint across the boundary of the per-head norm and RoPE, where only the raw query and the rotated one are seen.

Shape legend: T tokens, H heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rpadiag.contracts import Axis, Contract, QkRopeContract, RmsNormContract, RopeContract
from rpadiag.regions import qk_norm
from rpadiag.regions.fingerprint import (
    Ambiguity,
    Evaluate,
    Fingerprint,
    Search,
    check_capture,
    identify,
    not_low_precision,
)
from rpadiag.regions.fingerprint_rmsnorm import Norms
from rpadiag.regions.fingerprint_rmsnorm import blind_spot as norm_blind_spot
from rpadiag.regions.fingerprint_rope import Rotations, rope_table
from rpadiag.regions.fingerprint_rope import blind_spot as rope_blind_spot
from rpadiag.regions.rounding import store


@dataclass(frozen=True, kw_only=True)
class Joint:
    """Three contracts tried at once; looks like a contract to the search. Axis names carry their region."""

    mid: QkRopeContract
    norm: RmsNormContract
    rope: RopeContract

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(
            replace(axis, name=f"{part}.{axis.name}")
            for part in ("mid", "norm", "rope")
            for axis in getattr(self, part).axes
            if axis.level == 1
        )

    def __getattr__(self, name: str) -> str:
        part, _, axis = name.partition(".")
        if not axis:
            raise AttributeError(name)
        return str(getattr(getattr(self, part), axis))


class NormsAndRotations:
    """The bits of :func:`rpadiag.regions.qk_norm.reference` for one ``x`` [T, H, D] under many joint contracts."""

    def __init__(self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> None:
        self._norms, self._tables, self._lp = Norms(x, weight, eps=eps), (cos, sin), x.dtype
        self._rotations: dict[tuple[QkRopeContract, RmsNormContract], Rotations] = {}

    def __call__(self, contract: Contract) -> Tensor:
        """Rotated normed x, lp."""
        assert isinstance(contract, Joint)
        key = (contract.mid, contract.norm)
        if key not in self._rotations:
            value = self._norms.unrounded(contract.norm)
            if contract.mid.mid == "lp":
                value = store(value, self._lp, contract.norm.store).to(torch.float32)
            self._rotations[key] = Rotations(value, *self._tables, lp=self._lp)
        return self._rotations[key](contract.rope)


def joint_candidates(*, layout: str = "neox") -> Iterator[Joint]:
    """Every pair of a plain norm and a rotation, with the value between them rounded or not."""
    norms = [c for c in RmsNormContract.space(sum="lp", variance="rounded", store="rne") if c.weight != "none"]
    ropes = list(RopeContract.space(layout=layout, store="rne"))
    for mid, norm, rope in itertools.product(QkRopeContract.space(), norms, ropes):
        yield Joint(mid=mid, norm=norm, rope=rope)


def fingerprint_qk_rope(
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    eps: float,
    inv_freq: Tensor,
    scale: float = 1.0,
    layout: str = "neox",
) -> dict[str, Fingerprint]:
    """Fingerprints of ``qk_norm`` (is the normed value rounded?), ``rmsnorm`` and ``rope`` from x and out [T, H, D].

    scale: factor of cos and sin (YaRN's attention factor). Each region's matches are the projections of the joint fits, so an axis that one region hides is said to be untold there.
    """
    dtype = check_capture("qk_norm", out, x, positions)
    if (early := not_low_precision("qk_norm", out, dtype)) is not None:
        return {r: replace(early, region=r) for r in ("qk_norm", "rmsnorm", "rope")}
    cos, sin = rope_table(positions, inv_freq, scale=scale)

    qk_norm.reference(
        x[:1], weight, cos[:1, None], sin[:1, None], eps=eps, norm=RmsNormContract(), rope=RopeContract()
    )  # may refuse

    def at(rows: Tensor) -> Evaluate:
        return NormsAndRotations(x[rows], weight, cos[rows, None], sin[rows, None], eps=eps)

    flat = x.reshape(-1, x.shape[-1])

    def blind(axis: str) -> str | None:
        part, _, name = axis.partition(".")
        if part == "norm":
            return norm_blind_spot(name, x=flat, weight=weight, residual=None)
        return rope_blind_spot(name, x=x, positions=positions, rounded_table=False)

    search = Search(
        region="qk_norm",
        candidates=list(joint_candidates(layout=layout)),  # type: ignore[arg-type]
        at=at,
        piecewise=True,
        blind_spot=blind,
    )
    found = identify(search, out)
    return {
        region: _project(found, part, region)
        for part, region in (("mid", "qk_norm"), ("norm", "rmsnorm"), ("rope", "rope"))
    }


def _project(found: Fingerprint, part: str, region: str) -> Fingerprint:
    """The part of a joint fingerprint that speaks about one region."""
    matches = tuple(dict.fromkeys(getattr(m, part) for m in found.matches))
    ambiguities = tuple(
        Ambiguity(axis=a.axis.partition(".")[2], values=a.values, reason=a.reason)
        for a in found.ambiguities
        if a.axis.startswith(f"{part}.")
    )
    runner_up = getattr(found.runner_up, part) if found.runner_up is not None else None
    status = found.status
    if status != "no known contract":
        status = "determined" if len(matches) == 1 and not found.reasons else "not determined"
    return replace(
        found, region=region, status=status, matches=matches, ambiguities=ambiguities, runner_up=runner_up, level_two=None,
    )  # fmt: skip
