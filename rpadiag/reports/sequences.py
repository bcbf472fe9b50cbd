"""The sequences furthest apart: how they are listed, and their tokens packed into the page to be opened there.

A run may have ten thousand prompts; a page holds the tokens of the worst NUM_SEQUENCES and says how many it leaves out.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.reports.figures_tokens import RATIO_HIGH, RATIO_LOW
from rpadiag.reports.view import Block, Column, SequenceList, SequenceRow, count, number, percent, plural
from rpadiag.runs import Run

if TYPE_CHECKING:
    import pandas as pd

NUM_SEQUENCES = 40
MAX_TOKENS = 1_500  # of one sequence, around its worst token
NAME_WIDTH = 64


def by_sequence(scored: pd.DataFrame) -> pd.DataFrame:
    """One row a sequence, furthest apart first: n, mean |d|, mean d, max |d| in nats, outside (share of tokens)."""
    d = scored["d"].to_numpy()
    outside = (d < np.log(RATIO_LOW)) | (d > np.log(RATIO_HIGH))
    parts = scored[["prompt"]].assign(n=1, mean=np.abs(d), shift=d, largest=np.abs(d), outside=outside)
    how = {"n": "sum", "mean": "mean", "shift": "mean", "largest": "max", "outside": "mean"}
    found = parts.groupby("prompt", sort=True).agg(how).reset_index()
    return found.sort_values("mean", ascending=False, kind="stable").reset_index(drop=True)


def sequences_block(run: Run, scored: pd.DataFrame, key: str) -> Block | None:
    """The worst sequences by the name of their prompt, each with its tokens; None without scored tokens."""
    if not len(scored):
        return None
    every = by_sequence(scored)
    shown = every.head(NUM_SEQUENCES)
    names = _names(run, [int(p) for p in shown["prompt"]])
    outliers = _outliers(run)
    longest = float(shown["mean"].max()) or 1.0
    rows = [
        SequenceRow(
            prompt=int(r["prompt"]),
            name=names.get(int(r["prompt"]), ""),
            cells=[number(r["mean"]), number(r["shift"]), number(r["largest"]), percent(r["outside"]), count(r["n"])],
            share=float(r["mean"]) / longest,
            outlier=int(r["prompt"]) in outliers,
        )
        for r in (shown.iloc[i] for i in range(len(shown)))
    ]
    return Block(
        key=f"{key}-prompts",
        title="Sequences furthest apart",
        lead=[
            "By mean |d| of their tokens. Open one to read its text, coloured by d: where the trainer finds a token less likely than "
            "the rollout did, and where more." + _far(outliers)
        ],
        sequences=SequenceList(
            key=f"{key}-sequences",
            columns=[
                Column(title="mean |d|, nats"),
                Column(title="mean d, nats", hint="positive: the trainer finds the text more likely"),
                Column(title="max |d|, nats"),
                Column(title="outside 0.8 to 1.2", hint="share of tokens whose ratio a usual clipping range cuts"),
                Column(title="tokens"),
            ],
            rows=rows,
            packed=_packed(scored, [r.prompt for r in rows]),
            left_out=_left_out(every),
        ),
    )


def _left_out(every: pd.DataFrame) -> str | None:
    if len(every) <= NUM_SEQUENCES:
        return None
    rest = every.iloc[NUM_SEQUENCES:]
    return (
        f"{plural(len(rest), 'sequence')} closer than these, mean |d| at most {number(rest['mean'].max())} nats "
        f"(median {number(rest['mean'].median())}), are counted in every number of this page and not listed. "
        "The run directory has them: rpadiag.open_run(RUN).tokens()."
    )


def _outliers(run: Run) -> set[int]:
    found = ((run.metrics.get("logprob") or {}).get("all") or {}).get("sequence_outliers") or []
    return {int(s["prompt"]) for s in found}


def _far(outliers: set[int]) -> str:
    if not outliers:
        return ""
    named = ", ".join(str(p) for p in sorted(outliers)[:8])
    more = f" and {len(outliers) - 8} more" if len(outliers) > 8 else ""
    return f" Far above the others, more than 5 robust standard deviations over the median: {named}{more}."


def _names(run: Run, prompts: Sequence[int]) -> dict[int, str]:
    """How each prompt begins, on one line."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = run.table("prompts", ["prompt", "text"])
    chosen = table.filter(pc.is_in(table["prompt"], value_set=pa.array(prompts, pa.int32()))).to_pylist()
    return {int(r["prompt"]): short(r["text"]) for r in chosen}


def short(text: Any, width: int = NAME_WIDTH) -> str:
    """The beginning of a text on one line; empty where there is none."""
    if not isinstance(text, str):
        return ""
    flat = " ".join(text[: 8 * width].split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _packed(scored: pd.DataFrame, prompts: Sequence[int]) -> str:
    """gzip of a JSON object by prompt, in base64: texts, d, p and q in nats, flips, and where generation begins."""
    rows = {int(g["prompt"].iloc[0]): g for _, g in scored[scored["prompt"].isin(prompts)].groupby("prompt")}
    data = {str(p): _tokens_of(rows[p]) for p in prompts}
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


def _tokens_of(rows: pd.DataFrame) -> dict[str, Any]:
    worst = int(np.argmax(np.abs(rows["d"].to_numpy())))
    start = min(max(0, worst - MAX_TOKENS // 2), max(0, len(rows) - MAX_TOKENS))
    part = rows.iloc[start : start + MAX_TOKENS]
    source = part["source"].astype(object).to_numpy()
    generated = np.flatnonzero(source != "prefill")
    a, b = (part[c].to_numpy(dtype="float64", na_value=np.nan) for c in ("p_argmax", "q_argmax"))
    flips = np.flatnonzero((a != b) & ~np.isnan(a) & ~np.isnan(b))
    return {
        "before": start,
        "after": len(rows) - start - len(part),
        "positions": [int(v) for v in part["position"]],
        "texts": [
            t if isinstance(t, str) and t else f"⟨{i}⟩" for t, i in zip(part["text"], part["token"], strict=True)
        ],
        "d": [float(f"{v:.4g}") for v in part["d"]],
        "p": [round(float(v), 4) for v in part["p"]],
        "q": [round(float(v), 4) for v in part["q"]],
        "flips": [int(i) for i in flips],
        "generated": int(generated[0]) if len(generated) else None,
    }
