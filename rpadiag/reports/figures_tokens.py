"""Figures of scored tokens: how far they are apart, and which ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports import pooling
from rpadiag.reports.figures import axis, label, layout, rule
from rpadiag.reports.theme import LIGHT
from rpadiag.reports.view import Column, Figure, Table, count, number, percent, plural

if TYPE_CHECKING:
    import pandas as pd

MAX_POINTS = 2_500
MIN_BINS, MAX_BINS = 15, 61
RATIO_LOW, RATIO_HIGH = 0.8, 1.2


def logprob_histogram(key: str, scored: pd.DataFrame) -> Figure:
    """Share of tokens by d = p - q, prefill and decode apart; counts on a log axis so that tails show."""
    d = scored["d"].to_numpy()
    reach = max(1.05 * float(np.quantile(np.abs(d), 0.999)), 1e-6)
    num_bins = min(MAX_BINS, max(MIN_BINS, 2 * math.isqrt(len(d)) + 1))  # odd: 0 falls mid-bin
    groups = [(str(s), g["d"].to_numpy()) for s, g in scored.groupby("source", sort=True)]
    groups.sort(key=lambda item: item[0] != "prefill")
    data = [_distribution(source, values, reach, num_bins, main=i == 0) for i, (source, values) in enumerate(groups)]
    ratios = [r for r in (RATIO_LOW, RATIO_HIGH) if 0.2 * reach < abs(math.log(r)) < reach]  # closer, labels collide
    exact = float(np.mean(d == 0))
    beyond = int(np.sum(np.abs(d) > reach))
    rows = [[s, count(len(v)), *_quantiles(v)] for s, v in groups]
    figure_layout = layout(
        320,
        showlegend=True,
        margin={"l": 60, "r": 12, "t": 30, "b": 44},
        xaxis=axis("d = trainer \u2212 rollout, nats", zeroline=True, range=[-reach, reach]),
        yaxis=axis("share of tokens", type="log", tickformat="~%", dtick=1, range=[math.log10(0.6 / len(d)), 0]),
        shapes=[rule(x0=math.log(r)) for r in ratios],
        annotations=[_note(math.log(r), f"ratio {r}") for r in ratios],
    )
    return Figure(
        key=key,
        title="How far single tokens are apart",
        caption=f"Log-probability of each token, trainer minus rollout. {percent(exact)} of tokens agree to the last bit"
        + (f"; the end bins also hold {plural(beyond, 'token')} further out." if beyond else "."),
        data=data,
        layout=figure_layout,
        narrow={"height": 280},
        alt=f"Histogram of the log-probability difference of {count(len(d))} tokens. Half of them are within "
        f"{number(float(np.median(np.abs(d))))} nats, the largest is {number(float(np.max(np.abs(d))))} nats.",
        table=Table(
            caption="Quantiles of d in nats",
            columns=[
                Column(title="tokens", numeric=False),
                Column(title="n"),
                *(Column(title=t) for t in _QUANTILE_NAMES),
            ],
            rows=rows,
        ),
    )


def _distribution(source: str, values: np.ndarray, reach: float, num_bins: int, *, main: bool) -> dict[str, Any]:
    """Bars for the main source, a stepped outline for the other, so that both can be read where they overlap."""
    centres, counts = pooling.histogram(values, num_bins, reach)
    trace: dict[str, Any] = {
        "name": f"{label(source)} (n = {count(len(values))})",
        "x": [round(float(c), 9) for c in centres],
        "y": [float(c) / len(values) if c else None for c in counts],
        "customdata": [int(c) for c in counts],
        "hovertemplate": "d = %{x:.4f} nats<br>%{customdata} tokens, %{y:.2%}<extra>" + label(source) + "</extra>",
    }
    if main:
        width = float(centres[1] - centres[0])
        return trace | {
            "type": "bar",
            "width": 0.86 * width,
            "marker": {"color": LIGHT.local, "opacity": 0.5, "line": {"width": 0}},
        }
    return trace | {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {"width": 1.75, "color": LIGHT.second, "shape": "hvh"},
        "marker": {"size": 3, "color": LIGHT.second},
    }


_QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)
_QUANTILE_NAMES = ("min", "1 %", "25 %", "median", "75 %", "99 %", "max")


def _quantiles(values: np.ndarray) -> list[str]:
    return [number(float(np.quantile(values, x))) for x in _QUANTILES]


def _note(x: float, text: str) -> dict[str, Any]:
    left = x > 0
    return {
        "x": x,
        "xref": "x",
        "y": 1,
        "yref": "paper",
        "text": text,
        "showarrow": False,
        "yanchor": "top",
        "xanchor": "right" if left else "left",
        "xshift": -3 if left else 3,
        "font": {"size": 11, "color": LIGHT.faint},
    }


def token_scatter(key: str, scored: pd.DataFrame) -> Figure:
    """d against the rollout's log-probability: whether it is the unlikely tokens that disagree."""
    sample = pooling.spread_sample(scored, MAX_POINTS)
    flips = _flips(sample)
    data = [
        _points(sample[~flips], "same most likely token", LIGHT.local, "circle"),
        _points(sample[flips], "most likely token differs", LIGHT.second, "diamond"),
    ]
    q, d = scored["q"].to_numpy(), scored["d"].to_numpy()
    reach = 1.08 * max(float(np.max(np.abs(sample["d"]))), 1e-6)
    shown = (
        ""
        if len(sample) == len(scored)
        else f" {count(len(sample))} of {count(len(scored))} tokens are drawn, the largest differences all."
    )
    rows = _by_probability(q, d)
    return Figure(
        key=key,
        title="Which tokens disagree",
        caption=f"Difference against the rollout\u2019s own log-probability: likely tokens to the right.{shown}",
        data=[trace for trace in data if trace["x"]],
        layout=layout(
            320,
            showlegend=True,
            margin={"l": 60, "r": 12, "t": 30, "b": 44},
            xaxis=axis("log-probability under the rollout, nats"),
            yaxis=axis("d, nats", zeroline=True, range=[-reach, reach]),
            shapes=[rule(y0=math.log(r)) for r in (RATIO_LOW, RATIO_HIGH) if abs(math.log(r)) < reach],
        ),
        narrow={"height": 280},
        alt="Scatter of the difference against the rollout's log-probability. "
        + "; ".join(f"{r[0]}: mean |d| {r[2]} nats" for r in rows if r[1] != "0"),
        table=Table(
            caption="Mean |d| by the probability that the rollout gave the token",
            columns=[
                Column(title="probability", numeric=False),
                Column(title="tokens"),
                Column(title="mean |d|, nats"),
            ],
            rows=rows,
        ),
    )


