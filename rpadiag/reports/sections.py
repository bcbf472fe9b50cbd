"""From runs to the sections of a page: which blocks there are, in which order, and what each says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports import figures_attribution, figures_sites, figures_tokens, pooling, records
from rpadiag.reports.glossary import METRICS
from rpadiag.reports.view import (
    Block,
    Column,
    Section,
    Statement,
    Table,
    Tile,
    TokenInContext,
    count,
    is_missing,
    number,
    percent,
    plural,
    words,
)
from rpadiag.runs import Run

if TYPE_CHECKING:
    import pandas as pd

NUM_FINDINGS = 5
NUM_WORST = 20
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def build(runs: Sequence[Run], key: str) -> Section:
    """One section. The first run gives headline and sites; a bisect run anywhere in ``runs`` gives the attribution."""
    bisects = [r for r in runs if r.has("attribution")]
    blocks = tuple(b for b in _blocks(runs[0], bisects, key) if b is not None)
    return replace(headline(runs), key=key, blocks=blocks, records=tuple(records.record(r) for r in runs))


def headline(runs: Sequence[Run]) -> Section:
    """A section without its blocks: what the runs are of, the verdict, the first numbers, the findings."""
    main = runs[0]
    verdict = main.verdict
    shown, further = _findings(runs, verdict)
    return Section(
        key="",
        title=_title(main),
        subtitle=_subtitle(runs),
        kind=str(verdict["kind"]) if verdict else None,
        sentence=_without_kind(verdict) if verdict else None,
        stacks=records.stack_lines(main.manifest),
        tiles=_tiles(main.metrics),
        findings=shown,
        further=further,
    )


def _without_kind(verdict: Mapping[str, Any]) -> str:
    """The sentence without a leading "Rounding only:", which the badge above it says."""
    sentence, lead = str(verdict["sentence"]), f"{verdict['kind']}:"
    if not sentence.lower().startswith(lead):
        return sentence
    rest = sentence[len(lead) :].lstrip()
    return rest[:1].upper() + rest[1:]


def _title(run: Run) -> str:
    name = records.model_name(run.manifest)
    what = {"compare": "Trainer against rollout", "bisect": "Which region is responsible", "rollouts": "Recorded rollouts"}
    return f"{what.get(str(run.manifest.get('command')), 'Run')}: {name}"


def _subtitle(runs: Sequence[Run]) -> str:
    prompts = runs[0].prompts(["num_tokens"])
    parts = [plural(len(prompts), "prompt"), plural(int(prompts["num_tokens"].sum()), "token")] if len(prompts) else []
    parts.append(str(runs[0].manifest.get("started_utc", ""))[:10])
    return ", ".join(p for p in parts if p)


def _findings(runs: Sequence[Run], verdict: Mapping[str, Any] | None) -> tuple[list[Statement], list[Statement]]:
    """Findings of all runs by rank, the first few apart. The verdict's sentence is not repeated."""
    seen: set[str] = {str(verdict["sentence"])} if verdict else set()
    ranked = sorted((f for r in runs for f in r.findings), key=lambda f: f.get("rank", 100))
    statements = []
    for f in ranked:
        if f["text"] not in seen:
            seen.add(f["text"])
            statements.append(Statement(severity=f["severity"], text=f["text"], about=f.get("site") or f.get("region")))
    return statements[:NUM_FINDINGS], statements[NUM_FINDINGS:]


def _tiles(metrics: Mapping[str, Any]) -> list[Tile]:
    values = (metrics.get("logprob") or {}).get("all") or {}
    if not values:
        return []
    floors = [f for f in metrics.get("floors") or [] if not is_missing(f.get("mean_abs_d"))]
    beside = ", ".join(f"{f['stack']} {number(f['mean_abs_d'], 2)}" for f in floors)
    tokens = f"n = {count(values.get('num_tokens'))} tokens"
    tiles = [
        Tile(label="Mean |d| per token", value=number(values.get("mean_abs_d")), unit="nats", compare=f"noise floors: {beside}" if beside else tokens),
        Tile(label="KL rollout \u2016 trainer (k3)", value=number(values.get("k3_kl")), unit="nats", compare=tokens),
        Tile(label="Ratio outside 0.8 to 1.2", value=percent(values.get("outside_ratio_share")), unit="", compare="of tokens, the usual clipping range"),
        Tile(label="Effective sample size", value=percent(values.get("rollout_is_eff_sample_size")), unit="", compare="left by importance weighting"),
        Tile(label="Exactly equal", value=percent(values.get("exact_share")), unit="", compare="of tokens, to the last bit"),
    ]  # fmt: skip
    return [t for t in tiles if t.value != number(None)]


