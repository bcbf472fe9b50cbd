"""Explanations of where a difference lives: some rows, some columns, a few directions, a random mask."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.explain import Explanation, Pair, percent

MAX_SIDE = 512  # of the matrix whose rank is looked at


def row_subset(pair: Pair) -> Iterator[Explanation]:
    """A minority of the tokens differs throughout, all others are bit-equal."""
    if pair.a.ndim != 2 or pair.a.shape[0] < 16 or pair.a.shape[1] < 8:
        return
    differs = pair.a != pair.b
    rows = differs.any(1)
    n, total = int(rows.sum()), len(rows)
    if not 0 < n <= total // 2 or float(differs[rows].double().mean()) < 0.3:
        return
    where = torch.nonzero(rows)[:, 0]
    low, high = int(where[0]), int(where[-1])
    span = f"rows {low}..{high}" if n == high - low + 1 else f"{n:,} of {total:,} rows (first {low})"
    text = f"only {span} differ, the other {total - n:,} are bit-equal: other inputs for these tokens (an image, an adapter, another expert), not precision"
    size = pair.change.rel_l2 / pair.unit
    if size > 12:
        yield Explanation(
            code="row-subset", severity="semantic", text=text, proof="solved", numbers={"num_rows": n, "first": low}
        )


def column_subset(pair: Pair) -> Iterator[Explanation]:
    """Only a contiguous part of the last axis differs, or only some slices of it."""
    if pair.a.ndim < 2 or pair.a.shape[-1] < 4:
        return
    differs = (pair.a != pair.b).reshape(-1, pair.a.shape[-1])
    columns = differs.any(0)
    n = int(columns.sum())
    total = columns.numel()
    if 0 < n < total and differs.shape[0] >= 16 and float(differs[:, columns].double().mean()) > 0.05:
        where = torch.nonzero(columns)[:, 0]
        low, high = int(where[0]), int(where[-1])
        span = f"columns {low}..{high}" if n == high - low + 1 else f"{n:,} of {total:,} columns (first {low})"
        if n > 0.95 * total:
            text = f"{total - n} of {total} columns are bit-equal, the others differ"
        else:
            text = f"only {span} differ, the other {total - n:,} are bit-equal"
        severity = "semantic" if pair.change.rel_l2 > 12 * pair.unit and n <= 0.5 * total else "rounding-contract"
        yield Explanation(
            code="column-subset", severity=severity, text=text, numbers={"num_columns": n, "first": low, "last": high}
        )


def low_rank(pair: Pair) -> Iterator[Explanation]:
    """B - A has few directions: a low-rank adapter on one side only."""
    rank = rank_of_difference(pair)
    if rank is not None:
        text = (
            f"the difference has rank {rank}: a low-rank (LoRA) adapter is applied, merged or missing on one side only"
        )
        yield Explanation(code="low-rank", severity="semantic", text=text, proof="solved", numbers={"rank": rank})


def rank_of_difference(pair: Pair) -> int | None:
    """r when r singular values hold nearly all of B - A and the next is far smaller; None when there is no such r."""
    if pair.a.ndim != 2 or min(pair.a.shape) < 32 or pair.change.rel_l2 < 12 * pair.unit:
        return None
    a, b = (t[:MAX_SIDE, :MAX_SIDE].float() for t in (pair.a, pair.b))
    values = torch.linalg.svdvals(b - a)
    limit = min(a.shape) // 4
    ratio = values[1 : limit + 1] / values[:limit].clamp_min(1e-30)
    r = int(ratio.argmin()) + 1
    energy = float(values[:r].square().sum() / values.square().sum())
    return r if float(ratio.min()) < 0.3 and energy > 0.95 else None


def dropout(pair: Pair) -> Iterator[Explanation]:
    """One side is the other with random elements zeroed and the rest scaled up: training mode."""
    for side, x, y in (("B", pair.b.double(), pair.a.double()), ("A", pair.a.double(), pair.b.double())):
        live = y != 0
        zeroed = live & (x == 0)
        share = float(zeroed.double().mean() / live.double().mean().clamp_min(1e-9))
        if x.numel() < 256 or not 0.005 < share < 0.9 or zeroed.reshape(len(x), -1).all(1).any():
            continue
        kept = live & ~zeroed
        ratio = float((x[kept] / y[kept]).median())
        left = float((x[kept] - ratio * y[kept]).norm() / x[kept].norm())
        if left < max(2 * pair.unit, 1e-6) and abs(ratio * (1 - share) - 1) < 0.05:
            text = f"{side} has {percent(share)} of its elements zeroed at random and the others scaled by {ratio:.4g}: dropout is active (training mode) on the {side} side"
            yield Explanation(
                code="dropout", severity="semantic", text=text, proof="solved", numbers={"side": side, "share": share}
            )
            return


def collapsed(x: Tensor) -> Tensor:
    """[rows, columns] of any tensor."""
    return x.reshape(-1, x.shape[-1])