def _flips(scored: pd.DataFrame) -> np.ndarray:
    p = scored["p_argmax"].to_numpy(dtype="float64", na_value=np.nan)
    q = scored["q_argmax"].to_numpy(dtype="float64", na_value=np.nan)
    return np.asarray((p != q) & ~np.isnan(p) & ~np.isnan(q))


def _points(rows: pd.DataFrame, name: str, colour: str, symbol: str) -> dict[str, Any]:
    words = [
        label(t if isinstance(t, str) else f"\u27e8{i}\u27e9") for t, i in zip(rows["text"], rows["token"], strict=True)
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(float(v), 5) for v in rows["q"]],
        "y": [round(float(v), 6) for v in rows["d"]],
        "customdata": [[w, int(a), int(b)] for w, a, b in zip(words, rows["prompt"], rows["position"], strict=True)],
        "marker": {"color": colour, "size": 5, "symbol": symbol, "opacity": 0.6, "line": {"width": 0}},
        "hovertemplate": "<b>%{customdata[0]}</b><br>d = %{y:.4f} nats<br>rollout %{x:.3f} nats"
        "<br>prompt %{customdata[1]}, position %{customdata[2]}<extra></extra>",
    }


def _by_probability(q: np.ndarray, d: np.ndarray) -> list[list[str]]:
    bounds = ((0.9, 1.0), (0.5, 0.9), (0.1, 0.5), (0.01, 0.1), (0.0, 0.01))
    probability = np.exp(q)
    rows = []
    for low, high in bounds:
        inside = (probability > low) & (probability <= high) if high < 1 else probability > low
        mean = number(float(np.mean(np.abs(d[inside])))) if inside.any() else number(None)
        rows.append([f"{low:g} to {high:g}", count(int(inside.sum())), mean])
    return rows
