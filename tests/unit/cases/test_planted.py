"""Every planted fault gets the right site, region, severity, words and solved numbers."""

from __future__ import annotations

import pytest
from planted_variants import CASES

from rpadiag.compare.explain import FINDING_SEVERITY
from rpadiag.workflows.diagnose import diagnose


@pytest.mark.parametrize("name", list(CASES))
def test_planted_fault_is_named_with_its_site_region_severity_and_numbers(name: str) -> None:
    build, expected = CASES[name]
    a, b, inputs = build()
    found = diagnose(a, b, inputs)
    assert (found.first_site, found.region, found.severity) == (
        expected.first_site,
        expected.region,
        expected.severity,
    ), found.text
    for word in expected.words:
        assert word in found.text
    for key, value in expected.numbers.items():
        assert found.findings[0].numbers[key] == pytest.approx(value, rel=0.02), found.text
    assert all(f.severity == FINDING_SEVERITY[f.numbers["site_severity"]] for f in found.findings)
