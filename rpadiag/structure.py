"""The shape of a difference between two tensors: which way it points, and along which axis it is coherent.

Rounding to nearest moves elements up and down independently of one another. What does not look like that
says what made it: every change toward zero is truncation, a sign shared by a row is a scalar of that row (an inverse
rms), a sign shared by a column is a weight. Shape legend: R rows (tokens), C columns (features).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rpadiag.errors import UsageError

COHERENCE_LIMIT = 0.6  # mean |sum of signs| / number along a row: 0.8 / sqrt(n) for independent signs, so 0.28 at n = 8
ONE_SIDED_LIMIT = 0.95  # |#up - #down| / #different; rounding a product twice gives at most 0.2
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}
_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How one tensor differs from another.

    kind: ``equal``, ``one-sided`` (truncation, or a gain), ``per-row``, ``per-column``, ``scattered``.
    text: one sentence with the numbers that ``numbers`` holds.
    """

    kind: str
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "numbers": dict(self.numbers)}


@dataclass(frozen=True, kw_only=True)
class Change:
    """Counts of one comparison, over the elements finite on both sides.

    mean_*_ulp are clipped to 8 ULP per element: values near zero move by thousands of ULP harmlessly.
    magnitude: away from zero is positive. *_balance: (#positive - #negative) / #different.
    """

    n: int
    num_differing: int
    max_ulp: int
    mean_signed_ulp: float
    mean_magnitude_ulp: float
    sign_balance: float
    magnitude_balance: float
    rel_l2: float
    max_abs: float

    @property
    def differing(self) -> float:
        """Fraction of elements that differ."""
        return self.num_differing / self.n if self.n else 0.0


def ordered_bits(x: Tensor) -> Tensor:
    """int64 place of each value on its dtype's ordered line; +0 and -0 share place 0."""
    if x.dtype == torch.float64:
        raw64 = x.contiguous().view(torch.int64)
        return torch.where(raw64 < 0, -(raw64 & 0x7FFF_FFFF_FFFF_FFFF), raw64)
    if x.dtype not in _INTEGER:
        raise UsageError(f"ULP distance is defined for 16, 32 and 64 bit floats, not {x.dtype}")
    integer = _INTEGER[x.dtype]
    raw = x.contiguous().view(integer).to(torch.int64)
    return torch.where(raw < 0, -(raw & torch.iinfo(integer).max), raw)


def common_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """dtype in which both are held exactly."""
    return torch.promote_types(a.dtype, b.dtype)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal element by element, a NaN being equal to a NaN."""
    if a.shape != b.shape:
        return False
    if a.ndim and len(a) > 8 and not same_values(a[-2:], b[-2:]):
        return False  # most tensors that differ do so in their last rows: no need to look at all of them
    if not a.is_floating_point() and not b.is_floating_point():
        return bool((a == b).all())
    dtype = common_dtype(a, b)
    x, y = a.to(dtype), b.to(dtype)
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def num_mismatches(a: Tensor, b: Tensor) -> int:
    """Number of elements that are not the same value; NaN equals NaN, and the signs of zero are not told apart."""
    return int(mismatches(a, b).sum())


def mismatches(a: Tensor, b: Tensor) -> Tensor:
    """Which elements are not the same value, as :func:`num_mismatches` counts them; bool, in the shape of ``a``."""
    undefined = b.isnan()
    return (a != b) & ~(undefined & a.isnan()) if bool(undefined.any()) else a != b


def signed_ulp(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 ULP distance b - a, the same counted away from zero); 0 where either side is not finite."""
    dtype = common_dtype(a, b)
    x, y = a.to(dtype), b.to(dtype)
    finite = x.isfinite() & y.isfinite()
    d = torch.where(finite, ordered_bits(y) - ordered_bits(x), 0)
    sign = torch.sign(x.nan_to_num(0.0).float()).to(torch.int64)
    sign = torch.where(sign == 0, torch.sign(y.nan_to_num(0.0).float()).to(torch.int64), sign)
    return d, d * sign


