"""A finding is one statement with its numbers; the verdict is the statement that answers the run.

Findings are plain data: they are written to ``findings.json``, printed by the command line and drawn
by the reports, none of which may compute anything of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERDICTS = ("identical", "rounding only", "different computation", "not comparable", "attributed", "inconclusive")
SEVERITIES = ("info", "notice", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statement.

    code:     stable machine name, kebab-case, e.g. ``local-divergence``.
    severity: one of SEVERITIES; ``error`` means the numbers next to it must not be used.
    text:     one plain sentence, numbers with units and n.
    region, site: what it is about, where that is one thing.
    numbers:  the figures in the sentence, by name with units in the name.
    rank:     order of importance; 0 is first.
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