def _blocks(main: Run, bisects: Sequence[Run], key: str) -> list[Block | None]:
    sites, tokens = main.sites(), main.tokens()
    compared = main.manifest.get("command") != "bisect"
    scored = pooling.scored_tokens(tokens)
    return [
        _sites_block(main, sites, key, compared=compared),
        *(_attribution_block(b, f"{key}-attribution{'' if i == 0 else i + 1}") for i, b in enumerate(bisects)),
        _logprob_block(scored, key),
        _worst_block(tokens, scored, key),
        _floors_block(main, key),
        _control_block(main, sites, key),
        _metrics_block(main.metrics, key),
        _prompts_block(main, scored, key),
    ]


def _sites_block(run: Run, sites: pd.DataFrame, key: str, *, compared: bool) -> Block | None:
    model = sites[sites["precision"] == "model"]
    if not len(model):
        return None
    by_site = pooling.pool_sites(sites, precision="model", by=("layer", "point"))
    by_point = pooling.pool_sites(sites, precision="model", by=("point",))
    layers = by_site["layer"].dropna()
    num_layers = int(layers.max()) + 1 if len(layers) else 0
    dtype = str((run.manifest.get("trainer") or {}).get("dtype", ""))
    figures = [figures_sites.site_map(f"{key}-map", by_site, by_point, num_layers)]
    depth = figures_sites.depth_panels(f"{key}-depth", by_site, num_layers, UNIT_ROUNDOFF.get(dtype))
    unmeasured = by_point[by_point["local_differing"].isna()]
    notes = [f"Not measured locally: {_reasons(unmeasured)}."] if len(unmeasured) else []
    absent = (run.manifest.get("sites") or {}).get("absent") or {}
    if absent:
        notes.append("Sites this model or stack does not have: " + "; ".join(f"{k} ({v})" for k, v in absent.items()) + ".")
    against = "the rollout engine" if compared else "the same model with its regions aligned"
    return Block(
        key=f"{key}-sites",
        title="Where divergence is made",
        lead=[f"Every site of the trainer held against {against}, in {dtype or 'the model dtype'}. Rounding differences spread: one made in the "
              "first layer reaches everything after it. Feeding each operation the other side\u2019s own input separates what is made at a site from what arrives there."],
        figures=[f for f in (*figures, depth) if f is not None],
        notes=notes,
    )  # fmt: skip


def _reasons(unmeasured: pd.DataFrame) -> str:
    return "; ".join(f"{p} ({words(r, 'no reason recorded')})" for p, r in zip(unmeasured["point"], unmeasured["local_reason"], strict=True))


def _logprob_block(scored: pd.DataFrame, key: str) -> Block | None:
    if not len(scored):
        return None
    return Block(
        key=f"{key}-logprobs",
        title="Log-probabilities",
        lead=["Both stacks score the same tokens. d is the trainer\u2019s log-probability of a token minus the rollout\u2019s; exp(d) is the importance ratio that reinforcement learning uses."],
        figures=[figures_tokens.logprob_histogram(f"{key}-histogram", scored), figures_tokens.token_scatter(f"{key}-scatter", scored)],
        side_by_side=True,
    )  # fmt: skip


