"""Which findings ``rpadiag demo`` prints, and the page of its two runs begins with."""

from __future__ import annotations

from typing import Any

from rpadiag.findings import NUM_FINDINGS, one_of_each_kind


def finding(code: str, rank: int, severity: str = "info", text: str = "") -> dict[str, Any]:
    return {"code": code, "severity": severity, "text": text, "rank": rank, "region": None}


COMPARED = [
    finding("local-divergence", 1, "info", "RoPE"),
    finding("one-sided-rounding", 1, "notice"),
    finding("fp32-control", 2),
    finding("local-divergence", 4, "info", "RMSNorm"),
]


ANSWER = "rmsnorm and rope are responsible."


def first(compared: list[dict[str, Any]], bisected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_of_each_kind((*compared, *bisected), answer=ANSWER)[:NUM_FINDINGS]


def shown(compared: list[dict[str, Any]], bisected: list[dict[str, Any]]) -> list[str]:
    return [f["code"] for f in first(compared, bisected)]


def test_region_that_cannot_be_told_from_zero_is_not_among_the_three() -> None:
    bisected = [finding("systematic-region", 1), finding("systematic-region", 2), finding("systematic-total", 10)]
    assert shown(COMPARED, bisected) == ["one-sided-rounding", "local-divergence", "fp32-control"]
    assert shown(COMPARED[:1], bisected) == ["local-divergence", "systematic-total"]


def test_region_that_is_responsible_comes_before_the_control_whatever_its_place_among_the_regions() -> None:
    bisected = [finding("systematic-region", 1), finding("systematic-region", 1, "notice", "RMSNorm")]
    assert shown(COMPARED, bisected) == ["one-sided-rounding", "systematic-region", "local-divergence"]


def test_regions_that_are_responsible_are_one_finding_that_names_all_of_them() -> None:
    bisected = [finding("systematic-region", n, "notice", region) for n, region in ((1, "rmsnorm"), (2, "rope"))]
    assert first(COMPARED, bisected)[1]["text"] == ANSWER


def test_each_kind_is_shown_once_by_its_best() -> None:
    assert [f["text"] for f in first(COMPARED, []) if f["code"] == "local-divergence"] == ["RoPE"]


def test_errors_come_first() -> None:
    assert shown(COMPARED, [finding("self-control", 0, "error")])[0] == "self-control"
    assert shown([finding("local-mistake", 3, "error"), *COMPARED], [])[0] == "local-mistake"


def test_a_notice_comes_before_what_is_expected_whatever_its_rank() -> None:
    bisected = [finding("systematic-total", 0), finding("gap-saturated", 20, "notice"), finding("noise", 30, "warning")]
    assert shown(COMPARED, bisected) == ["noise", "one-sided-rounding", "gap-saturated"]
