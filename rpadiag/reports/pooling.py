"""Sums over prompts and layers that the plots need. Nothing here is a new statistic.

Shares are pooled as counts over counts, balances by the elements that differ. Relative L2 is the root mean square over rows, weighted by elements:
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

    Columns: ``by``, n, differing, rel_l2, max_ulp, nonfinite, balance (of magnitudes), the same
    with ``local_`` before them, inherited, local_reason. Shares and ratios are NaN where nothing was measured. Rows come in execution order
    of ``point`` where that is a key.
    """
    chosen = sites[sites["precision"] == precision]
    keys = chosen[list(by)].copy()
    if "layer" in by:
        keys["layer"] = _numbers(chosen, "layer")
    parts = keys.assign(**_summands(chosen, ""), **_summands(chosen, "local_"))
    parts["nonfinite"] = np.nan_to_num(_numbers(chosen, "num_nonfinite_trainer")) + np.nan_to_num(
        _numbers(chosen, "num_nonfinite_rollout")
    )
    parts["region"], parts["local_reason"] = chosen["region"], chosen["local_reason"]
    how = {c: _HOW.get(c.removeprefix("local_"), "sum") for c in parts.columns if c not in by}
    how |= {"region": "first", "local_reason": "first"}  # the first that is not null
    sums = parts.groupby(list(by), dropna=False, sort=False, observed=True).agg(how).reset_index()
    for name in ("point", "region", "local_reason"):  # categories sort and map by their order, not by what they say
        if name in sums:
            sums[name] = sums[name].astype(object)
    for prefix in ("", "local_"):
        measured = sums[f"{prefix}n"].to_numpy() > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            sums[f"{prefix}differing"] = np.where(measured, sums[f"{prefix}num_differing"] / sums[f"{prefix}n"], np.nan)
            sums[f"{prefix}rel_l2"] = np.where(measured, np.sqrt(sums[f"{prefix}sq"] / sums[f"{prefix}weight"]), np.nan)
            sums[f"{prefix}balance"] = sums[f"{prefix}leaning"] / sums[f"{prefix}balanced"]  # NaN where nothing differs
        sums.loc[~measured, f"{prefix}n"] = np.nan
    sums["inherited"] = (sums["differing"] - sums["local_differing"]).clip(lower=0.0)
    if "point" in by:
        order = {name: i for i, name in enumerate(EXECUTION_ORDER)}
        sums = sums.sort_values("point", key=lambda c: c.map(order), kind="stable").reset_index(drop=True)
    return sums


_HOW = {"max_ulp": "max"}


def _summands(rows: pd.DataFrame, prefix: str) -> dict[str, np.ndarray]:
    """Per row: what adds up (elements, differing, elements times squared relative L2) and the largest ULP."""
    n = np.nan_to_num(_numbers(rows, f"{prefix}n"))
    rel = _numbers(rows, f"{prefix}rel_l2")
    weight = np.where(np.isfinite(rel), n, 0.0)
    differing = np.nan_to_num(_numbers(rows, f"{prefix}num_differing"))
    balance = _numbers(rows, f"{prefix}magnitude_balance")
    return {
        f"{prefix}n": n,
        f"{prefix}num_differing": differing,
        f"{prefix}leaning": differing * np.nan_to_num(balance),
        f"{prefix}balanced": np.where(np.isfinite(balance), differing, 0.0),
        f"{prefix}weight": weight,
        f"{prefix}sq": weight * np.nan_to_num(rel, posinf=0.0, neginf=0.0) ** 2,
        f"{prefix}max_ulp": _numbers(rows, f"{prefix}max_ulp"),
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
    """(before, token, after): decoded text around a position of one prompt; token ids where there is no text.

    The first token of a sequence has no log-probability and so no text here: an ellipsis stands for it.
    """
    by_position = dict(
        zip(
            tokens_of_prompt["position"],
            zip(tokens_of_prompt["text"], tokens_of_prompt["token"], strict=True),
            strict=True,
        )
    )

    def words(start: int, stop: int) -> str:
        return "".join(_word(*by_position[i]) for i in range(start, stop) if i in by_position)

    first = min(by_position)
    start = max(first, position - CONTEXT_BEFORE)
    before = ("\u2026" if start else "") + words(start, position)
    end = position + 1 + CONTEXT_AFTER
    after = words(position + 1, end) + ("\u2026" if end <= max(by_position) else "")
    return before, words(position, position + 1), after


def _word(text: object, token: int) -> str:
    if not isinstance(text, str):
        return f"\u27e8{token}\u27e9 "
    return text.replace("\r", "").replace("\n", "\u23ce") if text else f"\u27e8{token}\u27e9"
