"""Fingerprint of a residual RMSNorm or a plain RMSNorm from captured tensors. Shape legend: R rows, C columns."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from operator import attrgetter

import torch
from torch import Tensor

from rpadiag.contracts import Contract, RmsNormContract
from rpadiag.errors import UsageError
from rpadiag.regions import rmsnorm
from rpadiag.regions.fingerprint import (
    MIN_ROWS,
    Evaluate,
    Fingerprint,
    Search,
    check_capture,
    identify,
    is_exact,
    is_power_of_two,
    not_low_precision,
)
from rpadiag.regions.rounding import store


def fingerprint_rmsnorm(
    x: Tensor, weight: Tensor | None, out: Tensor, *, eps: float, residual: Tensor | None = None
) -> Fingerprint:
    """Contracts of an RMSNorm that turned ``x`` [R, C] (plus ``residual`` [R, C]) into ``out`` [R, C].

    weight [C] as stored in the checkpoint (the offset of ``1+w`` families is an axis), None for a norm without.
    A per-head norm is captured with its heads as rows: [T * H, D].
    """
    inputs = [x] if residual is None else [x, residual]
    dtype = check_capture("rmsnorm", out, *inputs)
    if x.shape != out.shape or (residual is not None and residual.shape != x.shape):
        raise UsageError(
            f"fingerprint of rmsnorm: input {tuple(x.shape)} and output {tuple(out.shape)} differ in shape"
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise UsageError(f"fingerprint of rmsnorm: weight {tuple(weight.shape)} for {x.shape[-1]} columns")
    if (early := not_low_precision("rmsnorm", out, dtype)) is not None:
        return early

    rmsnorm.check_inputs(x, weight, residual, RmsNormContract(weight="none" if weight is None else "w"))

    def at(rows: Tensor) -> Evaluate:
        return Norms(x[rows], weight, eps=eps, residual=None if residual is None else residual[rows])

    search = Search(
        region="rmsnorm",
        candidates=candidates(has_weight=weight is not None, has_residual=residual is not None),
        at=at,
        piecewise=True,
        blind_spot=lambda axis: blind_spot(axis, x=x, weight=weight, residual=residual),
        variants=level_two_variants,
        cause="reduction order of the mean, or one ULP of rstd",
        min_rows=0 if residual is None else MIN_ROWS,
        min_rows_axis="variance",
    )
    return identify(search, out)


class Norms:
    """The bits of :func:`rpadiag.regions.rmsnorm.reference` for one ``x`` [..., C] under many contracts."""

    def __init__(self, x: Tensor, weight: Tensor | None, *, eps: float, residual: Tensor | None = None) -> None:
        self._x, self._weight, self._eps, self._residual = x, weight, eps, residual
        self._inner: dict[tuple[str, ...], rmsnorm.Intermediates] = {}

    def __call__(self, contract: Contract) -> Tensor:
        """Output, lp."""
        assert isinstance(contract, RmsNormContract)
        return store(self.unrounded(contract), self._x.dtype, contract.store)

    def unrounded(self, contract: RmsNormContract) -> Tensor:
        """Output before it is rounded, float32."""
        key = _inner_axes(contract)
        if key not in self._inner:
            self._inner[key] = rmsnorm.intermediates(self._x, self._residual, self._eps, contract)
        weight = None if contract.weight == "none" else self._weight
        return rmsnorm.unrounded_output(self._inner[key], weight, self._x.dtype, contract)


_inner_axes = attrgetter("sum", "variance", "rstd", "store", "root", "mean", "reduction")  # what intermediates read


@functools.cache
def candidates(*, has_weight: bool, has_residual: bool) -> tuple[RmsNormContract, ...]:
    """Level-one contracts, less the axes that are empty by construction: no residual, no weight."""
    return tuple(_candidates(has_weight=has_weight, has_residual=has_residual))


def _candidates(*, has_weight: bool, has_residual: bool) -> Iterator[RmsNormContract]:
    space = RmsNormContract.space() if has_residual else RmsNormContract.space(sum="lp", variance="rounded")
    for contract in space:
        if contract.weight != "none" and has_weight:
            yield contract
        elif contract.weight == "none" and (contract.scale == "lp") == (contract.store == "rne"):
            yield contract  # nothing follows the scale, so scale and store are one rounding


def level_two_variants(contract: Contract) -> Iterable[Contract]:
    """The same rounding points with every choice of root, mean and order."""
    one = {a.name: getattr(contract, a.name) for a in contract.axes if a.level == 1}
    return (c for c in RmsNormContract.space(levels=(2,), **one) if c != contract)


def blind_spot(axis: str, *, x: Tensor, weight: Tensor | None, residual: Tensor | None) -> str | None:
    """Why this data cannot tell an axis of an RMSNorm, where one of the known reasons applies."""
    if axis == "scale" and weight is not None and (is_power_of_two(weight) or is_power_of_two(1 + weight.float())):
        return "every weight is a power of two, so rounding before or after the product gives the same bits"
    if axis == "weight" and weight is not None:
        if not weight.any():
            return "every weight is zero"
        if is_exact(1 + weight.float(), x.dtype):
            return f"1+w is exact in {str(x.dtype).removeprefix('torch.')} for every weight"
    if axis in ("sum", "variance") and residual is not None:
        if not residual.any() or not x.any():
            return "the residual is zero, so there is no sum to round"
        if is_exact(x.float() + residual.float(), x.dtype):
            return "every sum x + residual is exact, so rounding it changes nothing"
        if x.shape[0] < MIN_ROWS:
            return f"too few rows ({x.shape[0]}); the axis is told by whole rows, at least {MIN_ROWS} are needed"
    if not torch.any(x):
        return "the input is zero"
    return None