def change(a: Tensor, b: Tensor) -> Change:
    """Counts of how ``b`` differs from ``a`` (equal shapes)."""
    d, magnitude = signed_ulp(a, b)
    num = int((d != 0).sum())
    n = d.numel()
    x, y = a.double().nan_to_num(0.0, 0.0, 0.0), b.double().nan_to_num(0.0, 0.0, 0.0)
    finite = a.isfinite() & b.isfinite()
    delta = torch.where(finite, y - x, 0.0)
    norm = float(torch.where(finite, x, 0.0).norm())
    some = max(num, 1)
    return Change(
        n=n,
        num_differing=num_mismatches(a.to(common_dtype(a, b)), b.to(common_dtype(a, b))),
        max_ulp=int(d.abs().max()) if n else 0,
        mean_signed_ulp=float(d.clamp(-8, 8).double().mean()) if n else 0.0,
        mean_magnitude_ulp=float(magnitude.clamp(-8, 8).double().mean()) if n else 0.0,
        sign_balance=float(torch.sign(d).sum()) / some,
        magnitude_balance=float(torch.sign(magnitude).sum()) / some,
        rel_l2=float(delta.norm()) / norm if norm else (float("inf") if float(delta.norm()) else 0.0),
        max_abs=float(delta.abs().max()) if n else 0.0,
    )


def coherence(a: Tensor, b: Tensor, *, axis: int) -> float:
    """How far the differences along an axis share one sign: 1 all of them, near 0 for rounding noise.

    axis=1: along the columns of each row (a scalar of the row shows), axis=0: along the rows of each column. Rounding an
    already rounded row times one scalar is itself biased by a few percent per row, so a mere excess over chance says nothing.
    """
    _, magnitude = signed_ulp(a, b)
    signs = torch.sign(magnitude).double()
    num = signs.abs().sum(dim=axis)
    enough = num >= 8
    if int(enough.sum()) < 4:
        return 0.0
    return float((signs.sum(dim=axis)[enough].abs() / num[enough]).mean())


def concentration(a: Tensor, b: Tensor, *, axis: int) -> float:
    """Share of rows (axis=1) or columns (axis=0) that hold any difference at all."""
    differs = mismatches(a, b)
    return float(differs.any(dim=axis).double().mean())


def describe_structure(expected: Tensor, got: Tensor) -> Structure:
    """Which way ``got`` differs from ``expected``, both [R, C] in one dtype."""
    if expected.shape != got.shape or expected.ndim != 2:
        raise UsageError(
            f"structure needs two [rows, columns] tensors, got {tuple(expected.shape)} and {tuple(got.shape)}"
        )
    c = change(expected, got)
    numbers: dict[str, Any] = {
        "n": c.n, "differing": c.differing, "max_ulp": c.max_ulp, "mean_magnitude_ulp": c.mean_magnitude_ulp,
        "sign_balance": c.sign_balance, "magnitude_balance": c.magnitude_balance,
    }  # fmt: skip
    if c.num_differing == 0:
        return Structure(kind="equal", text="no element differs", numbers=numbers)
    share = f"{100 * c.differing:.2g} % of {c.n} elements differ"
    if c.num_differing >= 8 and abs(c.magnitude_balance) >= ONE_SIDED_LIMIT:
        way = "toward zero" if c.magnitude_balance < 0 else "away from zero"
        why = ", as truncation does" if c.magnitude_balance < 0 and c.max_ulp == 1 else ""
        text = f"one-sided: {share}, every one {way} (mean magnitude {c.mean_magnitude_ulp:+.3f} ULP){why}"
        return Structure(kind="one-sided", text=text, numbers=numbers)
    rows, columns = coherence(expected, got, axis=1), coherence(expected, got, axis=0)
    numbers |= {"row_coherence": rows, "column_coherence": columns}
    if rows > COHERENCE_LIMIT and rows >= columns:
        text = f"per-row: {share} and share a sign along each row (agreement {rows:.2f} of 1): a reduction or an inverse rms"
        return Structure(kind="per-row", text=text, numbers=numbers)
    if columns > COHERENCE_LIMIT:
        text = f"per-column: {share} and share a sign along each column (agreement {columns:.2f} of 1): a weight"
        return Structure(kind="per-column", text=text, numbers=numbers)
    with_rows, with_columns = concentration(expected, got, axis=1), concentration(expected, got, axis=0)
    numbers |= {"rows_with_differences": with_rows, "columns_with_differences": with_columns}
    if with_rows < 0.5 and c.num_differing >= 16 and c.num_differing > 4 * with_rows * expected.shape[0]:
        text = f"per-row: {share}, all in {100 * with_rows:.2g} % of the rows: a reduction or an inverse rms"
        return Structure(kind="per-row", text=text, numbers=numbers)
    if with_columns < 0.5 and c.num_differing >= 16 and c.num_differing > 4 * with_columns * expected.shape[1]:
        text = f"per-column: {share}, all in {100 * with_columns:.2g} % of the columns: a weight"
        return Structure(kind="per-column", text=text, numbers=numbers)
    text = f"scattered: {share}, unbiased (magnitude balance {c.magnitude_balance:+.2f}), no row or column stands out"
    return Structure(kind="scattered", text=text, numbers=numbers)
