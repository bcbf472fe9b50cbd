"""The block of a bisection: what is responsible, how sure that is, what aligning would do, and what it would not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpadiag.reports import figures_attribution
from rpadiag.reports.view import MINUS, Block, Column, Table, count, is_missing, number, percent, plural, spoken
from rpadiag.runs import Run

if TYPE_CHECKING:
    import pandas as pd

# Of all metrics of effects.parquet, those a page shows: name there, title, what it says.
METRICS = (
    ("systematic_sq", "systematic, nats\u00b2", "mean squared systematic difference of a token"),
    ("weight_bias_sq", "weight bias\u00b2", "mean squared systematic part of rho \u2212 1, the bias of a token's policy-gradient weight"),
    ("sequence_log_ratio_sq", "sequence, nats\u00b2", "mean squared systematic logarithm of a sequence's ratio"),
    ("k3_kl", "k3 KL, nats", "of single forwards, chaos included"),
    ("mean_abs_d", "mean |d|, nats", "of single forwards, chaos included"),
    ("outside_ratio_share", "outside 0.8 to 1.2", "share of tokens whose ratio a usual clipping range cuts"),
    ("rollout_is_eff_sample_size", "effective sample size", "left by importance weighting"),
)  # fmt: skip


def attribution_block(run: Run, key: str, *, alone: bool) -> Block | None:
    """alone: the section is about this run, so its verdict stands in the headline already."""
    rows = run.attribution()
    if not len(rows):
        return None
    state = run.metrics.get("attribution") or {}
    verdict = run.verdict
    told = [spoken(str(verdict["sentence"]))] if verdict and not alone else []
    shown = figures_attribution.part_rows(rows)
    parts = list(shown[shown["design"] == "each"]["region"])
    effects = run.frame("effects")
    figures = [figures_attribution.systematic_forest(f"{key}-forest", rows)]
    tables = [_attribution_table(shown)]
    if len(effects):
        saturated = bool(state.get("saturated"))
        figures.append(figures_attribution.left_after_aligning(f"{key}-left", parts, effects, saturated=saturated))
        tables.append(_effects_table(parts, effects))
    if (rows["design"] == "rollout").any():
        figures.append(figures_attribution.against_rollout(f"{key}-rollout", rows))
    tables += [t for t in (_rollout_table(rows), _interaction_table(rows), _confirmation_table(state)) if t is not None]
    return Block(
        key=key,
        title="Which part is responsible",
        lead=[*told, _method(rows), _meaning()],
        figures=figures,
        side_by_side=True,
        tables=tables,
        notes=_notes(shown, state),
        warning=None
        if state.get("ranked", True)
        else "The self-control is not zero within its error. Do not rank parts by these numbers.",
    )


def attribution_numbers(run: Run) -> dict[str, tuple[float, float]]:
    """Part -> (systematic part, standard error) in nats squared; ``all`` together and ``self``, the control."""
    shown = figures_attribution.part_rows(run.attribution())
    return {
        (str(r["region"]) if r["design"] == "each" else str(r["design"])): (
            float(r["systematic_sq"]),
            float(r["systematic_sq_se"]),
        )
        for r in _records(shown)
    }


def _method(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    sequences = first["num_sequences"]
    inside = "" if is_missing(sequences) or str(sequences) == "<NA>" else f" in {plural(int(sequences), 'sequence')}"
    return (
        f"Every forward was repeated {count(first['num_replicates'])} times, each time with the embedding output moved by a random {MINUS}1, 0 or +1 ULP per element: "
        "too little to mean anything, enough to draw all later rounding anew. What survives the average is systematic; the rest is chaos. "
        f"n = {count(first['num_tokens'])} tokens{inside}: all of the prompts but the first of each, which has no log-probability, and none that a rollout generated."
    )


def _meaning() -> str:
    return (
        "The systematic part has a cause. It points the same way every time, biases the policy gradient, adds up over parts, and goes away when its part is aligned. "
        "Chaos has no cause that could be aligned: any difference, down to one flipped bit, moves every log-probability by as much. It averages out, "
        "and only batch-invariant kernels on both stacks with everything aligned, or more mantissa bits (FP16, FP32), remove it."
    )


def _notes(shown: pd.DataFrame, state: Mapping[str, Any]) -> list[str]:
    each = shown[shown["design"] == "each"]
    by_word: dict[str, list[str]] = {}
    for part, word in zip(each["region"], each["decision"], strict=True):
        by_word.setdefault(str(word), []).append(str(part))
    notes = ["; ".join(f"{word}: {', '.join(parts)}" for word, parts in by_word.items()) + "."]
    level = state.get("level")
    if level is not None:
        notes.append(
            f"Responsible means p \u2264 {number(level, 2)} after Holm\u2019s correction: the chance that any part is named by accident is at most that. "
            "Errors come from leaving out one sequence at a time."
        )
    added = state.get("additivity") or {}
    if added.get("whole_sq") is not None:
        notes.append(
            f"Sum of the parts {_pm(added, 'sum_of_parts_sq')} nats\u00b2, all together {_pm(added, 'whole_sq')}; difference {_pm(added, 'gap_sq')}."
        )
    replicated = state.get("replicated")
    if replicated:
        notes.append(
            "Only the trainer was replicated; the rollout engine is represented by the trainer with everything aligned."
            if len(replicated) == 1
            else "Both stacks were replicated under the same noise; the parts are told apart by trainers alone."
        )
    return notes


def _pm(row: Mapping[str, Any], name: str) -> str:
    """A value with its standard error; a dash where the run has none."""
    value = row.get(name)
    return number(None) if is_missing(value) else f"{number(value)} \u00b1 {number(row.get(f'{name}_se'), 2)}"


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as mappings from column to value."""
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _attribution_table(shown: pd.DataFrame) -> Table:
    cells, emphasis = [], []
    for i, r in enumerate(_records(shown)):
        if r["design"] == "all":
            emphasis.append(i)
        share = r["share"]
        cells.append(
            [
                figures_attribution.row_name(r["design"], r["region"]),
                r["decision"] if isinstance(r["decision"], str) else "",
                _pm(r, "systematic_sq"),
                number(None) if is_missing(share) else f"{percent(share)} \u00b1 {percent(r['share_se'])}",
                number(r["p_adjusted"], 2),
                _pm(r, "mean_shift"),
                number(r["chaotic_rms"]),
                number(r["mean_abs_d"]),
                r["end_to_end"].partition(",")[0] if isinstance(r["end_to_end"], str) else "",
                percent(r["local_differing"]),
                _pm(r, "naive_gain"),
            ]
        )
    return Table(
        caption="Attribution: this part keeps its own rounding, all others are aligned",
        columns=[
            Column(title="part", numeric=False),
            Column(title="decision", numeric=False),
            Column(title="systematic, nats\u00b2 \u00b1 s.e."),
            Column(title="share of the total"),
            Column(title="p", hint="of no systematic effect, after Holm's correction over all parts"),
            Column(title="mean shift, nats", hint="positive: this part's own rounding raises log-probabilities"),
            Column(title="chaotic rms, nats"),
            Column(title="mean |d|, nats", hint="of single forwards"),
            Column(
                title="end to end",
                numeric=False,
                hint="what mean |d| of single forwards could show; saturated: nothing, only systematic effects tell parts apart",
            ),
            Column(
                title="made here", hint="share of elements that differ when fed the same input; residual adds left out"
            ),
            Column(
                title="naive gain, nats",
                hint="fall of mean |d| of one forward when this part alone is aligned; misleads",
            ),
        ],
        rows=cells,
        emphasis=emphasis,
    )


