"""Figures of the noise floors and of the attribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports.figures import axis, label, layout
from rpadiag.reports.theme import LIGHT
from rpadiag.reports.view import Column, Figure, Table, count, is_missing, number, percent

if TYPE_CHECKING:
    import pandas as pd

DETECTABLE_WHISKER = 2.0


def floor_bars(key: str, gap: Sequence[tuple[str, float, int]], floors: Sequence[Mapping[str, Any]]) -> Figure:
    """The measured gap over what each stack differs from itself. gap: (name, mean |d| in nats, tokens)."""
    known = [f for f in floors if not is_missing(f.get("mean_abs_d"))]
    names = [f"Trainer against rollout: {name}" for name, _, _ in gap] + [_floor_name(f) for f in known]
    values = [value for _, value, _ in gap] + [float(f["mean_abs_d"]) for f in known]
    tokens = [n for _, _, n in gap] + [int(f.get("num_tokens") or 0) for f in known]
    shown = [label(n) for n in names]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": list(range(len(names))),
        "width": 0.4,
        "marker": {"color": [LIGHT.local] * len(gap) + [LIGHT.muted] * len(known), "cornerradius": 2},
        "customdata": [[n, count(k)] for n, k in zip(shown, tokens, strict=True)],
        "text": [f"{number(v)} nats" for v in values],
        "textposition": "outside",
        "textfont": {"color": LIGHT.ink, "size": 12},
        "cliponaxis": False,
        "hovertemplate": "%{customdata[0]}<br>mean |d| %{x:.3g} nats, n = %{customdata[1]}<extra></extra>",
    }
    above = [_over_bar(i, name) for i, name in enumerate(shown)]
    return Figure(
        key=key,
        title="The gap beside the noise floors",
        caption="Mean |d| in nats per token. Grey: one stack against itself on the same tokens, differing only as its label says.",
        data=[bars],
        layout=layout(
            46 * len(names) + 40,
            margin={"l": 4, "r": 70, "t": 22, "b": 14},
            xaxis=axis(range=[0, 1.12 * (max(values, default=0.0) or 1e-9)], visible=False),
            yaxis=axis(visible=False, range=[len(names) - 0.45, -0.65]),
            annotations=above,
        ),
        narrow={"annotations": [a | {"text": _wrapped(str(a["text"]))} for a in above]},
        alt="; ".join(f"{n}: mean |d| {number(v)} nats" for n, v in zip(names, values, strict=True)),
        table=_floor_table(gap, floors),
    )


def _floor_name(floor: Mapping[str, Any]) -> str:
    return f"{str(floor.get('stack', '')).capitalize()}: {floor.get('text') or floor.get('name')}"


def _over_bar(row: int, text: str) -> dict[str, Any]:
    return {
        "x": 0,
        "xref": "x",
        "xanchor": "left",
        "xshift": 1,
        "y": row,
        "yref": "y",
        "yshift": 19,
        "text": text,
        "showarrow": False,
        "font": {"size": 12, "color": LIGHT.soft},
        "align": "left",
    }


def _floor_table(gap: Sequence[tuple[str, float, int]], floors: Sequence[Mapping[str, Any]]) -> Table:
    nothing = number(None)
    rows = [[f"Trainer against rollout: {n}", number(v), nothing, nothing, nothing, count(k)] for n, v, k in gap]
    for f in floors:
        measured = [number(f.get(k)) for k in ("mean_abs_d", "max_abs_d", "k3_kl")]
        rows.append([_floor_name(f), *measured, percent(f.get("exact_share")), count(f.get("num_tokens"))])
    titles = ("mean |d|, nats", "max |d|, nats", "k3 KL, nats", "exact", "tokens")
    return Table(
        caption="The measured gap and the noise floors",
        columns=[Column(title="comparison", numeric=False), *(Column(title=t) for t in titles)],
        rows=rows,
    )


def _wrapped(text: str, width: int = 52) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "\u2026"


def _region_rows(attribution: pd.DataFrame) -> pd.DataFrame:
    """Rows to draw from the top: each region by size, all together, the self-control."""
    order = {"each": 0, "all": 1, "self": 2}
    shown = attribution[attribution["design"].isin(order)].copy()
    shown["_order"] = shown["design"].map(order)
    return shown.sort_values(["_order", "systematic_sq"], ascending=[True, False], kind="stable")


def row_name(design: str, region: str) -> str:
    """How a row of the attribution is called in reports."""
    return {"all": "all together", "self": "self-control"}.get(design, region)


def systematic_forest(key: str, attribution: pd.DataFrame) -> Figure:
    """Systematic part per region with whiskers of two standard errors; filled where it is told from zero."""
    shown = _region_rows(attribution)
    names = [row_name(d, r) for d, r in zip(shown["design"], shown["region"], strict=True)]
    value = shown["systematic_sq"].to_numpy(dtype="float64")
    error = shown["systematic_sq_se"].to_numpy(dtype="float64")
    seen = shown["detectable"].to_numpy(dtype=bool)
    colours = [LIGHT.faint if d == "self" else LIGHT.local for d in shown["design"]]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": value.tolist(),
            "y": names,
            "error_x": {
                "type": "data",
                "array": (DETECTABLE_WHISKER * error).tolist(),
                "color": LIGHT.muted,
                "thickness": 1.5,
                "width": 4,
            },
            "marker": {
                "size": 10,
                "color": [c if s else LIGHT.panel for c, s in zip(colours, seen, strict=True)],
                "line": {"width": 2, "color": colours},
            },
            "customdata": error.tolist(),
            "hovertemplate": "%{y}: %{x:.2e} \u00b1 %{customdata:.1e} nats\u00b2<extra></extra>",
        }
    ]
    span = max(float(np.nanmax(np.abs(value) + DETECTABLE_WHISKER * error)), 1e-12)
    low = min(0.0, float(np.nanmin(value - DETECTABLE_WHISKER * error)))
    height = 40 * len(names) + 84
    return Figure(
        key=key,
        title="Systematic part",
        caption="Mean squared systematic difference when only this region keeps its own rounding. Whiskers are two standard errors; "
        "a filled mark is told from zero, a hollow one is not.",
        data=data,
        layout=layout(
            height,
            margin={"l": 96, "r": 16, "t": 10, "b": 50},
            xaxis=axis(
                "nats\u00b2 per token",
                zeroline=True,
                exponentformat="power",
                range=[low - 0.06 * span, 1.06 * span],
                nticks=6,
            ),
            yaxis=axis(
                autorange="reversed", type="category", tickfont={"size": 12, "color": LIGHT.ink}, gridcolor=LIGHT.grid
            ),
        ),
        narrow={"xaxis": {"nticks": 4}},
        alt="; ".join(
            f"{n}: {number(v)} plus or minus {number(e)} nats squared, {'detectable' if s else 'not told from zero'}"
            for n, v, e, s in zip(names, value, error, seen, strict=True)
        ),
    )


def single_forward_bars(key: str, attribution: pd.DataFrame, *, saturated: bool) -> Figure:
    """Mean |d| of single forwards for the same rows: what does not rank regions, saturated or not."""
    shown = _region_rows(attribution)
    names = [row_name(d, r) for d, r in zip(shown["design"], shown["region"], strict=True)]
    value = shown["mean_abs_d"].to_numpy(dtype="float64")
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": value.tolist(),
            "y": names,
            "width": 0.45,
            "marker": {"color": LIGHT.muted, "cornerradius": 2},
            "text": [number(v) for v in value],
            "textposition": "outside",
            "textfont": {"color": LIGHT.ink, "size": 12},
            "cliponaxis": False,
            "hovertemplate": "%{y}: mean |d| %{x:.4f} nats<extra></extra>",
        }
    ]
    top = max(float(np.nanmax(value)), 1e-12)
    return Figure(
        key=key,
        title="Mean |d| of single forwards, saturated" if saturated else "Mean |d| of single forwards",
        caption="The same rows, measured end to end. "
        + (
            "One region out of step already brings nearly the whole gap, so these bars say nothing about causes."
            if saturated
            else "Chaos is in these bars, as the self-control shows, so they do not rank regions."
        ),
        data=data,
        layout=layout(
            40 * len(names) + 84,
            margin={"l": 96, "r": 56, "t": 10, "b": 50},
            xaxis=axis("nats per token", range=[0, 1.12 * top], nticks=5),
            yaxis=axis(
                autorange="reversed", type="category", tickfont={"size": 12, "color": LIGHT.ink}, showgrid=False
            ),
        ),
        narrow={},
        alt="; ".join(f"{n}: {number(v)} nats" for n, v in zip(names, value, strict=True)),
    )
