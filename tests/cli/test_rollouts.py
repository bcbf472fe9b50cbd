"""``rpadiag rollouts`` and what follows it, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from unit.rollouts.recorded import record, rows, write

from rpadiag.cli.app import run as rpadiag
from rpadiag.compare.metrics import logprob_metrics
from rpadiag.runs import open_run

RECORDED = record(num_sequences=12, num_tokens=40)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "rollouts.jsonl", rows(RECORDED, "trl"))


def test_run_holds_every_token_and_the_metrics_of_them(recorded: Path, tmp_path: Path) -> None:
    assert rpadiag(["rollouts", str(recorded), "--run", str(tmp_path / "run")]) == 0
    run = open_run(tmp_path / "run")
    tokens, prompts = run.tokens(), run.prompts()
    p, q = np.concatenate(RECORDED.p), np.concatenate(RECORDED.q)
    assert np.array_equal(tokens["p"], p) and np.array_equal(tokens["q"], q)
    assert tokens["token"].tolist() == [t for r in RECORDED.responses for t in r]
    assert prompts["num_prompt_tokens"].tolist() == [len(x) for x in RECORDED.prompts]
    expected = logprob_metrics(p, q, sequence_ids=tokens["prompt"])
    for name in ("mean_abs_d", "k3_kl", "chi2_seq", "rollout_probs_diff_std", "rollout_actor_probs_pearson_corr"):
        assert run.metrics["logprob"]["all"][name] == pytest.approx(expected[name], rel=1e-12)
    assert run.manifest["rollouts"]["schema"] == "trl" and run.metrics["rollouts"]["num_faults"] == 0


def test_run_is_reported_and_gated(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = tmp_path / "run", tmp_path / "r.html"
    rpadiag(["rollouts", str(recorded), "--run", str(run)])
    capsys.readouterr()
    gates = ["--gate", "faults==0", "--gate", "k3_kl<=baseline", "--baseline", str(run)]
    assert rpadiag(["report", str(run), "--html", str(page), *gates]) == 0
    assert "pass: faults==0" in capsys.readouterr().out
    assert "Recorded rollouts: trl" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("output_format", ["table", "json"])
def test_report_of_the_run_alone_prints_what_the_command_printed(
    shift: int, output_format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = record(num_sequences=12, num_tokens=40)
    recorded.q = [np.roll(q, shift) for q in recorded.q]
    path, run = write(tmp_path / "r.jsonl", rows(recorded, "trl")), tmp_path / "run"
    assert rpadiag(["rollouts", str(path), "--run", str(run), "--format", output_format]) == (2 if shift else 0)
    printed = capsys.readouterr().out
    assert rpadiag(["report", str(run), "--format", output_format]) == 0
    again = capsys.readouterr().out
    assert again == printed if output_format == "table" else json.loads(again) == json.loads(printed)
    assert ("effective sample size" in printed or "worst_sequences" in printed) != bool(shift)


def test_data_at_fault_leave_with_2_and_no_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shifted = record(num_sequences=12, num_tokens=40)
    shifted.q = [np.roll(q, 1) for q in shifted.q]
    path = write(tmp_path / "r.parquet", rows(shifted, "prime-rl"))
    assert rpadiag(["rollouts", str(path), "--run", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().out
    assert shown.startswith("Not comparable: this is not rounding. Shifted by 1") and "k3_kl" not in shown
    assert open_run(tmp_path / "run").metrics["logprob"] == {}
    assert rpadiag(["report", str(tmp_path / "run"), "--gate", "faults==0"]) == 1
    assert rpadiag(["report", str(tmp_path / "run"), "--gate", "k3_kl<=1"]) == 2
    assert rpadiag(["report", str(tmp_path / "run"), "--html", str(tmp_path / "r.html")]) == 0


def test_temperature_is_another_computation_and_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.jsonl", rows(record(t_trainer=0.7, t_sampling=0.7), "rpadiag"))
    assert rpadiag(["rollouts", str(path)]) == 0
    assert capsys.readouterr().out.startswith(
        "Different computation: the log-probabilities are of different distributions."
    )


def test_answer_for_machines(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rpadiag(["rollouts", str(recorded), "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["faults"], answer["verdict"], answer["run"]) == ("trl", [], None, None)
    assert answer["metrics"]["num_sequences"] == 12


def test_broken_file_leaves_a_run_that_says_failed(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.write_text(recorded.read_text()[:-30])
    assert rpadiag(["rollouts", str(recorded), "--run", str(tmp_path / "run")]) == 2
    assert "line 12 is not valid JSON" in capsys.readouterr().err
    assert rpadiag(["report", str(tmp_path / "run"), "--html", str(tmp_path / "r.html")]) == 2
    assert "is not complete: its status is failed" in capsys.readouterr().err
