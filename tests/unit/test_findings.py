"""Findings and verdicts are plain data that JSON can hold."""

from __future__ import annotations

import dataclasses
import json
from types import MappingProxyType

import pytest

from rpadiag.findings import SEVERITIES, VERDICTS, Finding, Verdict

FINDING = Finding(code="local-divergence", severity="warning", text="x", region="rope", numbers={"differing": 0.25})


def test_finding_becomes_json_and_back() -> None:
    again = Finding(**json.loads(json.dumps(FINDING.to_dict())))
    assert again == FINDING


def test_numbers_may_be_any_mapping() -> None:
    frozen = dataclasses.replace(FINDING, numbers=MappingProxyType({"n": 1}))
    assert frozen.numbers["n"] == 1
    assert Finding(code="c", severity="info", text="t").to_dict()["numbers"] == {}


def test_finding_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FINDING.rank = 1  # type: ignore[misc]


def test_verdict_carries_its_evidence() -> None:
    verdict = Verdict(kind="rounding only", sentence="s", site="embed", evidence=(FINDING,))
    found = json.loads(json.dumps(verdict.to_dict()))
    assert found == {"kind": "rounding only", "sentence": "s", "site": "embed", "evidence": [FINDING.to_dict()]}


def test_vocabularies_are_closed_lists() -> None:
    of_comparisons = ("identical", "rounding only", "different computation", "not comparable")
    assert (*of_comparisons, "attributed", "inconclusive") == VERDICTS
    assert SEVERITIES == ("info", "notice", "warning", "error")