def _worst_block(tokens: pd.DataFrame, scored: pd.DataFrame, key: str) -> Block | None:
    if not len(scored) or not float(np.abs(scored["d"]).max()) > 0:
        return None
    by_prompt = {int(p): g for p, g in tokens.groupby("prompt")}
    rows = []
    for _, t in pooling.largest(scored, NUM_WORST).iterrows():
        before, word, after = pooling.context_of(by_prompt[int(t["prompt"])], int(t["position"]))
        p_top, q_top = t["p_argmax"], t["q_argmax"]
        rows.append(
            TokenInContext(
                before=before,
                token=word,
                after=after,
                where=f"prompt {int(t['prompt'])}, position {int(t['position'])}, {t['source']}",
                cells=[number(t["d"]), number(np.exp(t["d"])), number(t["p"]), number(t["q"]), f"{count(_rank(t['p_rank']))} / {count(_rank(t['q_rank']))}"],
                argmax_differs=not (_rank(p_top) is None or _rank(q_top) is None) and int(p_top) != int(q_top),
            )
        )  # fmt: skip
    return Block(
        key=f"{key}-worst",
        title="Tokens furthest apart",
        lead=[f"The {len(rows)} tokens with the largest |d|, in their context. With rounding alone these are mostly tokens that both stacks find unlikely."],
        tokens=rows,
        token_columns=[
            Column(title="d, nats", hint="trainer minus rollout"), Column(title="ratio", hint="exp(d)"), Column(title="trainer, nats"),
            Column(title="rollout, nats"), Column(title="rank", hint="trainer / rollout; 1 is the most likely token"),
        ],
    )  # fmt: skip


def _rank(value: Any) -> int | None:
    return None if str(value) in ("<NA>", "nan", "None") else int(value)


def _floors_block(run: Run, key: str) -> Block | None:
    logprob = run.metrics.get("logprob") or {}
    floors = run.metrics.get("floors") or []
    gap = [(s, float(m["mean_abs_d"]), int(m.get("num_tokens", 0))) for s, m in logprob.items() if not is_missing(m.get("mean_abs_d")) and (s != "all" or len(logprob) <= 2)]
    if len(gap) == 2 and gap[0][0] == "all":  # one source only: "all" says it
        gap = gap[:1]
    gap = [("all tokens" if s == "all" else f"{s} tokens", v, n) for s, v, n in gap]
    if not floors or not gap:
        return None
    return Block(
        key=f"{key}-floors",
        title="Noise floors",
        lead=["Neither stack agrees with itself when its batching changes. A gap no larger than these floors says that the stacks round differently somewhere, and nothing about how much that matters."],
        figures=[figures_attribution.floor_bars(f"{key}-floor", gap, floors)],
    )  # fmt: skip


def _control_block(run: Run, sites: pd.DataFrame, key: str) -> Block | None:
    reason = (run.manifest.get("control") or {}).get("reason")
    title = "FP32 control"
    if not (sites["precision"] == "fp32").any():
        return Block(key=f"{key}-control", title=title, lead=[f"Not made: {reason}."]) if reason else None
    from rpadiag.compare.verdict import FP32_LOCAL_REL_L2

    by_site = pooling.pool_sites(sites, precision="fp32", by=("layer", "point"))
    by_point = pooling.pool_sites(sites, precision="fp32", by=("point",))
    finding = next((f["text"] for f in run.findings if f["code"] == "fp32-control"), None)
    return Block(
        key=f"{key}-control",
        title=title,
        lead=[finding] if finding else [],
        figures=[figures_sites.control_range(f"{key}-fp32", by_site, by_point, FP32_LOCAL_REL_L2)],
    )


def _attribution_block(run: Run, key: str) -> Block | None:
    rows = run.attribution()
    if not len(rows):
        return None
    state = run.metrics.get("attribution") or {}
    verdict = run.verdict
    told = [str(verdict["sentence"])] if verdict else []
    first = rows.iloc[0]
    about = (
        "Every forward is repeated with the embedding output moved by a random \u22121, 0 or +1 ULP per element. What survives the average over "
        f"{plural(int(first['num_replicates']), 'replicate')} is systematic and has a cause; the rest is chaos and has none. "
        f"n = {count(first['num_tokens'])} tokens."
    )
    figures = [figures_attribution.systematic_forest(f"{key}-forest", rows), figures_attribution.saturated_bars(f"{key}-bars", rows)]
    warning = None if state.get("ranked", True) else "The self-control is not zero within its error. Do not rank regions by these numbers."
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
    shown = shown.assign(_o=shown["design"].map(order)).sort_values(["_o", "systematic_sq"], ascending=[True, False], kind="stable")
    for i, (_, r) in enumerate(shown.iterrows()):
        if r["design"] == "all":
            emphasis.append(i)
        left = only.get(r["region"])
        cells.append([
            figures_attribution.row_name(r["design"], r["region"]), f"{number(r['systematic_sq'])} \u00b1 {number(r['systematic_sq_se'], 2)}",
            number(r["systematic_rms"]), "yes" if r["detectable"] else "no", number(r["chaotic_rms"]), number(r["mean_abs_d"]),
            percent(r["local_differing"]), number(None) if left is None else f"{number(left['systematic_sq'])} \u00b1 {number(left['systematic_sq_se'], 2)}",
        ])  # fmt: skip
    return Table(
        caption="Attribution by region: this region keeps its own rounding, all others are aligned",
        columns=[
            Column(title="region", numeric=False), Column(title="systematic, nats\u00b2 \u00b1 s.e."), Column(title="as rms, nats"),
            Column(title="told from 0", hint="more than two standard errors above zero"), Column(title="chaotic rms, nats"), Column(title="mean |d|, nats"),
            Column(title="made here", hint="share of elements that differ when fed the same input"), Column(title="left if aligned alone, nats\u00b2"),
        ],
        rows=cells,
        emphasis=emphasis,
    )  # fmt: skip


