"""Gates of a report: what they say about runs, and what changed since baselines and from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpadiag.findings import Finding, Judgement
    from rpadiag.runs import Run


def judged(runs: list[Path], texts: list[str], policy: Path | None, baseline: list[Path]) -> Judgement | None:
    """What the gates say, and what changed since the baselines; None without gates and baselines."""
    if not (texts or policy or baseline):
        return None
    from rpadiag.findings import Judgement
    from rpadiag.gates import changes_between, judge, load_policy, parse_gate
    from rpadiag.gates.judge import baseline_for
    from rpadiag.runs import open_run

    gates = [parse_gate(text) for text in texts]
    if policy is not None:
        loaded = load_policy(policy)
        gates = [*loaded.gates, *gates]
        baseline = baseline or ([loaded.baseline] if loaded.baseline is not None else [])
    opened, bases = [open_run(path) for path in runs], [open_run(path) for path in baseline]
    results = judge(gates, opened, bases)
    changes = []
    for run in opened:
        base = baseline_for(run, bases)
        changes += changes_between(base, run) if base is not None else []
    return Judgement(gates=tuple(results), changes=tuple(changes), baselines=tuple(str(b.path) for b in bases))


def changes_along(runs: list[Path]) -> list[tuple[str, str, Sequence[Finding]]]:
    """What changed from each run to the next of the same command."""
    from rpadiag.gates import changes_between
    from rpadiag.runs import open_run

    out: list[tuple[str, str, Sequence[Finding]]] = []
    before: dict[str, Run] = {}
    for run in (open_run(path) for path in runs):
        command = str(run.manifest.get("command"))
        if command in before:
            out.append((before[command].path.name, run.path.name, changes_between(before[command], run)))
        before[command] = run
    return out
