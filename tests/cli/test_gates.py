"""``rpadiag report`` with gates, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.reports.written_runs import write_compare

from rpadiag.cli.app import run as rpadiag


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_compare(tmp_path_factory.mktemp("runs") / "nightly", num_prompts=8)


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        (["k3_kl<=1"], 0),
        (["k3_kl<=1", "k3_kl<=1e-9"], 1),
        (["k3_kl<=1e-9", "faults==0"], 2),
        (["k3_kl<=baseline"], 2),
        (["no such gate"], 2),
    ],
)
def test_exit_code_is_that_of_the_gates(run: Path, gates: list[str], code: int) -> None:
    assert rpadiag(["report", str(run), *(word for gate in gates for word in ("--gate", gate))]) == code


def test_answer_names_each_gate_its_run_and_the_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rpadiag(["report", str(run), "--gate", "k3_kl<=1e-9", "--gate", "verdict=='rounding only'"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("FAILED: k3_kl<=1e-9 [nightly]: k3_kl is ") and first.endswith(
        "the gate wants at most 1e-09"
    )
    assert second.startswith("pass: verdict==")


def test_every_file_is_written_also_when_a_gate_fails(run: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"r.{name}" for name in ("html", "markdown", "junit")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert rpadiag(["report", str(run), "--gate", "k3_kl<=1e-9", *options]) == 1
    assert all(path.stat().st_size for path in files.values())


def test_policy_and_baseline_as_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_compare(tmp_path / "before", num_prompts=8)
    policy = tmp_path / "gates.toml"
    policy.write_text('baseline = "before"\n[gates.mismatch]\ngate = "k3_kl<=baseline"\nreason = "we diverged"\n')
    assert rpadiag(["report", str(run), "--policy", str(policy), "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(g["name"], g["status"], g["reason"]) for g in answer["gates"]] == [("mismatch", "pass", "we diverged")]
    assert answer["changes"] == [] and answer["files"] == []
    assert before.exists()


def test_one_run_and_nothing_asked_prints_its_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rpadiag(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    for part in ("mean |d|, nats", "Noise floors", "made here", f"run: {run}"):
        assert part in shown
    assert rpadiag(["report", str(run), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["logprob"]["all"]["num_tokens"] > 0


def test_baseline_without_a_gate_says_what_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rpadiag(["report", str(run), "--baseline", str(run)]) == 0
    assert capsys.readouterr().out == "nothing that a run records changed since the baseline\n"


def test_history_without_a_page_is_a_usage_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rpadiag(["report", str(run), "--history", str(run)]) == 2
    assert capsys.readouterr().err.endswith("hint: add --html FILE\n")
