"""What opens behind a cell of the map: the numbers of one site, written once here and only laid out by the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.reports.view import count, number, percent, words
from rpadiag.sites import POINTS

if TYPE_CHECKING:
    import pandas as pd

# Bins of the local ULP histogram as the panel draws them: name, first and last bin of the run's 17.
ULP_BINS = (("1 ULP", 1, 1), ("2–3", 2, 2), ("4–7", 3, 3), ("8–15", 4, 4), ("16 or more", 5, 16))
BALANCED = 0.1  # magnitudes within a few per cent of balance are what rounding elsewhere gives
TRUNCATED = 0.8

Histograms = Mapping[str, NDArray[np.int64]]


def explorer(
    by_site: pd.DataFrame, by_point: pd.DataFrame, fp32: pd.DataFrame, histograms: Histograms, num_layers: int
) -> dict[str, Any]:
    """Every cell of a map by ``column:row``, the pooled ones by ``all:row``.

    by_site, by_point: pooled in the model's dtype. fp32: by site, of the control. histograms: local counts [17] by site.
    """
    points = [str(p) for p in by_point["point"]]
    rows = {p: i for i, p in enumerate(points)}
    control = {
        (_layer(r["layer"]), str(r["point"])): float(r["local_rel_l2"])
        for r in _records(fp32)
        if math.isfinite(float(r["local_rel_l2"]))
    }
    cells: dict[str, Any] = {}
    pooled: dict[str, NDArray[np.int64]] = {}
    for r in _records(by_site):
        layer, point = _layer(r["layer"]), str(r["point"])
        site = point if layer is None else f"layers.{layer}.{point}"
        column = (layer + 1) if layer is not None else 0 if point == "embed" else num_layers + 1
        found = histograms.get(site)
        if found is not None:
            pooled[point] = pooled.get(point, np.zeros(17, np.int64)) + found
        cells[f"{column}:{rows[point]}"] = _cell(site, r, control.get((layer, point)), found)
    for r in _records(by_point):
        point = str(r["point"])
        if any(k for k in cells if k.endswith(f":{rows[point]}") and cells[k]["site"] != point):
            worst = max((v for (_, p), v in control.items() if p == point), default=None)
            cells[f"all:{rows[point]}"] = _cell(f"layers.*.{point}", r, worst, pooled.get(point))
    return {
        "points": [{"name": p, "text": POINTS[p].text, "region": POINTS[p].region, "reads": _reads(p)} for p in points],
        "layers": num_layers,
        "cells": cells,
        "start": _start(by_site, rows, num_layers),
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _layer(value: Any) -> int | None:
    return None if math.isnan(float(value)) else int(value)


def _reads(point: str) -> str:
    """The points whose tensors its operation is fed, in words."""
    names = []
    for name in POINTS[point].reads:
        plain = name.lstrip("?^")
        names.append(f"{plain} of the layer below" if "^" in name else plain)
    return " or ".join(names) if any("?" in n for n in POINTS[point].reads) else ", ".join(names)


def _cell(site: str, r: Mapping[str, Any], fp32: float | None, histogram: NDArray[np.int64] | None) -> dict[str, Any]:
    facts = [
        ["elements compared", count(r["n"])],
        ["relative L2, made here", number(r["local_rel_l2"])],
        ["relative L2, end to end", number(r["rel_l2"])],
        ["largest, made here", _ulp(r["local_max_ulp"])],
        ["largest, end to end", _ulp(r["max_ulp"])],
        ["direction, made here", _direction(r["local_balance"], r["local_differing"])],
        ["relative L2 in FP32, made here", number(fp32)],
        ["NaN or infinite", count(r["nonfinite"]) if r["nonfinite"] else ""],
        ["not measured locally", words(r["local_reason"]) if math.isnan(r["local_differing"]) else ""],
    ]
    return {
        "site": site,
        "shares": [[_plain(r[c]), percent(r[c])] for c in ("local_differing", "inherited", "differing")],
        "facts": [f for f in facts if f[1] not in ("", number(None))],
        "ulp": _bins(histogram),
    }


def _plain(share: float) -> float | None:
    return None if math.isnan(share) else float(f"{share:.4g}")


def _ulp(value: float) -> str:
    return "" if math.isnan(value) else f"{count(value)} ULP"


def _direction(balance: float, share: float) -> str:
    """The balance of magnitudes in words: what tells truncation from rounding at another point."""
    if math.isnan(balance) or not share > 0:
        return ""
    side = "rollout" if balance < 0 else "trainer"
    if abs(balance) >= TRUNCATED:
        return f"toward zero in the {side} (balance {number(balance, 2)}), as truncation makes it"
    if abs(balance) <= BALANCED:
        return f"balanced ({number(balance, 2)})"
    return f"more often toward zero in the {side} ({number(balance, 2)})"


def _bins(histogram: NDArray[np.int64] | None) -> list[list[Any]]:
    """(name, share of the differing elements, the same written) per bin; empty where nothing differs."""
    if histogram is None or not histogram[1:].sum():
        return []
    whole = int(histogram[1:].sum())
    shares = [(name, float(histogram[a : b + 1].sum()) / whole) for name, a, b in ULP_BINS]
    return [[name, round(share, 4), percent(share)] for name, share in shares]


def _start(by_site: pd.DataFrame, rows: Mapping[str, int], num_layers: int) -> str:
    """The cell that is open at first: where most is made locally, else where most differs."""
    for column in ("local_differing", "differing"):
        values = by_site[column].to_numpy(dtype="float64")
        if np.isfinite(values).any() and np.nanmax(values) > 0:
            r = by_site.iloc[int(np.nanargmax(values))]
            break
    else:
        r = by_site.iloc[0]
    layer, point = _layer(r["layer"]), str(r["point"])
    column_index = (layer + 1) if layer is not None else 0 if point == "embed" else num_layers + 1
    return f"{column_index}:{rows[point]}"
