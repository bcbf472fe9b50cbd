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


def part_rows(attribution: pd.DataFrame, *, parts: str = "each") -> pd.DataFrame:
    """Rows to draw from the top: each part by size, all together, the self-control; under the first kind of noise.

    parts: the design that parts are drawn from, ``each`` or ``main``.
    """
    order = {parts: 0, "all": 1, "self": 2}
    shown = attribution[attribution["design"].isin(order) & (attribution["kind"] == "ulp")].copy()
    shown["_order"] = shown["design"].map(order)
    return shown.sort_values(["_order", "systematic_sq"], ascending=[True, False], kind="stable")


def row_name(design: str, region: str) -> str:
    """How a row of the attribution is called in reports."""
    return {"all": "all together", "self": "self-control"}.get(design, region)


def systematic_forest(key: str, attribution: pd.DataFrame) -> Figure:
    """Systematic part of each part with whiskers of two standard errors; filled where it is told from zero."""
    crossed = "main" in set(attribution["design"])
    shown = part_rows(attribution, parts="main" if crossed else "each")
    return _forest(
        key,
        "Systematic part",
        (
            "Mean squared systematic difference of a token that this part makes, averaged over all states of the others. "
            if crossed
            else "Mean squared systematic difference of a token when only this part keeps its own rounding. "
        )
        + "Whiskers are two standard errors, "
        "from differences between sequences; a filled mark is responsible, a hollow one is not told from zero.",
        [row_name(d, r) for d, r in zip(shown["design"], shown["region"], strict=True)],
        shown,
        [LIGHT.faint if d == "self" else LIGHT.local for d in shown["design"]],
    )


def against_rollout(key: str, attribution: pd.DataFrame) -> Figure:
    """Systematic part of trainers held against the replicated engine: as it is, with one part aligned, with all of them."""
    held = attribution[(attribution["design"] == "rollout") & (attribution["kind"] == "ulp")]
    colours = [LIGHT.faint if r == "all" else LIGHT.local for r in held["region"]]
    return _forest(
        key,
        "Against the rollout engine",
        "Mean squared systematic difference of a token between this trainer and the real engine, both under the same noise. Whiskers are two "
        "standard errors; a hollow mark is not told from zero. Aligning gains where a mark lies left of the grey one, the trainer as it is.",
        [f"{aligned_name(r)} aligned" for r in held["region"]],
        held,
        colours,
    )


def aligned_name(region: str) -> str:
    """What is aligned in a row of a trainer held against the rollout engine."""
    return {"all": "nothing", "reference": "everything"}.get(region, region)


def _forest(
    key: str, title: str, caption: str, names: Sequence[str], shown: pd.DataFrame, colours: Sequence[str]
) -> Figure:
    """A mark with whiskers for each row; filled where the row is ``detectable``."""
    value = shown["systematic_sq"].to_numpy(dtype="float64")
    known = shown["systematic_sq_se"].to_numpy(dtype="float64")
    error = np.nan_to_num(known, posinf=0.0)  # one sequence has no error: a mark without whiskers
    seen = shown["detectable"].to_numpy(dtype=bool)
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": value.tolist(),
            "y": [label(n) for n in names],
            "error_x": _whiskers(DETECTABLE_WHISKER * error),
            "marker": {
                "size": 10,
                "color": [c if s else LIGHT.panel for c, s in zip(colours, seen, strict=True)],
                "line": {"width": 2, "color": list(colours)},
            },
            "customdata": [number(e, 2) for e in known],
            "hovertemplate": "%{y}: %{x:.2e} \u00b1 %{customdata} nats\u00b2<extra></extra>",
        }
    ]
    span = max(float(np.nanmax(np.abs(value) + DETECTABLE_WHISKER * error)), 1e-12)
    low = min(0.0, float(np.nanmin(value - DETECTABLE_WHISKER * error)))
    return Figure(
        key=key,
        title=title,
        caption=caption,
        data=data,
        layout=layout(
            40 * len(names) + 84,
            margin={"l": _margin(names), "r": 16, "t": 10, "b": 50},
            xaxis=axis(
                "nats\u00b2 per token",
                zeroline=True,
                exponentformat="power",
                range=[low - 0.06 * span, 1.06 * span],
                nticks=6,
            ),
            yaxis=_categories(gridcolor=LIGHT.grid),
        ),
        narrow={"xaxis": {"nticks": 4}},
        alt="; ".join(
            f"{n}: {number(v)} plus or minus {number(e)} nats squared, {'told' if s else 'not told'} from zero"
            for n, v, e, s in zip(names, value, known, seen, strict=True)
        ),
    )


def left_after_aligning(key: str, parts: Sequence[str], effects: pd.DataFrame, *, saturated: bool) -> Figure:
    """What is left when one part alone is aligned: of the systematic part, and of mean |d|, in percent of the trainer as it is."""
    series = (("systematic_sq", "systematic part", LIGHT.local), ("mean_abs_d", "mean |d|", LIGHT.muted))
    names = [*parts, "all"]
    shown = ["all of them" if n == "all" else n for n in names]
    data, told = [], []
    for metric, name, colour in series:
        rows = effects[effects["metric"] == metric].set_index("region").loc[names]
        whole = float(rows["as_is"].iloc[0])
        left = (100 * rows["aligned"] / whole if whole else 0 * rows["aligned"]).to_numpy(dtype="float64")
        error = (100 * rows["change_se"] / abs(whole) if whole else 0 * rows["aligned"]).to_numpy(dtype="float64")
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": left.tolist(),
                "y": [label(n) for n in shown],
                "marker": {"color": colour, "cornerradius": 2},
                "error_x": _whiskers(DETECTABLE_WHISKER * np.nan_to_num(error, posinf=0.0)),
                "customdata": [number(e, 2) for e in error],
                "hovertemplate": f"%{{y}} aligned: %{{x:.1f}} \u00b1 %{{customdata}} % of the {name} is left<extra></extra>",
            }
        )
        told += [f"{n} aligned leaves {number(v)} % of the {name}" for n, v in zip(shown, left, strict=True)]
    return Figure(
        key=key,
        title="What is left after aligning",
        caption="Percent of the trainer as it is, when this part alone is aligned; whiskers are two standard errors of the change. "
        + (
            "Mean |d| is saturated: whatever still differs gives nearly the whole gap, so it falls only when everything is aligned."
            if saturated
            else "Mean |d| has chaos in it, so it is a poor guide to causes."
        ),
        data=data,
        layout=layout(
            58 * len(shown) + 96,
            margin={"l": _margin(shown), "r": 16, "t": 30, "b": 50},
            showlegend=True,
            barmode="group",
            bargap=0.35,
            xaxis=axis("percent left", zeroline=True, nticks=6),
            yaxis=_categories(showgrid=False),
        ),
        narrow={"xaxis": {"nticks": 4}},
        alt="; ".join(told),
    )


def _whiskers(length: np.ndarray) -> dict[str, Any]:
    return {"type": "data", "array": length.tolist(), "color": LIGHT.faint, "thickness": 1.5, "width": 4}


def _categories(**over: Any) -> dict[str, Any]:
    """An axis of names from the top."""
    return axis(autorange="reversed", type="category", tickfont={"size": 12, "color": LIGHT.ink}, **over)


def _margin(names: Sequence[str]) -> int:
    """Left margin in pixels for names of a 12 px font."""
    return 24 + 7 * max(12, *(len(n) for n in names))
