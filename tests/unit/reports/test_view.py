"""How numbers are written, commands repeated, and the Markdown summary."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.errors import InputError, NotComparableError
from rpadiag.reports.markdown import plain, write_markdown
from rpadiag.reports.records import command_line, model_name
from rpadiag.reports.view import count, number, percent, plural
from rpadiag.workflows.options import BisectOptions, CompareOptions


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (0.03912, "0.0391"), (1.0, "1.00"), (12.345, "12.3"), (2.35e-4, "2.35e\u22124"), (-0.61, "\u22120.610"),
        (123456.0, "1.23e5"), (1234.4, "1,234"), (None, "\u2013"), (math.nan, "\u2013"), (math.inf, "infinite"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_significant_digits(value: float | None, written: str) -> None:
    assert number(value) == written


@pytest.mark.parametrize(
    ("share", "written"),
    [
        (0.0, "0\u00a0%"),
        (1.0, "100\u00a0%"),
        (0.208, "20.8\u00a0%"),
        (2e-5, "0.0020\u00a0%"),
        (0.99999, ">\u00a099.9\u00a0%"),
        (None, "\u2013"),
    ],
)
def test_zero_and_hundred_percent_are_written_only_when_exact(share: float | None, written: str) -> None:
    assert percent(share) == written


def test_counts_have_thousands_separators_and_plurals() -> None:
    assert (count(2712), plural(1, "token"), plural(2712, "token")) == ("2,712", "1 token", "2,712 tokens")


def test_command_line_is_quoted_and_holds_the_given_options() -> None:
    manifest = {
        "command": "compare",
        "options": {
            "effective": {
                "model": "my model",
                "prompts": "p.txt",
                "run": "out",
                "align": ["rope", "swiglu"],
                "sites": ["*norm", "attn"],
                "seed": 0,
            },
            "given": {
                "align": ["rope", "swiglu"],
                "sites": ["*norm", "attn"],
                "trust_remote_code": True,
                "revision": None,
            },
        },
    }
    assert shlex.split(command_line(manifest).replace("\\\n", " ")) == [
        "rpadiag", "compare", "my model", "p.txt", "--run", "out", "--align", "rope,swiglu", "--sites", "*norm", "--sites", "attn", "--trust-remote-code",
    ]  # fmt: skip


def test_model_is_named_without_its_directories() -> None:
    assert model_name({"options": {"effective": {"model": "/data/models/tiny/"}}}) == "tiny"
    assert model_name({"options": {"effective": {"model": "org/name"}}}) == "org/name"


def test_markdown_summary_has_verdict_metrics_findings_and_commands(tmp_path: Path) -> None:
    runs = [write_compare(tmp_path / "compare"), write_bisect(tmp_path / "bisect")]
    text = write_markdown(runs, tmp_path / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("## Trainer against rollout: smollm2-135m")
    assert "**Rounding only.** Trainer and vLLM 0.32.0" in text
    assert "| k3 KL, nats |" in text and "noise floor, rollout" in text
    assert "RoPE makes 23.0 % of its elements differ" in text
    assert "rpadiag bisect" in text
    assert len(text) < 4_000


def test_markdown_takes_foreign_text_literally() -> None:
    assert plain("<b>*x*</b>\n|y|") == "&lt;b&gt;\\*x\\*&lt;/b&gt; \\|y\\|"


def test_markdown_of_runs_of_different_inputs_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    runs = [write_compare(tmp_path / "compare"), write_bisect(tmp_path / "bisect", num_prompts=2)]
    with pytest.raises(NotComparableError):
        write_markdown(runs, tmp_path / "summary.md")
    with pytest.raises(InputError):
        write_markdown(runs, tmp_path / "absent" / "summary.md")
    assert not (tmp_path / "summary.md").exists()


@pytest.mark.parametrize(("command", "options"), [("compare", CompareOptions), ("bisect", BisectOptions)])
def test_command_of_a_run_made_without_a_command_line_has_options_that_exist(command: str, options: Any) -> None:
    """The demo and the Python API give no options by name, so those in force are printed, under the names of the command line."""
    more = {"engine_args": ("a=1",)} if command == "compare" else {"precision": 0.1}
    given = options(model="m", prompts=Path("p.txt"), run=Path("r"), **more)
    words = shlex.split(
        command_line({"command": command, "options": {"effective": given.to_dict()}}).replace("\\\n", " ")
    )
    surface = json.loads((Path(__file__).parents[2] / "golden" / "cli_surface.json").read_text(encoding="utf-8"))
    known = {name for line in surface[f"rpadiag {command}"] for name in re.findall(r"--[a-z-]+", line)}
    assert {w for w in words if w.startswith("--")} <= known
