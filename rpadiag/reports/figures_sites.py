"""Figures of sites: where divergence is made, and how it grows with depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports import pooling
from rpadiag.reports.figures import axis, label, layout
from rpadiag.reports.theme import LIGHT, share_scale
from rpadiag.reports.view import Choice, Column, Figure, Table, count, number, percent, words
from rpadiag.sites import POINTS

if TYPE_CHECKING:
    import pandas as pd

SHARE_FLOOR = -5.0  # log10 of the share that the colour scale starts from; an exact 0 sits on it
ROW_HEIGHT = 23
VIEWS = (
    (
        "local_differing",
        "Made here",
        "Share of elements that differ when the trainer\u2019s operation is fed the rollout\u2019s own input. This points at causes.",
    ),
    ("inherited", "Inherited", "The end-to-end share that is not made at the site itself."),
    (
        "differing",
        "End to end",
        "Share of elements that differ in the two forwards as they ran. Everything downstream of a cause lights up, so this does not point at one.",
    ),
)


def site_map(
    key: str, by_site: pd.DataFrame, by_point: pd.DataFrame, num_layers: int, details: Mapping[str, Any]
) -> Figure:
    """Points (rows, in execution order) by layer (columns); colour is the share of elements differing.

    details: what opens behind a cell, see :mod:`rpadiag.reports.site_details`.
    """
    points = list(by_point["point"])
    rows = {p: i for i, p in enumerate(points)}
    data: list[dict[str, Any]] = []
    choices = []
    for column, name, note in VIEWS:
        if by_point[column].notna().any():
            choices.append(Choice(label=name, traces=(len(data), len(data) + 1), note=note))
            data += _map_traces(by_site, by_point, rows, column, num_layers, visible=not data)
    height = ROW_HEIGHT * len(points) + 112
    step = 1 if num_layers <= 12 else 5
    ticks = [-1, *range(0 if step == 1 else step, num_layers, step), num_layers]
    return Figure(
        key=key,
        title="Where the two stacks part",
        caption="Rows are sites in execution order, columns are decoder layers, the right-hand figures pool all layers. "
        "An empty cell was not measured or has no such site.",
        data=data,
        layout=layout(
            height,
            margin={"l": 92, "r": 8, "t": 26, "b": 78},
            xaxis=axis(
                "decoder layer",
                tickvals=ticks,
                ticktext=["in", *(str(t) for t in ticks[1:-1]), "out"],
                showgrid=False,
                range=[-1.6, num_layers + 0.6],
                domain=[0, 0.9],
            ),
            xaxis2=axis(domain=[0.905, 1], range=[0, 1], visible=False, fixedrange=True),
            yaxis=axis(
                tickvals=list(rows.values()),
                ticktext=points,
                range=[len(points) - 0.4, -0.6],
                showgrid=False,
                tickfont={"size": 12, "color": LIGHT.ink},
            ),
            annotations=[_heading(1.0, "all layers")],
            coloraxis=_colour_axis(height - 26 - 78),
        ),
        narrow={
            "margin": {"l": 76, "r": 2, "t": 26, "b": 78},
            "xaxis": {"domain": [0, 0.8], "tickvals": [-1, num_layers], "ticktext": ["in", "out"]},
            "coloraxis": {
                "colorbar": {"len": 0.76, "tickvals": [-5, -3, -2, -1, 0], "ticktext": ["0", "0.1", "1", "10", "100 %"]}
            },
            "xaxis2": {"domain": [0.81, 1]},
            "yaxis": {"tickfont": {"size": 11}},
        },
        alt="Share of elements made different at each site, pooled over layers: "
        + "; ".join(
            f"{p} {percent(v)}"
            for p, v in zip(by_point["point"], by_point["local_differing"], strict=True)
            if not math.isnan(v)
        ),
        choices=choices,
        table=site_table(by_point),
        explorer=details,
    )


def _heading(x: float, text: str) -> dict[str, Any]:
    return {
        "x": x,
        "xref": "paper",
        "xanchor": "right",
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "yshift": 4,
        "text": text,
        "showarrow": False,
        "font": {"size": 11, "color": LIGHT.faint},
    }


def _map_traces(
    by_site: pd.DataFrame, by_point: pd.DataFrame, rows: dict[str, int], column: str, num_layers: int, *, visible: bool
) -> list[dict[str, Any]]:
    z: list[list[float | None]] = [[None] * (num_layers + 2) for _ in rows]
    shown: list[list[str]] = [[""] * (num_layers + 2) for _ in rows]
    for _, row in by_site.iterrows():
        share = float(row[column])
        if math.isnan(share):
            continue
        x = _column_of(row["layer"], str(row["point"]), num_layers)
        z[rows[row["point"]]][x] = round(_log_share(share), 4)
        shown[rows[row["point"]]][x] = (
            f"{label(_address(row['layer'], row['point']))}<br>{label(POINTS[row['point']].text)}<br><b>{percent(share)}</b> of {count(row['n'])} elements"
        )
    heat = {
        "type": "heatmap",
        "visible": visible,
        "z": z,
        "x": list(range(-1, num_layers + 1)),
        "y": list(rows.values()),
        "text": shown,
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 2,
        "coloraxis": "coloraxis",
    }
    pooled = {
        "type": "scatter",
        "visible": visible,
        "mode": "text",
        "xaxis": "x2",
        "yaxis": "y",
        "x": [1.0] * len(rows),
        "y": list(rows.values()),
        "text": [percent(v) for v in by_point[column]],
        "textposition": "middle left",
        "cliponaxis": False,
        "textfont": {"size": 12, "color": LIGHT.ink},
        "hoverinfo": "skip",
    }
    return [heat, pooled]


def _column_of(layer: float, point: str, num_layers: int) -> int:
    if math.isnan(layer):
        return 0 if point == "embed" else num_layers + 1
    return int(layer) + 1


def _address(layer: float, point: str) -> str:
    return point if math.isnan(layer) else f"layers.{int(layer)}.{point}"


def _log_share(share: float) -> float:
    return SHARE_FLOOR if share == 0 else min(0.0, max(math.log10(share), SHARE_FLOOR + 0.25))


def _colour_axis(plot_height: int) -> dict[str, Any]:
    bar = {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "xpad": 0,
        "y": -42 / plot_height,
        "yanchor": "top",
        "ypad": 0,
        "len": 0.5,
        "thickness": 8,
        "outlinewidth": 0,
        "tickvals": [-5, -4, -3, -2, -1, 0],
        "ticktext": ["0", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
        "tickfont": {"size": 11, "color": LIGHT.faint},
        "tickangle": 0,
    }
    return {"cmin": SHARE_FLOOR, "cmax": 0, "colorscale": share_scale(), "colorbar": bar}


def site_table(by_point: pd.DataFrame) -> Table:
    """Every point pooled over layers: shares, relative L2, largest ULP, what was not measured."""
    rows = []
    for _, r in by_point.iterrows():
        rows.append(
            [
                str(r["point"]),
                str(r["region"]),
                count(r["n"]),
                percent(r["local_differing"]),
                percent(r["inherited"]),
                percent(r["differing"]),
                number(r["local_rel_l2"]),
                number(r["rel_l2"]),
                number(r["local_balance"], 2),
                count(r["local_max_ulp"]),
                count(r["nonfinite"]),
                words(r["local_reason"]),
            ]
        )
    return Table(
        caption="Sites pooled over layers and prompts",
        columns=[
            Column(title="site", numeric=False),
            Column(title="region", numeric=False),
            Column(title="elements"),
            Column(title="made here"),
            Column(title="inherited"),
            Column(title="end to end"),
            Column(title="rel. L2 made here"),
            Column(title="rel. L2 end to end"),
            Column(
                title="balance made here",
                hint="−1: every difference lies toward zero on the rollout’s side, as truncation does; 0: balanced",
            ),
            Column(title="max ULP made here", hint="harmlessly large near zero"),
            Column(title="NaN or infinite"),
            Column(title="not measured because", numeric=False),
        ],
        rows=rows,
    )


def depth_panels(key: str, by_site: pd.DataFrame, num_layers: int, unit_roundoff: float | None) -> Figure | None:
    """One small panel per layer point: relative L2 (or share differing) along depth, made here and end to end."""
    inside = by_site[by_site["layer"].notna()]
    points = [p for p in pooling.EXECUTION_ORDER if p in set(inside["point"])]
    decades = _decades(inside)
    if num_layers < 2 or not points or decades is None:
        return None
    low, high = decades
    data: list[dict[str, Any]] = []
    for i, point in enumerate(points):
        rows = inside[inside["point"] == point].sort_values("layer")
        data += _panel_traces(rows, i, point)
    quarter = len(points) * 4
    magnitude = {
        f"yaxis{_n(i)}": {"type": "log", "range": [low, high], "dtick": 2 if high - low > 4 else 1, "tickformat": "~e"}
        for i in range(len(points))
    }
    share = {
        f"yaxis{_n(i)}": {"type": "linear", "range": [0, 1.04], "dtick": 0.5, "tickformat": ".0%"}
        for i in range(len(points))
    }
    wide, narrow = _panel_grid(points, 4, num_layers), _panel_grid(points, 2, num_layers)
    rel = tuple(i for i in range(quarter) if i % 4 < 2)
    return Figure(
        key=key,
        title="How it grows with depth",
        caption="One panel per site, decoder layer from left to right, the same vertical axis in all. Blue is made at the site, grey is what arrives end to end; the space between them is inherited.",
        data=data,
        layout=layout(wide.pop("height"), margin={"l": 48, "r": 8, "t": 20, "b": 28}, **_merge(wide, magnitude)),
        narrow=narrow,
        alt=_growth_alt(inside, points, unit_roundoff),
        choices=[
            Choice(
                label="Relative L2",
                traces=rel,
                note="Size of the difference over the size of the activation, logarithmic. A site that makes exactly nothing has no blue line.",
                layout=magnitude,
            ),
            Choice(
                label="Share of elements",
                traces=tuple(i for i in range(quarter) if i % 4 >= 2),
                note="Share of elements that differ at all, by however little.",
                layout=share,
            ),
        ],
    )


def _n(i: int) -> str:
    return "" if i == 0 else str(i + 1)


def _merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {k: ({**a[k], **b[k]} if k in a and k in b else a.get(k, b.get(k))) for k in a.keys() | b.keys()}


def _decades(rows: pd.DataFrame) -> tuple[float, float] | None:
    """log10 range of the relative L2 values, at most six decades; None where all are 0."""
    values = np.concatenate([rows["rel_l2"].to_numpy(dtype="float64"), rows["local_rel_l2"].to_numpy(dtype="float64")])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return None
    high = math.ceil(math.log10(values.max()))
    return max(math.floor(math.log10(values.min())), high - 6), high


def _panel_traces(rows: pd.DataFrame, i: int, point: str) -> list[dict[str, Any]]:
    layers = [int(v) for v in rows["layer"]]
    traces = []
    for measure, form in (("rel_l2", "%{y:.2e}"), ("differing", "%{y:.2%}")):
        for prefix, name, colour in (("", "end to end", LIGHT.muted), ("local_", "made here", LIGHT.local)):
            values = [
                None if math.isnan(v) or (measure == "rel_l2" and v == 0) else float(f"{v:.4g}")
                for v in rows[prefix + measure]
            ]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(layers) <= 8 else "lines",
                    "marker": {"size": 5, "color": colour},
                    "name": name,
                    "x": layers,
                    "y": values,
                    "xaxis": f"x{_n(i)}",
                    "yaxis": f"y{_n(i)}",
                    "line": {"color": colour, "width": 2},
                    "visible": measure == "rel_l2",
                    "hovertemplate": f"layers.%{{x}}.{label(point)}<br>{name}: {form}<extra></extra>",
                }
            )
    return traces


def _panel_grid(points: list[str], columns: int, num_layers: int) -> dict[str, Any]:
    """Axis domains and titles of the panels; the layouts for wide and narrow pages differ in nothing else."""
    num_rows = math.ceil(len(points) / columns)
    height = 122 * num_rows + 36
    gap_x, gap_y = 0.028 if columns > 2 else 0.05, 40 / (height - 48)
    width, tall = (1 - gap_x * (columns - 1)) / columns, (1 - gap_y * (num_rows - 1)) / num_rows
    out: dict[str, Any] = {"height": height, "annotations": []}
    for i, point in enumerate(points):
        row, column = divmod(i, columns)
        x0, y1 = column * (width + gap_x), 1 - row * (tall + gap_y)
        last_in_column = i + columns >= len(points)
        out[f"xaxis{_n(i)}"] = axis(
            domain=[x0, min(1, x0 + width)],
            anchor=f"y{_n(i)}",
            range=[-0.5, num_layers - 0.5],
            showgrid=False,
            automargin=False,
            tickvals=[0, num_layers // 2, num_layers - 1],
            showticklabels=last_in_column,
            showline=True,
        )
        out[f"yaxis{_n(i)}"] = axis(
            domain=[max(0, y1 - tall), y1], anchor=f"x{_n(i)}", showticklabels=column == 0, automargin=False
        )
        out["annotations"].append(
            {
                "x": x0,
                "xref": "paper",
                "xanchor": "left",
                "y": y1,
                "yref": "paper",
                "yanchor": "bottom",
                "yshift": 1,
                "showarrow": False,
                "text": f"<b>{label(point)}</b>  {label(POINTS[point].region)}",
                "font": {"size": 11, "color": LIGHT.soft},
            }
        )
    return out


def _growth_alt(rows: pd.DataFrame, points: list[str], unit_roundoff: float | None) -> str:
    parts = []
    for point in points:
        of = rows[rows["point"] == point].sort_values("layer")
        parts.append(f"{point} from {number(of['rel_l2'].iloc[0], 2)} to {number(of['rel_l2'].iloc[-1], 2)}")
    tail = "" if unit_roundoff is None else f" One rounding step is {number(unit_roundoff, 2)}."
    return "Relative L2 end to end, first to last layer: " + "; ".join(parts) + "." + tail
