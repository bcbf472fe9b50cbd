"""A finding is one statement with its numbers; the verdict is the statement that answers the run.

Findings are plain data: they are written to ``findings.json``, printed by the command line and drawn
by the reports, none of which may compute anything of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERDICTS = ("identical", "rounding only", "different computation", "not comparable", "attributed", "inconclusive")
NUM_FINDINGS = 3  # that a page and a demonstration begin with
SEVERITIES = ("info", "notice", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statement.

    code:     stable machine name, kebab-case, e.g. ``local-divergence``.
    severity: one of SEVERITIES. ``error``: a mistake, or the numbers next to it must not be used; ``warning``: look at it before
              relying on the answer; ``notice``: worth acting on and no fault; ``info``: expected, such as rounding elsewhere.
    text:     one plain sentence, numbers with units and n.
    region, site: what it is about, where that is one thing.
    numbers:  the figures in the sentence, by name with units in the name.
    rank:     order of importance among findings of the same severity; 0 is first.
    """

    code: str
    severity: str
    text: str
    region: str | None = None
    site: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 100

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "numbers": dict(self.numbers)}


def most_important_first(findings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Findings as in ``findings.json``, by severity and then by rank; equal ones keep their order."""
    order = {name: -place for place, name in enumerate(SEVERITIES)}
    return [dict(f) for f in sorted(findings, key=lambda f: (order.get(str(f.get("severity")), 0), f.get("rank", 100)))]


def one_of_each_kind(findings: Iterable[Mapping[str, Any]], *, answer: str) -> list[dict[str, Any]]:
    """Of the findings of a comparison and a bisection together the most important of each code, most important first.

    A region that was not found responsible is no finding to show first: it says what is not known. Those that were are one
    finding, the bisection's ``answer``, which names all of them.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for finding in most_important_first(findings):
        if (finding["code"], finding["severity"]) != ("systematic-region", "info"):
            kinds.setdefault(finding["code"], finding)
    if (region := kinds.get("systematic-region")) is not None:
        kinds["systematic-region"] = {**region, "text": answer, "region": None}
    return list(kinds.values())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of a comparison, or ``attributed`` and ``inconclusive`` of a bisection.

    kind:     one of VERDICTS.
    sentence: what a tired engineer can act on.
    site:     where it is, for ``different computation``; or the first divergent site.
    evidence: the findings it rests on, most telling first.
    """

    kind: str
    sentence: str
    site: str | None = None
    evidence: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "sentence": self.sentence,
            "site": self.site,
            "evidence": [f.to_dict() for f in self.evidence],
        }


GATE_STATUSES = ("pass", "fail", "error")
GATE_WORDS = {"pass": "pass", "fail": "FAILED", "error": "no answer"}


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """What became of one gate on one run.

    name:   what the policy calls it; the gate itself where it has no name.
    gate:   the expression as written.
    status: one of GATE_STATUSES; ``error``: the run (or its baseline) has no number to hold against the bound.
    text:   one sentence with the numbers.
    run:    the run directory as given.
    value, bound: what was measured and what it was held against; text for gates on names.
    margin: how far beyond the bound a gate on a difference may be before it fails; None for absolute gates.
    reason: why the policy has this gate, in its author's words.
    """

    name: str
    gate: str
    status: str
    text: str
    run: str
    value: float | str | None = None
    bound: float | str | None = None
    margin: float | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What gates and a baseline said about the runs of a report.

    gates:    every gate on every run it is about. changes: what else is different from the baseline, most telling first.
    baselines: their run directories as given.
    """

    gates: tuple[GateResult, ...] = ()
    changes: tuple[Finding, ...] = ()
    baselines: tuple[str, ...] = ()

    def summary(self) -> str | None:
        """One sentence on the gates; None without any."""
        if not self.gates:
            return None
        count = {status: sum(g.status == status for g in self.gates) for status in GATE_STATUSES}
        noun = "gate" if len(self.gates) == 1 else "gates"
        parts = [
            f"{count['fail']} failed" if count["fail"] else "",
            f"{count['error']} cannot be answered" if count["error"] else "",
        ]
        told = " and ".join(p for p in parts if p)
        return f"{len(self.gates)} {noun}: {told or 'all pass'}."
