"""A short Markdown summary of runs, for the job summary of a CI system or a pull request comment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpadiag.errors import UsageError
from rpadiag.findings import Judgement
from rpadiag.printable import one_line, printable
from rpadiag.reports import records
from rpadiag.reports.html import grouped, whole_file
from rpadiag.reports.sections import headline
from rpadiag.reports.view import count, is_missing, number, percent
from rpadiag.runs import Run, open_run

SIGNS = {
    "identical": "\u2705",
    "rounding only": "\u2705",
    "different computation": "\u274c",
    "not comparable": "\u274c",
}
NUM_FINDINGS = 5


GATE_SIGNS = {"pass": "\u2705", "fail": "\u274c", "error": "\u26a0\ufe0f"}


def write_markdown(run_dirs: Sequence[Path], path: Path, *, judgement: Judgement | None = None) -> Path:
    """Summarise gates and runs, grouped as in the HTML page; errors as :func:`rpadiag.reports.html.write_report`."""
    if not run_dirs:
        raise UsageError("no run to summarise", hint="name at least one run directory")
    with whole_file(path) as part:
        runs = [open_run(d) for d in run_dirs]
        judged = [_judgement(judgement)] if judgement is not None else []
        part.write_text("\n".join([*judged, *(_summary(group) for group in grouped(runs))]), encoding="utf-8")
    return path


def _judgement(judgement: Judgement) -> str:
    """Gates first, because they decide; then what changed since the baseline."""
    lines = []
    if judgement.gates:
        lines += [f"## Gates: {plain(judgement.summary() or '')}", "", "| | gate | run | |", "|---|---|---|---|"]
        for g in judgement.gates:
            why = f" ({plain(g.reason)})" if g.reason else ""
            name = plain(g.name) if g.name == g.gate else f"{plain(g.name)}: {plain(g.gate)}"
            lines.append(f"| {GATE_SIGNS[g.status]} | {name} | {plain(Path(g.run).name)} | {plain(g.text)}{why} |")
        lines.append("")
    if judgement.baselines:
        named = ", ".join(plain(b) for b in judgement.baselines)
        lines += [f"**Against the baseline** {named}:", ""]
        lines += [f"- {plain(f.text)}" for f in judgement.changes] or ["- nothing that a run records changed"]
        lines.append("")
    return "\n".join(lines)


def _summary(runs: Sequence[Run]) -> str:
    top = headline(runs)
    lines = [f"## {plain(top.title)}", ""]
    if top.kind:
        lines += [
            f"{SIGNS.get(top.kind, chr(0x26A0))} **{top.kind[0].upper()}{top.kind[1:]}.** {plain(top.sentence or '')}",
            "",
        ]
    lines += [f"{plain(name)}: {plain(text)}  " for name, text in top.stacks]
    lines += _metrics_table(runs[0].metrics)
    statements = [*top.findings, *top.further][:NUM_FINDINGS]
    if statements:
        lines += [
            "",
            *(
                f"{i}. {'**' + s.severity + '** ' if s.severity in ('warning', 'error') else ''}{plain(s.text)}"
                for i, s in enumerate(statements, 1)
            ),
        ]
    commands = "\n".join(records.command_line(r.manifest) for r in runs)
    fence = fence_for(commands)
    lines += [
        "",
        "<details><summary>To repeat it, with another --run</summary>",
        "",
        f"{fence}sh",
        printable(commands),
        fence,
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def _metrics_table(metrics: Mapping[str, Any]) -> list[str]:
    values = (metrics.get("logprob") or {}).get("all") or {}
    if not values:
        return []
    rows = [
        ("mean abs d, nats", number(values.get("mean_abs_d"))),
        ("k3 KL, nats", number(values.get("k3_kl"))),
        ("ratio outside 0.8 to 1.2", percent(values.get("outside_ratio_share"))),
        ("effective sample size", percent(values.get("rollout_is_eff_sample_size"))),
        ("exactly equal", percent(values.get("exact_share"))),
    ]
    rows += [
        (f"noise floor, {f['stack']}: {f['text']}, nats", number(f["mean_abs_d"]))
        for f in metrics.get("floors") or []
        if not is_missing(f.get("mean_abs_d"))
    ]
    head = ["", f"| trainer against rollout | n = {count(values.get('num_tokens'))} tokens |", "|---|---:|"]
    return head + [f"| {plain(name)} | {value} |" for name, value in rows]


def plain(text: str) -> str:
    """Text that came from a model, prompt or path, on one line: Markdown, HTML, mentions and control characters taken literally."""
    flat = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    marked = re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", flat)
    return marked.replace("@", "@\u200b").replace("://", ":\u200b//")  # no notification, no link


def fence_for(text: str) -> str:
    """A code fence longer than any run of backticks in ``text``."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(3, longest + 1)
