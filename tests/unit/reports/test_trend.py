"""The history of many runs: order, versions, what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.errors import InputError
from rpadiag.reports.html import write_report
from rpadiag.reports.trend import gather, history
from rpadiag.runs import open_run


def nightly(directory: Path, day: int, *, vllm: str, spread: float = 1.0) -> Path:
    run = write_compare(
        directory / f"nightly-{day}", num_prompts=2, num_tokens=12, generated=3, num_layers=1, spread=spread
    )
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["started_utc"] = f"2026-01-{day:02d}T03:00:00+00:00"
    manifest["packages"] = {**manifest["packages"], "vllm": vllm}
    (run / "manifest.json").write_text(json.dumps(manifest))
    return run


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nights")
    for day, vllm in (
        (3, "0.32.0"),
        (1, "0.31.0"),
        (2, "0.31.0"),
        (4, "0.32.0"),
    ):  # written in another order than started
        nightly(directory, day, vllm=vllm, spread=float(day))
    (directory / "killed").mkdir()
    manifest = {"format": "rpadiag-run", "format_version": 1, "status": "started"}
    (directory / "killed" / "manifest.json").write_text(json.dumps(manifest))
    return directory


def test_runs_of_a_directory_are_drawn_in_the_order_in_which_they_started(nights: Path) -> None:
    runs, passed = gather([nights])
    section = history([], runs, passed)
    assert section is not None and section.subtitle == "4 runs, 1 run that did not finish left out"
    (block,) = section.blocks
    figure = block.figures[0]
    assert figure.table is not None
    assert [row[1] for row in figure.table.rows] == ["nightly-1", "nightly-2", "nightly-3", "nightly-4"]
    first = figure.data[0]["y"]
    assert first == sorted(first)  # spread grows with the day
    assert "largest noise floor" in [trace["name"] for trace in figure.data]


def test_versions_that_changed_are_marked_where_they_changed(nights: Path) -> None:
    runs, passed = gather([nights])
    section = history([], runs, passed)
    assert section is not None
    (block,) = section.blocks
    figure = block.figures[0]
    assert [shape["x0"] for shape in figure.layout["shapes"]] == [1.5]
    assert list(block.notes) == ["2026-01-03 03:00: vllm 0.31.0 → 0.32.0."]
    assert figure.table is not None and list(figure.table.emphasis) == [2]


def test_a_run_is_drawn_once_however_often_it_is_named(nights: Path) -> None:
    runs, passed = gather([nights, nights / "nightly-4"])
    section = history([open_run(nights / "nightly-4")], runs, passed)
    assert section is not None and section.subtitle.startswith("4 runs")


def test_commands_have_histories_of_their_own(nights: Path, tmp_path: Path) -> None:
    bisects = [open_run(write_bisect(tmp_path / f"b{i}")) for i in range(2)]
    runs, _ = gather([nights])
    section = history(bisects, runs, [])
    assert section is not None
    assert [b.title for b in section.blocks] == ["compare: smollm2-135m", "bisect: smollm2-135m"]
    assert section.blocks[1].figures[0].choices[0].label.startswith("systematic: ")


def test_two_runs_side_by_side_are_no_history(nights: Path) -> None:
    pair = [open_run(nights / f"nightly-{i}") for i in (1, 2)]
    assert history(pair, [], []) is None
    assert history([*pair, open_run(nights / "nightly-3")], [], []) is not None


def test_directory_without_runs_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        gather([tmp_path])
    with pytest.raises(InputError, match="does not exist"):
        gather([tmp_path / "missing"])


def test_page_has_the_history_after_the_runs(nights: Path, tmp_path: Path) -> None:
    page = write_report([nights / "nightly-4"], tmp_path / "r.html", history=[nights]).read_text(encoding="utf-8")
    assert page.index('id="s0"') < page.index('id="history"')
    assert "<title>Trainer against rollout: smollm2-135m</title>" in page
