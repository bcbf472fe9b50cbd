"""The blocks about gates and the baseline, first on the page because they decide."""

from __future__ import annotations

from pathlib import Path

from rpadiag.findings import GATE_WORDS, Judgement
from rpadiag.reports.view import Block, Column, Table


def gates_block(judgement: Judgement) -> Block | None:
    """Every gate on every run it is about; those that do not pass are set apart."""
    if not judgement.gates:
        return None
    named = any(g.name != g.gate for g in judgement.gates)
    rows = [
        [
            GATE_WORDS[g.status],
            *([g.name] if named else []),
            g.gate,
            Path(g.run).name,
            f"{g.text}{f' ({g.reason})' if g.reason else ''}",
        ]
        for g in judgement.gates
    ]
    titles = ("result", *(("name",) if named else ()), "gate", "run", "what was found")
    told = judgement.summary()
    undecided = any(g.status != "pass" for g in judgement.gates)
    return Block(
        key="gates",
        title="Gates",
        lead=[] if undecided or told is None else [told],
        warning=told if undecided else None,
        tables=[
            Table(
                caption="Gates",
                columns=[Column(title=t, numeric=False) for t in titles],
                rows=rows,
                emphasis=[i for i, g in enumerate(judgement.gates) if g.status != "pass"],
            )
        ],
    )


def changes_block(judgement: Judgement) -> Block | None:
    """What else is different from the baseline."""
    if not judgement.baselines:
        return None
    named = ", ".join(judgement.baselines)
    rows = [[f.severity, f.region or "", f.text] for f in judgement.changes]
    return Block(
        key="changes",
        title="Against the baseline",
        lead=[f"Held against {named}." if rows else f"Held against {named}: nothing that a run records changed."],
        tables=[
            Table(
                caption="Changed since the baseline",
                columns=[Column(title=t, numeric=False) for t in ("severity", "region", "what changed")],
                rows=rows,
                emphasis=[i for i, f in enumerate(judgement.changes) if f.severity in ("warning", "error")],
            )
        ]
        if rows
        else [],
    )
