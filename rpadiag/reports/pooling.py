"""Sums over prompts and layers that the plots need. Nothing here is a new statistic.

Shares are pooled as counts over counts. Relative L2 is the root mean square over rows, weighted by elements:
a run keeps it per prompt, and the norms behind it are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rpadiag.sites import HEAD_POINTS, LAYER_POINTS

if TYPE_CHECKING:
    import pandas as pd

EXECUTION_ORDER = ("embed", *(p.name for p in LAYER_POINTS), *(p.name for p in HEAD_POINTS if p.name != "embed"))
CONTEXT_BEFORE = 14
CONTEXT_AFTER = 5


def pool_sites(sites: pd.DataFrame, *, precision: str, by: Sequence[str]) -> pd.DataFrame:
    """Site rows of one precision summed over prompts and sources, one row for each value of ``by``.

    Columns: ``by``, n, differing, rel_l2, max_ulp, nonfinite, local_n, local_differing, local_rel_l2, local_max_ulp,
    inherited, local_reason. Shares and ratios are NaN where nothing was measured. Rows come in execution order
    of ``point`` where that is a key.
    """
    import pandas as pd

    chosen = sites[sites["precision"] == precision]
    rows = []
    for key, group in chosen.groupby(list(by), dropna=False, sort=False):
        row: dict[str, object] = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        if "layer" in row:
            row["layer"] = float("nan") if pd.isna(row["layer"]) else float(row["layer"])
        rows.append(row | _pooled(group, "") | _pooled(group, "local_") | _context(group))
    frame = pd.DataFrame(rows, columns=None if rows else [*by, *_EMPTY])
    if rows:
        frame["inherited"] = (frame["differing"] - frame["local_differing"]).clip(lower=0.0)
    if "point" in by and rows:
        order = {name: i for i, name in enumerate(EXECUTION_ORDER)}
        frame = frame.sort_values("point", key=lambda c: c.map(order), kind="stable").reset_index(drop=True)
    return frame


_EMPTY = (
    "n", "differing", "rel_l2", "max_ulp", "local_n", "local_differing", "local_rel_l2", "local_max_ulp", "inherited",
    "nonfinite", "local_reason", "region",
)  # fmt: skip


def _pooled(group: pd.DataFrame, prefix: str) -> dict[str, float]:
    n = _numbers(group, f"{prefix}n")
    measured = ~np.isnan(n) & (n > 0)
    if not measured.any():
        return {f"{prefix}{c}": float("nan") for c in ("n", "differing", "rel_l2", "max_ulp")}
    weight = n[measured]
    rel = _numbers(group, f"{prefix}rel_l2")[measured]
    finite = np.isfinite(rel)
    pooled_rel = float(np.sqrt(np.average(rel[finite] ** 2, weights=weight[finite]))) if finite.any() else float("nan")
    max_ulp = _numbers(group, f"{prefix}max_ulp")[measured]
    return {
        f"{prefix}n": float(weight.sum()),
        f"{prefix}differing": float(_numbers(group, f"{prefix}num_differing")[measured].sum() / weight.sum()),
        f"{prefix}rel_l2": pooled_rel,
        f"{prefix}max_ulp": float(np.nanmax(max_ulp)) if np.isfinite(max_ulp).any() else float("nan"),
    }


def _context(group: pd.DataFrame) -> dict[str, object]:
    reasons = group["local_reason"].dropna()
    bad = np.nansum(_numbers(group, "num_nonfinite_trainer")) + np.nansum(_numbers(group, "num_nonfinite_rollout"))
    return {
        "region": str(group["region"].iloc[0]),
        "nonfinite": float(bad),
        "local_reason": str(reasons.iloc[0]) if len(reasons) else None,
    }


def _numbers(frame: pd.DataFrame, column: str) -> np.ndarray:
    return np.asarray(frame[column].to_numpy(dtype="float64", na_value=np.nan))


def scored_tokens(tokens: pd.DataFrame) -> pd.DataFrame:
    """Tokens that both stacks scored, with ``d`` = p - q in nats added; rows in prompt and position order."""
    both = tokens[np.isfinite(_numbers(tokens, "p")) & np.isfinite(_numbers(tokens, "q"))]
    both = both.sort_values(["prompt", "position"], kind="stable").reset_index(drop=True)
    return both.assign(d=_numbers(both, "p") - _numbers(both, "q"))


def histogram(d: np.ndarray, num_bins: int, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """(centres, counts) over [-reach, reach]; an odd number of bins puts 0 mid-bin; the end bins hold what lies beyond."""
    edges = np.linspace(-reach, reach, num_bins + 1)
    counts, _ = np.histogram(np.clip(d, edges[0], edges[-1]), bins=edges)
    return (edges[:-1] + edges[1:]) / 2, counts


def largest(scored: pd.DataFrame, how_many: int) -> pd.DataFrame:
    """The tokens with the largest |d|, largest first; ties in prompt order."""
    order = np.argsort(-np.abs(scored["d"].to_numpy()), kind="stable")[:how_many]
    return scored.iloc[order]


def spread_sample(scored: pd.DataFrame, limit: int) -> pd.DataFrame:
    """At most ``limit`` rows: the largest |d| tenth, and every k-th of the others in |d| order. No chance involved."""
    if len(scored) <= limit:
        return scored
    order = np.argsort(-np.abs(scored["d"].to_numpy()), kind="stable")
    head = limit // 10
    rest = order[head:]
    picked = rest[np.linspace(0, len(rest) - 1, limit - head).astype(int)]
    return scored.iloc[np.sort(np.concatenate([order[:head], picked]))]


def context_of(tokens_of_prompt: pd.DataFrame, position: int) -> tuple[str, str, str]:
    """(before, token, after): decoded text around a position of one prompt; token ids where there is no text."""
    by_position = dict(zip(tokens_of_prompt["position"], zip(tokens_of_prompt["text"], tokens_of_prompt["token"], strict=True), strict=True))

    def words(start: int, stop: int) -> str:
        return "".join(_word(*by_position[i]) for i in range(start, stop) if i in by_position)

    first = min(by_position)
    start = max(first, position - CONTEXT_BEFORE)
    before = ("\u2026" if start > first else "") + words(start, position)
    end = position + 1 + CONTEXT_AFTER
    after = words(position + 1, end) + ("\u2026" if end <= max(by_position) else "")
    return before, words(position, position + 1), after


def _word(text: object, token: int) -> str:
    if not isinstance(text, str):
        return f"\u27e8{token}\u27e9 "
    return text.replace("\r", "").replace("\n", "\u23ce") if text else f"\u27e8{token}\u27e9"