def _effects_table(parts: Sequence[str], effects: pd.DataFrame) -> Table:
    found = {(r["region"], r["metric"]): r for r in _records(effects)}
    first = {name: found[parts[0], name] for name, _, _ in METRICS}
    rows = [["(as it is)", *(number(first[name]["as_is"]) for name, _, _ in METRICS)]]
    for part in [*parts, "all"]:
        changed = (_changed(found[part, name]) for name, _, _ in METRICS)
        rows.append(["everything" if part == "all" else part, *changed])
    rows.append(["chaos alone", *(number(first[name]["floor"]) for name, _, _ in METRICS)])
    return Table(
        caption="What aligning a part alone changes, \u00b1 s.e.; above, the trainer as it is, below, what chaos alone leaves",
        columns=[
            Column(title="aligned", numeric=False),
            *(Column(title=title, hint=hint) for _, title, hint in METRICS),
        ],
        rows=rows,
        emphasis=[0, len(rows) - 1],
    )


def _changed(row: Mapping[str, Any]) -> str:
    sign = "+" if row["change"] > 0 else ""
    return f"{sign}{_pm(row, 'change')}"


def _rollout_table(rows: pd.DataFrame) -> Table | None:
    found = rows[rows["design"] == "rollout"]
    if not len(found):
        return None
    return Table(
        caption="Trainers against the rollout engine, both stacks under the same noise",
        columns=[
            Column(title="aligned", numeric=False),
            Column(title="systematic, nats\u00b2 \u00b1 s.e."),
            Column(title="mean shift, nats"),
            Column(title="mean |d|, nats", hint="of single forwards, chaos included"),
        ],
        rows=[
            [
                figures_attribution.aligned_name(r["region"]),
                _pm(r, "systematic_sq"),
                _pm(r, "mean_shift"),
                number(r["mean_abs_d"]),
            ]
            for r in _records(found)
        ],
    )


def _interaction_table(rows: pd.DataFrame) -> Table | None:
    found = rows[rows["design"].isin(("main", "interaction"))]
    if not len(found):
        return None
    return Table(
        caption="Main effects, averaged over the state of the other parts, and two-way interactions",
        columns=[
            Column(title="parts", numeric=False),
            Column(title="systematic, nats\u00b2 \u00b1 s.e."),
            Column(title="mean shift, nats"),
            Column(title="p", hint="after Holm's correction"),
        ],
        rows=[
            [r["region"], _pm(r, "systematic_sq"), _pm(r, "mean_shift"), number(r["p_adjusted"], 2)]
            for r in _records(found)
        ],
    )


def _confirmation_table(state: Mapping[str, Any]) -> Table | None:
    found = state.get("confirmation") or []
    if not found:
        return None
    return Table(
        caption="The same under a second kind of noise",
        columns=[
            Column(title="part", numeric=False),
            Column(title="first, nats\u00b2 \u00b1 s.e."),
            Column(title="second, nats\u00b2 \u00b1 s.e."),
            Column(title="shared, nats\u00b2 \u00b1 s.e.", hint="what both see; equal to the first when they agree"),
            Column(title="correlation", hint="of the two systematic differences over tokens; 1 when both see the same"),
            Column(title="agrees", numeric=False),
        ],
        rows=[
            [
                "all together" if c["part"] == "all" else c["part"],
                _pm(c, "first_sq"),
                _pm(c, "second_sq"),
                _pm(c, "shared_sq"),
                _pm(c, "correlation"),
                "changes nothing" if c.get("changes_nothing") else "yes" if c.get("agrees") else "no",
            ]
            for c in found
        ],
    )
