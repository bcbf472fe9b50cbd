"""The answer of a bisection for a person: verdict, findings, and one table with error bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpadiag.cli.output import NOT_MEASURED, number, percent, print_findings, print_table, say

if TYPE_CHECKING:
    from rpadiag.runs.reader import Run

DESIGNS = ("each", "all", "self")
COLUMNS = ("design", "region", "kind", "systematic_sq", "systematic_sq_se", "share", "share_se", "p_adjusted", "decision",
           "mean_shift", "mean_shift_se", "chaotic_rms", "local_differing", "naive_gain", "naive_gain_se")  # fmt: skip
# What aligning a part does, of all that effects.parquet holds: name there, name here.
METRICS = (
    ("systematic_sq", "systematic, nats²"),
    ("weight_bias_sq", "weight bias²"),
    ("sequence_log_ratio_sq", "sequence, nats²"),
    ("k3_kl", "k3_kl, nats"),
    ("mean_abs_d", "mean |d|, nats"),
    ("rollout_is_eff_sample_size", "eff. sample size"),
)


def show(run: Run) -> None:
    """Verdict, evidence, numbers."""
    verdict = run.verdict
    if verdict is not None:
        say(verdict["sentence"], style="bold")
        say()
    print_findings(run.findings)
    found = [row for row in run.table("attribution", COLUMNS).to_pylist() if row["kind"] == "ulp"]
    crossed = {row["region"]: row for row in found if row["design"] == "main"}
    rows = [_with_main(row, crossed) for row in found if row["design"] in DESIGNS]
    rows.sort(key=lambda row: (DESIGNS.index(row["design"]), -row["systematic_sq"]))
    header = (
        "left unaligned",
        "systematic, nats²",
        "share",
        "p",
        "mean shift, nats",
        "chaos, nats",
        "made locally",
        "decision",
    )
    print_table(
        "Attribution: systematic distance from the trainer with everything aligned", header, [_row(r) for r in rows]
    )
    _show_effects(run, [row["region"] for row in rows if row["design"] == "each"])
    _show_rollout([row for row in found if row["design"] == "rollout"])
    pairs = [row for row in found if row["design"] in ("main", "interaction")]
    if pairs:
        cells = [
            (r["region"], _measured(r, "systematic_sq"), _measured(r, "mean_shift"), number(r["p_adjusted"]))
            for r in pairs
        ]
        print_table("Main effects and interactions", ("parts", "systematic, nats²", "mean shift, nats", "p"), cells)
    say()
    say(f"run: {run.path}")


def _with_main(row: Mapping[str, Any], crossed: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of one part with the mean square that its decision rests on: of its main effect, where there is one."""
    main = crossed.get(row["region"]) if row["design"] == "each" else None
    return row if main is None else {**row, **{k: main[k] for k in ("systematic_sq", "systematic_sq_se")}}


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row_name(row["design"], row["region"]),
        _measured(row, "systematic_sq"),
        NOT_MEASURED if row["share"] is None else f"{100 * row['share']:.0f} ± {100 * row['share_se']:.0f} %",
        number(row["p_adjusted"], digits=2),
        _measured(row, "mean_shift"),
        number(row["chaotic_rms"]),
        percent(row["local_differing"]),
        row["decision"] or "",
    )


def _show_effects(run: Run, parts: Sequence[str]) -> None:
    """What aligning each part alone does to the metrics of compare, and what aligning everything does."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {
        (row["region"], row["metric"]): row for row in run.table("effects").to_pylist()
    }
    if not found:
        return
    first = parts[0]
    rows = [("(as it is)", *(number(found[first, metric]["as_is"]) for metric, _ in METRICS))]
    for part in [*parts, "all"]:
        cells = []
        for metric, _ in METRICS:
            row = found[part, metric]
            cells.append(f"{_signed(row['change'])} ± {number(row['change_se'], digits=2)}")
        rows.append((part, *cells))
    rows.append(("(chaos alone)", *(number(found[first, metric]["floor"]) for metric, _ in METRICS)))
    print_table("What aligning a part alone changes, ± s.e.", ("aligned", *(name for _, name in METRICS)), rows)


def _show_rollout(rows: Sequence[Mapping[str, Any]]) -> None:
    """Trainers held against the replicated engine, where it was."""
    if not rows:
        return
    from rpadiag.reports.figures_attribution import aligned_name

    cells = [
        (
            aligned_name(r["region"]),
            _measured(r, "systematic_sq"),
            _measured(r, "mean_shift"),
            number(r["chaotic_rms"]),
        )
        for r in rows
    ]
    print_table(
        "Against the rollout engine, both stacks under the same noise",
        ("aligned", "systematic, nats²", "mean shift, nats", "chaos, nats"),
        cells,
    )


def _signed(value: float | None) -> str:
    return NOT_MEASURED if value is None else ("+" if value > 0 else "") + number(value, digits=2)


def _measured(row: Mapping[str, Any], name: str) -> str:
    """A value with its standard error."""
    return f"{number(row[name])} ± {number(row[f'{name}_se'], digits=2)}"


def row_name(design: str, region: str) -> str:
    """What was left unaligned in that row."""
    return {"each": region, "all": "everything", "self": "nothing (self-control)"}[design]
