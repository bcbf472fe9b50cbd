"""What a log shows of a command's steps."""

from __future__ import annotations

import re

import pytest

from rpadiag.cli import bars


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on stderr, seconds replaced."""
    return re.sub(r"\d+(\.\d+)? s\b", "N s", capsys.readouterr().err).splitlines()


def test_step_in_a_log_says_when_it_starts_and_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with bars.progress_on_stderr() as progress:
        with progress.stage("load trainer"):
            assert said(capsys) == ["load trainer ..."]
        with progress.stage("compare prompts", total=3) as stage:
            stage.advance(3)
    assert said(capsys) == ["load trainer: N s", "compare prompts (3) ...", "compare prompts: N s"]


def test_long_counted_step_in_a_log_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "EVERY_S", 0.0)
    with bars.progress_on_stderr() as progress, progress.stage("rounding replicates", total=4) as stage:
        stage.advance()
        stage.advance(2)
        stage.advance()
    shown = said(capsys)
    assert shown[0] == "rounding replicates (4) ..." and shown[-1] == "rounding replicates: N s"
    assert shown[1:-1] == ["rounding replicates: 1 of 4 after N s", "rounding replicates: 3 of 4 after N s"]


def test_step_that_fails_does_not_look_finished(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"):
        with bars.progress_on_stderr() as progress, progress.stage("FP32 control"):
            raise ValueError("broken")
    assert said(capsys) == ["FP32 control ...", "FP32 control: stopped after N s"]
