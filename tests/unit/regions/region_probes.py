"""Inputs that see every level-one axis, and the question which contracts reproduce an output."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rpadiag.contracts import Contract

NUM_ELEMENTS = 1_000_000
PROBE_ROWS = 128


def spread(num_rows: int, num_columns: int, lp: torch.dtype, seed: int) -> Tensor:
    """Normal values whose rows span the dtype: most near 1, a fifth scaled by powers of two up to large and down to
    subnormal, and single elements replaced by subnormals, zeros and large ones. Squares stay finite in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_columns, generator=generator)
    exponents = {torch.bfloat16: (-136.0, 40.0), torch.float16: (-24.0, 10.0)}[lp]
    scale = torch.linspace(*exponents, max(1, num_rows // 5)).round()
    x[: len(scale)] *= torch.exp2(scale)[:, None]
    tiny = torch.finfo(lp).smallest_normal
    for start, value in ((0, 0.0), (1, -0.0), (2, tiny / 4), (3, -tiny / 2), (4, 300.0), (5, -1000.0)):
        x[start::97, start::31] = value
    # Some rows are shuffled in so that the first ones are not all of one magnitude.
    return x[torch.randperm(num_rows, generator=generator)].to(lp)


def num_differing(a: Tensor, b: Tensor) -> int:
    """Elements that differ in value; NaN equals NaN, +0 equals -0."""
    return int(((a != b) & ~(a.isnan() & b.isnan())).sum())


def matching(space: Iterable[Contract], predict: Callable[[Contract, slice], Tensor], seen: Tensor) -> list[Contract]:
    """Contracts whose prediction has no element that differs from ``seen`` [rows, ...]. ``predict`` gets the rows."""
    probe = slice(0, PROBE_ROWS)
    survivors = [c for c in space if num_differing(predict(c, probe), seen[probe]) == 0]
    everything = slice(0, len(seen))
    return [c for c in survivors if num_differing(predict(c, everything), seen) == 0]
