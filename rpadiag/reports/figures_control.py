"""The FP32 control, site by site: where rounding nearly vanishes, a mistake stands out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports.figures import axis, label, layout
from rpadiag.reports.figures_sites import ROW_HEIGHT, site_table
from rpadiag.reports.theme import LIGHT
from rpadiag.reports.view import Figure, number

if TYPE_CHECKING:
    import pandas as pd


def control_range(key: str, by_site: pd.DataFrame, by_point: pd.DataFrame, limit: float) -> Figure:
    """FP32: relative L2 of every point, made here and end to end; range over layers. A mistake stands out."""
    points = list(by_point["point"])
    rows = {p: i for i, p in enumerate(points)}
    positive = by_site[["rel_l2", "local_rel_l2"]].to_numpy(dtype="float64")
    positive = positive[np.isfinite(positive) & (positive > 0)]
    low = min(math.floor(math.log10(positive.min())), -8) if len(positive) else -9
    high = max(math.ceil(math.log10(positive.max())), -4) if len(positive) else -4
    low = max(low, high - 9)
    data = [
        *_ranges(by_site, by_point, rows, "rel_l2", "end to end", LIGHT.muted, 0.16, low),
        *_ranges(by_site, by_point, rows, "local_rel_l2", "made here", LIGHT.local, -0.16, low),
    ]
    at_limit = {
        "type": "line",
        "xref": "x",
        "x0": limit,
        "x1": limit,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": LIGHT.second, "width": 1.5, "dash": "dot"},
    }
    return Figure(
        key=key,
        title="FP32 control, site by site",
        caption=f"Both stacks again in FP32, where rounding nearly vanishes and mistakes stay. Marks pool all layers, bars run from the "
        f"smallest to the largest layer. A blue mark right of the dotted line ({number(limit, 1)}) would be more than rounding. A hollow mark at the left edge is exactly 0.",
        data=data,
        layout=layout(
            ROW_HEIGHT * len(points) + 100,
            margin={"l": 92, "r": 12, "t": 30, "b": 46},
            showlegend=True,
            xaxis=axis("relative L2", type="log", range=[low - 0.15, high + 0.1], dtick=1, exponentformat="power"),
            yaxis=axis(
                tickvals=list(rows.values()),
                ticktext=points,
                range=[len(points) - 0.4, -0.6],
                tickfont={"size": 12, "color": LIGHT.ink},
            ),
            shapes=[at_limit],
        ),
        narrow={
            "margin": {"l": 76, "r": 8, "t": 30, "b": 46},
            "xaxis": {"dtick": 2},
            "yaxis": {"tickfont": {"size": 11}},
        },
        alt="Relative L2 in FP32 of each operation on the same input: "
        + "; ".join(
            f"{p} {number(v, 2)}"
            for p, v in zip(by_point["point"], by_point["local_rel_l2"], strict=True)
            if not math.isnan(v)
        ),
        table=site_table(by_point),
    )


def _ranges(
    by_site: pd.DataFrame,
    by_point: pd.DataFrame,
    rows: dict[str, int],
    column: str,
    name: str,
    colour: str,
    shift: float,
    low: float,
) -> list[dict[str, Any]]:
    floor = 10.0**low
    x: list[float | None] = []
    y: list[float | None] = []
    for point, group in by_site.groupby("point", sort=False):
        values = group[column].to_numpy(dtype="float64")
        values = values[np.isfinite(values) & (values > 0)]
        if len(values) > 1:
            x += [max(float(values.min()), floor), max(float(values.max()), floor), None]
            y += [rows[str(point)] + shift] * 2 + [None]
    known = by_point[by_point[column].notna()]
    value = known[column].to_numpy(dtype="float64")
    bars = {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 3},
        "opacity": 0.45,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    exact = value == 0
    marks: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [max(float(v), floor) for v in value],
        "y": [rows[p] + shift for p in known["point"]],
        "marker": {"size": 8, "color": colour, "line": {"color": colour, "width": 2}},
        "text": [f"{label(p)}: {number(v)}" for p, v in zip(known["point"], value, strict=True)],
        "hovertemplate": "%{text}<extra>" + name + "</extra>",
    }
    hollow = marks | {"showlegend": False, "marker": marks["marker"] | {"color": LIGHT.panel}}
    return [bars, _some(marks, ~exact), _some(hollow, exact)]


def _some(marks: dict[str, Any], chosen: np.ndarray) -> dict[str, Any]:
    """The marks at the chosen rows."""
    return marks | {k: [v for v, c in zip(marks[k], chosen, strict=True) if c] for k in ("x", "y", "text")}
