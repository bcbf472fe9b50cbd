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
    rows: list[tuple[str, str, float, int, str]] = [("Trainer against rollout: " + n, "", v, k, LIGHT.local) for n, v, k in gap]
    for f in floors:
        name = f"{str(f.get('stack', '')).capitalize()}: {f.get('text') or f.get('name')}"
        value = f.get("mean_abs_d")
        if not is_missing(value):
            rows.append((name, str(f.get("name", "")), float(value or 0.0), int(f.get("num_tokens") or 0), LIGHT.muted))
    top = max((v for _, _, v, _, _ in rows), default=0.0) or 1e-9
    names = [label(n) for n, *_ in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [v for _, _, v, _, _ in rows],
            "y": list(range(len(rows))),
            "width": 0.4,
            "marker": {"color": [c for *_, c in rows], "cornerradius": 2},
            "customdata": [[n, count(k)] for n, (_, _, _, k, _) in zip(names, rows, strict=True)],
            "text": [f"{number(v)} nats" for _, _, v, _, _ in rows],
            "textposition": "outside",
            "textfont": {"color": LIGHT.ink, "size": 12},
            "cliponaxis": False,
            "hovertemplate": "%{customdata[0]}<br>mean |d| %{x:.3g} nats, n = %{customdata[1]}<extra></extra>",
        }
    ]
    above = [
        {"x": 0, "xref": "x", "y": i, "yref": "y", "yshift": 19, "text": n, "showarrow": False, "xanchor": "left",
         "xshift": 1, "font": {"size": 12, "color": LIGHT.soft}, "align": "left"}
        for i, n in enumerate(names)
    ]  # fmt: skip
    height = 46 * len(rows) + 40
    return Figure(
        key=key,
        title="The gap beside the noise floors",
        caption="Mean |d| in nats per token. Grey: one stack against itself on the same tokens, differing only as its label says.",
        data=data,
        layout=layout(
            height,
            margin={"l": 4, "r": 70, "t": 22, "b": 14},
            xaxis=axis(range=[0, 1.12 * top], visible=False),
            yaxis=axis(visible=False, range=[len(rows) - 0.45, -0.65]),
            annotations=above,
        ),
        narrow={"annotations": [a | {"text": _wrapped(str(a["text"])), "yshift": 19} for a in above]},
        alt="; ".join(f"{n}: mean |d| {number(v)} nats" for n, _, v, _, _ in rows),
        table=Table(
            caption="The measured gap and the noise floors",
            columns=[
                Column(title="comparison", numeric=False),
                Column(title="mean |d|, nats"),
                Column(title="max |d|, nats"),
                Column(title="k3 KL, nats"),
                Column(title="exact"),
                Column(title="tokens"),
            ],
            rows=[[n, number(v), number(None), number(None), number(None), count(k)] for n, v, k in gap]
            + [
                [
                    f"{f.get('stack')}: {f.get('text') or f.get('name')}",
                    number(f.get("mean_abs_d")),
                    number(f.get("max_abs_d")),
                    number(f.get("k3_kl")),
                    percent(f.get("exact_share")),
                    count(f.get("num_tokens")),
                ]
                for f in floors
            ],
        ),
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
            "error_x": {"type": "data", "array": (DETECTABLE_WHISKER * error).tolist(), "color": LIGHT.muted, "thickness": 1.5, "width": 4},
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
        title="Systematic part, which adds up",
        caption="Mean squared systematic difference when only this region keeps its own rounding. Whiskers are two standard errors; "
        "a filled mark is told from zero, a hollow one is not.",
        data=data,
        layout=layout(
            height,
            margin={"l": 96, "r": 16, "t": 10, "b": 50},
            xaxis=axis("nats\u00b2 per token", zeroline=True, exponentformat="power", range=[low - 0.06 * span, 1.06 * span], nticks=6),
            yaxis=axis(autorange="reversed", type="category", tickfont={"size": 12, "color": LIGHT.ink}, gridcolor=LIGHT.grid),
        ),
        narrow={"xaxis": {"nticks": 4}},
        alt="; ".join(
            f"{n}: {number(v)} plus or minus {number(e)} nats squared, {'detectable' if s else 'not told from zero'}"
            for n, v, e, s in zip(names, value, error, seen, strict=True)
        ),
    )


def saturated_bars(key: str, attribution: pd.DataFrame) -> Figure:
    """Mean |d| of single forwards for the same rows: what does not rank regions."""
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
        title="Mean |d| of single forwards, which saturates",
        caption="The same rows, measured end to end. One region out of step already brings nearly the whole gap, so these bars say nothing about causes.",
        data=data,
        layout=layout(
            40 * len(names) + 84,
            margin={"l": 96, "r": 56, "t": 10, "b": 50},
            xaxis=axis("nats per token", range=[0, 1.12 * top], nticks=5),
            yaxis=axis(autorange="reversed", type="category", tickfont={"size": 12, "color": LIGHT.ink}, showgrid=False),
        ),
        narrow={},
        alt="; ".join(f"{n}: {number(v)} nats" for n, v in zip(names, value, strict=True)),
    )
