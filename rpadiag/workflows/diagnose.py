"""Diagnosis with contracts: the structural diagnosis of two captures, which may ask the fingerprint what each side follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rpadiag.compare.diagnose import Diagnosis, diagnose_sites
from rpadiag.contracts import Contract

MIN_ROWS, MAX_ELEMENTS = 64, 400_000


def diagnose(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    inputs: Mapping[str, Any] | None = None,
    *,
    regions: Mapping[str, str] | None = None,
) -> Diagnosis:
    """What differs between two captures and why; A is the reference. See :func:`rpadiag.compare.diagnose.diagnose_sites`."""
    return diagnose_sites(a, b, inputs, regions=regions, contracts=read_contracts)


def read_contracts(region: str, inputs: Mapping[str, Any], out: Tensor) -> tuple[tuple[Contract, ...], bool]:
    """Contracts that reproduce a captured output and whether bit for bit; () when none does or an input is not known."""
    from rpadiag.regions.fingerprint_qk import fingerprint_qk_rope
    from rpadiag.regions.fingerprint_rmsnorm import fingerprint_rmsnorm
    from rpadiag.regions.fingerprint_rope import fingerprint_rope, rope_table
    from rpadiag.regions.fingerprint_swiglu import fingerprint_swiglu

    if any(
        isinstance(v, Tensor)
        and v.is_floating_point()
        and k in ("x", "residual", "gate", "up")
        and v.dtype != out.dtype
        for k, v in inputs.items()
    ):
        return (), False
    if region == "rmsnorm" and isinstance(inputs.get("x"), Tensor):
        residual = inputs["residual"]
        found = fingerprint_rmsnorm(
            _rows(inputs["x"]),
            None if inputs["weight"] is None else _exact(inputs["weight"], out.dtype),
            _rows(out),
            eps=inputs["eps"],
            residual=None if residual is None else _rows(residual),
        )
    elif region == "rope":
        dim = int(inputs["rotary_dim"])
        cos, sin = rope_table(inputs["positions"], inputs["inv_freq"])
        found = fingerprint_rope(inputs["x"], inputs["positions"], out, cos=cos, sin=sin, rotary_dim=dim)
    elif region == "swiglu":
        found = fingerprint_swiglu(_rows(inputs["gate"]), _rows(inputs["up"]), _rows(out))
    elif region == "qk_norm":
        few = slice(0, 128)
        joint = fingerprint_qk_rope(
            inputs["x"][few],
            inputs["weight"],
            inputs["positions"][few],
            out[few],
            eps=inputs["eps"],
            inv_freq=inputs["inv_freq"],
        )
        found = joint["qk_norm"]
    else:
        return (), False
    return found.matches, found.level_two is None


def _exact(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the activations' dtype, or in float32 where that would round it."""
    return weight.to(dtype) if bool((weight.to(dtype).double() == weight.double()).all()) else weight.float()


def _rows(x: Tensor) -> Tensor:
    """[R, C] with the first rows of a large tensor: enough for every level-one axis."""
    flat = x.reshape(-1, x.shape[-1])
    return flat[: max(MIN_ROWS, MAX_ELEMENTS // flat.shape[1])]
