"""Gates and findings in JUnit XML, Markdown and the page, hostile text included."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from unit.reports.written_runs import write_compare

from rpadiag.findings import Finding, GateResult, Judgement
from rpadiag.reports.html import write_report
from rpadiag.reports.junit import write_junit
from rpadiag.reports.markdown import fence_for, plain, write_markdown

HOSTILE = "</td><script>alert(1)</script> ]]> | `x` **b** @everyone [a](http://b) \x1b[31m\x00 \u202e &amp; <!--"


def gate(status: str, name: str = "mismatch") -> GateResult:
    return GateResult(name=name, gate="k3_kl<=1e-3", status=status, text=f"k3_kl is 2e-3 {HOSTILE}", run="runs/nightly")


JUDGEMENT = Judgement(
    gates=(gate("pass"), gate("fail", HOSTILE), gate("error")),
    changes=(Finding(code="packages-changed", severity="notice", text=f"vllm 1 to 2 {HOSTILE}"),),
    baselines=(f"runs/{HOSTILE}",),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_compare(tmp_path_factory.mktemp("runs") / "compare")


def test_junit_counts_failed_gates_as_failures_and_unanswered_ones_as_errors(run: Path, tmp_path: Path) -> None:
    root = ET.parse(write_junit([run], tmp_path / "j.xml", judgement=JUDGEMENT)).getroot()
    gates, runs = root
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "1", "1")
    assert (gates.get("tests"), gates.get("failures"), gates.get("errors")) == ("3", "1", "1")
    assert [c.find("failure") is not None for c in gates.findall("testcase")] == [False, True, False]
    assert [c.find("error") is not None for c in gates.findall("testcase")] == [False, False, True]
    (verdict,) = runs.findall("testcase")
    assert verdict.get("name") == "rounding only"
    assert "RoPE makes 23.0 %" in (verdict.findtext("system-out") or "")


def test_junit_without_gates_is_a_report_of_the_runs(run: Path, tmp_path: Path) -> None:
    root = ET.parse(write_junit([run], tmp_path / "j.xml")).getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("1", "0", "0")


def test_junit_keeps_hostile_text_as_text(run: Path, tmp_path: Path) -> None:
    path = write_junit([run], tmp_path / "j.xml", judgement=JUDGEMENT)
    failure = ET.parse(path).getroot().find(".//failure")
    assert failure is not None and failure.text is not None
    assert "</td><script>alert(1)</script> ]]>" in failure.text and "␛[31m␀" in failure.text
    assert b"<script" not in path.read_bytes() and b"\x1b" not in path.read_bytes()


def test_markdown_begins_with_the_gates(run: Path, tmp_path: Path) -> None:
    text = write_markdown([run], tmp_path / "m.md", judgement=JUDGEMENT).read_text(encoding="utf-8")
    assert text.startswith("## Gates: 3 gates: 1 failed and 1 cannot be answered.\n")
    assert "**Against the baseline**" in text and "## Trainer against rollout" in text


def test_markdown_takes_hostile_text_literally(run: Path, tmp_path: Path) -> None:
    text = write_markdown([run], tmp_path / "m.md", judgement=JUDGEMENT).read_text(encoding="utf-8")
    assert "<script" not in text and "@everyone" not in text and "http://b" not in text
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    rows = [line for line in text.splitlines() if line.startswith(("| \u2705", "| \u274c", "| \u26a0"))]
    assert len(rows) == 3
    assert all(len([i for i, c in enumerate(r) if c == "|" and r[i - 1] != "\\"]) == 5 for r in rows)


def test_plain_text_cannot_start_markup() -> None:
    assert plain("*a* <b> `c` [d](e) $x$ !") == r"\*a\* &lt;b&gt; \`c\` \[d\](e) \$x\$ \!"


def test_code_fence_is_longer_than_any_in_the_text() -> None:
    assert fence_for("a ``` b ````` c") == "``````"
    assert fence_for("plain") == "```"


def test_page_begins_with_the_gates_and_escapes_them(run: Path, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "r.html", judgement=JUDGEMENT).read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert page.index('id="gates"') < page.index('id="changes"') < page.index('id="s0-sites"')
    assert "1 failed and 1 cannot be answered" in page
