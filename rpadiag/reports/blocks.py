"""The blocks of a section about sites, tokens, floors, controls and metrics. Each is None where a run has no such data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports import figures_attribution, figures_control, figures_sites, figures_tokens, pooling, site_details
from rpadiag.reports.glossary import METRICS
from rpadiag.reports.view import (
    Block,
    Column,
    Table,
    TokenInContext,
    count,
    is_missing,
    number,
    percent,
    plural,
    spoken,
    words,
)
from rpadiag.runs import Run
from rpadiag.runs.schema import SOURCES

if TYPE_CHECKING:
    import pandas as pd

NUM_WORST = 20
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def sites_block(
    run: Run, sites: pd.DataFrame, histograms: site_details.Histograms, key: str, *, compared: bool
) -> Block | None:
    model = sites[sites["precision"] == "model"]
    if not len(model):
        return None
    by_site = pooling.pool_sites(sites, precision="model", by=("layer", "point"))
    by_point = pooling.pool_sites(sites, precision="model", by=("point",))
    layers = by_site["layer"].dropna()
    num_layers = int(layers.max()) + 1 if len(layers) else 0
    dtype = str((run.manifest.get("trainer") or {}).get("dtype", ""))
    fp32 = pooling.pool_sites(sites, precision="fp32", by=("layer", "point"))
    details = site_details.explorer(by_site, by_point, fp32, histograms, num_layers)
    figures = [figures_sites.site_map(f"{key}-map", by_site, by_point, num_layers, details)]
    depth = figures_sites.depth_panels(f"{key}-depth", by_site, num_layers, UNIT_ROUNDOFF.get(dtype))
    unmeasured = by_point[by_point["local_differing"].isna()]
    notes = [f"Not measured locally: {_reasons(unmeasured)}."] if len(unmeasured) else []
    absent = (run.manifest.get("sites") or {}).get("absent") or {}
    if absent:
        notes.append(
            "Sites this model or stack does not have: " + "; ".join(f"{k} ({v})" for k, v in absent.items()) + "."
        )
    against = "the rollout engine" if compared else "the same model with its regions aligned"
    return Block(
        key=f"{key}-sites",
        title="Where divergence is made",
        lead=[
            f"Every site of the trainer held against {against}, in {dtype or 'the model dtype'}. Rounding differences spread: one made in the "
            "first layer reaches everything after it. Feeding each operation the other side\u2019s own input separates what is made at a site from what arrives there."
        ],
        figures=[f for f in (*figures, depth) if f is not None],
        notes=notes,
    )


def _reasons(unmeasured: pd.DataFrame) -> str:
    return "; ".join(
        f"{p} ({words(r, 'no reason recorded')})"
        for p, r in zip(unmeasured["point"], unmeasured["local_reason"], strict=True)
    )


def logprob_block(scored: pd.DataFrame, key: str) -> Block | None:
    if not len(scored):
        return None
    return Block(
        key=f"{key}-logprobs",
        title="Log-probabilities",
        lead=[
            "Both stacks score the same tokens. d is the trainer\u2019s log-probability of a token minus the rollout\u2019s; exp(d) is the importance ratio that reinforcement learning uses."
        ],
        figures=[
            figures_tokens.logprob_histogram(f"{key}-histogram", scored),
            figures_tokens.token_scatter(f"{key}-scatter", scored),
        ],
        side_by_side=True,
    )


def worst_block(tokens: pd.DataFrame, scored: pd.DataFrame, key: str) -> Block | None:
    if not len(scored) or not float(np.abs(scored["d"]).max()) > 0:
        return None
    furthest = pooling.largest(scored, NUM_WORST)
    around = tokens[tokens["prompt"].isin(furthest["prompt"])]
    by_prompt = {int(g["prompt"].iloc[0]): g for _, g in around.groupby("prompt")}
    rows = []
    for _, t in furthest.iterrows():
        before, word, after = pooling.context_of(by_prompt[int(t["prompt"])], int(t["position"]))
        p_top, q_top = t["p_argmax"], t["q_argmax"]
        rows.append(
            TokenInContext(
                before=before,
                token=word,
                after=after,
                where=f"prompt {int(t['prompt'])}, position {int(t['position'])}, {t['source']}",
                cells=[
                    number(t["d"]),
                    number(np.exp(t["d"])),
                    number(t["p"]),
                    number(t["q"]),
                    f"{count(_rank(t['p_rank']))} / {count(_rank(t['q_rank']))}",
                ],
                argmax_differs=not (_rank(p_top) is None or _rank(q_top) is None) and int(p_top) != int(q_top),
            )
        )
    return Block(
        key=f"{key}-worst",
        title="Tokens furthest apart",
        lead=[f"The {plural(len(rows), 'token')} with the largest |d|, in their context."],
        tokens=rows,
        token_columns=[
            Column(title="d, nats", hint="trainer minus rollout"),
            Column(title="ratio", hint="exp(d)"),
            Column(title="trainer, nats"),
            Column(title="rollout, nats"),
            Column(title="rank", hint="trainer / rollout; 1 is the most likely token"),
        ],
    )


def _rank(value: Any) -> int | None:
    return None if str(value) in ("<NA>", "nan", "None") else int(value)


def floors_block(run: Run, key: str) -> Block | None:
    logprob = run.metrics.get("logprob") or {}
    floors = run.metrics.get("floors") or []
    gap = [
        (s, float(m["mean_abs_d"]), int(m.get("num_tokens", 0)))
        for s, m in logprob.items()
        if not is_missing(m.get("mean_abs_d")) and (s != "all" or len(logprob) <= 2)
    ]
    if len(gap) == 2 and gap[0][0] == "all":  # one source only: "all" says it
        gap = gap[:1]
    gap = [("all tokens" if s == "all" else f"{s} tokens", v, n) for s, v, n in gap]
    if not floors or not gap:
        return None
    return Block(
        key=f"{key}-floors",
        title="Noise floors",
        lead=[_floors_lead(floors)],
        figures=[figures_attribution.floor_bars(f"{key}-floor", gap, floors)],
    )


def _floors_lead(floors: Sequence[Mapping[str, Any]]) -> str:
    what = "A floor is one stack against itself on the same tokens with only its batching changed."
    known = [float(f["mean_abs_d"]) for f in floors if not is_missing(f.get("mean_abs_d"))]
    if known and max(known) == 0.0:
        return f"{what} Here each stack repeats itself to the last bit, so the whole gap lies between the two."
    return (
        f"{what} A gap no larger than a floor says that the stacks round differently somewhere, and nothing about "
        "how much that matters."
    )


def control_block(run: Run, sites: pd.DataFrame, key: str) -> Block | None:
    reason = (run.manifest.get("control") or {}).get("reason")
    title = "FP32 control"
    if not (sites["precision"] == "fp32").any():
        return Block(key=f"{key}-control", title=title, lead=[f"Not made: {reason}."]) if reason else None
    from rpadiag.compare.evidence import FP32_LOCAL_REL_L2

    by_site = pooling.pool_sites(sites, precision="fp32", by=("layer", "point"))
    by_point = pooling.pool_sites(sites, precision="fp32", by=("point",))
    finding = next((f["text"] for f in run.findings if f["code"] == "fp32-control"), None)
    return Block(
        key=f"{key}-control",
        title=title,
        lead=[spoken(finding)] if finding else [],
        figures=[figures_control.control_range(f"{key}-fp32", by_site, by_point, FP32_LOCAL_REL_L2)],
    )


def metrics_block(metrics: Mapping[str, Any], key: str) -> Block | None:
    logprob = metrics.get("logprob") or {}
    if not logprob:
        return None
    sources = [s for s in SOURCES if s in logprob]
    if len(sources) == 2:
        sources = ["all"]
    known = {m.name for m in METRICS}
    rows = [
        [m.name, *(_written(logprob[s].get(m.name), m.form) for s in sources), m.unit, m.text]
        for m in METRICS
        if m.name in logprob[sources[0]]
    ]
    for name, value in logprob[sources[0]].items():
        if name not in known and isinstance(value, int | float) and not isinstance(value, bool):
            rows.append([name, *(_written(logprob[s].get(name), "number") for s in sources), "", ""])
    return Block(
        key=f"{key}-metrics",
        title="All log-probability metrics",
        lead=[
            "Names and formulas as verl uses them, with the raw ratio. p is the trainer, q the rollout, d = p \u2212 q, in nats."
        ],
        tables=[
            Table(
                caption="Log-probability metrics",
                columns=[
                    Column(title="metric", numeric=False),
                    *(Column(title=s) for s in sources),
                    Column(title="unit", numeric=False),
                    Column(title="what it says", numeric=False),
                ],
                rows=rows,
            )
        ],
    )


def _written(value: Any, form: str) -> str:
    return {"count": count, "percent": percent}.get(form, number)(value)
