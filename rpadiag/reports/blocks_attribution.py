"""The block of a bisection: which region is responsible, and what could be seen at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpadiag.reports import figures_attribution
from rpadiag.reports.view import Block, Column, Table, count, number, percent, plural
from rpadiag.runs import Run

if TYPE_CHECKING:
    import pandas as pd


def attribution_block(run: Run, key: str, *, alone: bool) -> Block | None:
    """alone: the section is about this run, so its verdict stands in the headline already."""
    rows = run.attribution()
    if not len(rows):
        return None
    state = run.metrics.get("attribution") or {}
    verdict = run.verdict
    told = [str(verdict["sentence"])] if verdict and not alone else []
    first = rows.iloc[0]
    about = (
        "Every forward is repeated with the embedding output moved by a random \u22121, 0 or +1 ULP per element. What survives the average over "
        f"{plural(int(first['num_replicates']), 'replicate')} is systematic and has a cause; the rest is chaos and has none. "
        f"n = {count(first['num_tokens'])} tokens."
    )
    figures = [
        figures_attribution.systematic_forest(f"{key}-forest", rows),
        figures_attribution.single_forward_bars(f"{key}-bars", rows, saturated=bool(state.get("saturated"))),
    ]
    warning = (
        None
        if state.get("ranked", True)
        else "The self-control is not zero within its error. Do not rank regions by these numbers."
    )
    return Block(
        key=key,
        title="Which region is responsible",
        lead=[*told, about],
        figures=figures,
        side_by_side=True,
        tables=[_attribution_table(rows)],
        notes=[_detectable_note(rows)],
        warning=warning,
    )


def _detectable_note(rows: pd.DataFrame) -> str:
    each = rows[rows["design"] == "each"]
    seen = list(each[each["detectable"]]["region"])
    unseen = list(each[~each["detectable"]]["region"])
    smallest = float(2 * each["systematic_sq_se"].median()) if len(each) else float("nan")
    parts = [f"Detectable here is anything above about {number(smallest, 2)} nats\u00b2 (two standard errors)"]
    parts.append(f"told from zero: {', '.join(seen) or 'none'}")
    parts.append(f"not told from zero: {', '.join(unseen) or 'none'}")
    return "; ".join(parts) + "."


def _attribution_table(rows: pd.DataFrame) -> Table:
    only = {r["region"]: r for _, r in rows[rows["design"] == "only"].iterrows()}
    cells, emphasis = [], []
    order = {"each": 0, "all": 1, "self": 2}
    shown = rows[rows["design"].isin(order)]
    shown = shown.assign(_o=shown["design"].map(order)).sort_values(
        ["_o", "systematic_sq"], ascending=[True, False], kind="stable"
    )
    for i, (_, r) in enumerate(shown.iterrows()):
        if r["design"] == "all":
            emphasis.append(i)
        left = only.get(r["region"])
        cells.append(
            [
                figures_attribution.row_name(r["design"], r["region"]),
                f"{number(r['systematic_sq'])} \u00b1 {number(r['systematic_sq_se'], 2)}",
                number(r["systematic_rms"]),
                "yes" if r["detectable"] else "no",
                number(r["chaotic_rms"]),
                number(r["mean_abs_d"]),
                percent(r["local_differing"]),
                number(None)
                if left is None
                else f"{number(left['systematic_sq'])} \u00b1 {number(left['systematic_sq_se'], 2)}",
            ]
        )
    return Table(
        caption="Attribution by region: this region keeps its own rounding, all others are aligned",
        columns=[
            Column(title="region", numeric=False),
            Column(title="systematic, nats\u00b2 \u00b1 s.e."),
            Column(title="as rms, nats"),
            Column(title="told from 0", hint="more than two standard errors above zero"),
            Column(title="chaotic rms, nats"),
            Column(title="mean |d|, nats"),
            Column(title="made here", hint="share of elements that differ when fed the same input"),
            Column(title="left if aligned alone, nats\u00b2"),
        ],
        rows=cells,
        emphasis=emphasis,
    )