def _metrics_block(metrics: Mapping[str, Any], key: str) -> Block | None:
    logprob = metrics.get("logprob") or {}
    if not logprob:
        return None
    sources = [s for s in ("all", "prefill", "decode") if s in logprob]
    if len(sources) == 2:
        sources = ["all"]
    known = {m.name for m in METRICS}
    rows = [[m.name, *(_written(logprob[s].get(m.name), m.form) for s in sources), m.unit, m.text] for m in METRICS if m.name in logprob[sources[0]]]
    for name, value in logprob[sources[0]].items():
        if name not in known and isinstance(value, int | float) and not isinstance(value, bool):
            rows.append([name, *(_written(logprob[s].get(name), "number") for s in sources), "", ""])
    return Block(
        key=f"{key}-metrics",
        title="All log-probability metrics",
        lead=["Names and formulas as verl uses them, with the raw ratio. p is the trainer, q the rollout, d = p \u2212 q, in nats."],
        tables=[
            Table(
                caption="Log-probability metrics",
                columns=[Column(title="metric", numeric=False), *(Column(title=s) for s in sources), Column(title="unit", numeric=False), Column(title="what it says", numeric=False)],
                rows=rows,
            )
        ],
    )  # fmt: skip


def _written(value: Any, form: str) -> str:
    return {"count": count, "percent": percent}.get(form, number)(value)


def _prompts_block(run: Run, scored: pd.DataFrame, key: str) -> Block | None:
    prompts = run.prompts(["prompt", "num_tokens", "num_prompt_tokens", "text"])
    if not len(prompts) or not len(scored):
        return None
    mean = scored.assign(a=np.abs(scored["d"])).groupby("prompt")["a"].agg(["mean", "max"])
    prompts = prompts.merge(mean, left_on="prompt", right_index=True, how="left").sort_values("mean", ascending=False, kind="stable")
    shown = prompts.head(30)
    rows = [
        [str(int(r["prompt"])), _short(r["text"]), count(r["num_prompt_tokens"]), count(r["num_tokens"] - r["num_prompt_tokens"]), number(r["mean"]), number(r["max"])]
        for _, r in shown.iterrows()
    ]  # fmt: skip
    outliers = [str(s["prompt"]) for s in ((run.metrics.get("logprob") or {}).get("all") or {}).get("sequence_outliers") or []]
    far = f" Far above the others (more than 5 robust standard deviations over the median): {', '.join(outliers)}." if outliers else ""
    more = f"The 30 furthest apart of {count(len(prompts))}." if len(prompts) > 30 else "Furthest apart first."
    return Block(
        key=f"{key}-prompts",
        title="Prompts",
        lead=[more + far],
        tables=[
            Table(
                caption="Prompts by mean |d|",
                columns=[Column(title="#"), Column(title="text", numeric=False), Column(title="prompt tokens"), Column(title="generated"), Column(title="mean |d|, nats"), Column(title="max |d|, nats")],
                rows=rows,
            )
        ],
    )  # fmt: skip


def _short(text: Any, width: int = 110) -> str:
    if not isinstance(text, str):
        return "(no text)"
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "\u2026"
