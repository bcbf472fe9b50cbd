"""``rpadiag report A B C``: numbers in columns on the terminal, and what changed from each run to the next."""

from __future__ import annotations

import json

import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.cli.app import run as rpadiag


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("runs")
    return [
        str(write_compare(root / "monday", num_layers=1)),
        str(write_bisect(root / "parts")),
        str(write_compare(root / "now", num_layers=1, spread=3.0)),
    ]


def test_runs_stand_in_columns_and_bisections_belong_to_their_comparison(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rpadiag(["report", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines[lines.index("Log-probabilities") + 1]
    assert head.split() == ["monday", "now"]
    gap = next(line for line in lines if line.startswith("mean_abs_d"))
    assert gap.endswith("(× 3.0)")
    assert any(line.startswith("rmsnorm") and "±" in line for line in lines)


def test_the_same_as_json(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert rpadiag(["report", *runs, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["runs"] == ["monday", "now"]
    rows = {(r["group"], r["name"]): r["cells"] for r in answer["rows"]}
    assert rows["Log-probabilities", "mean_abs_d, nats"][1] == rows["Log-probabilities", "mean_abs_d, nats"][1] | {"note": "× 3.0", "changed": True}  # fmt: skip
    assert [(c["from"], c["to"]) for c in answer["changes"]] == [("monday", "now")]
