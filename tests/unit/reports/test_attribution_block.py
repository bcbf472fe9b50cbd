"""The page of a bisection can be read by someone who has not read the design."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.reports.written_runs import write_bisect

from rpadiag.reports.blocks_attribution import attribution_block
from rpadiag.reports.html import write_report
from rpadiag.reports.records import command_line
from rpadiag.reports.view import Block
from rpadiag.runs import Run, create_run, open_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(write_bisect(tmp_path_factory.mktemp("runs") / "bisect"))


@pytest.fixture(scope="module")
def block(finished: Run) -> Block:
    made = attribution_block(finished, "s0-attribution", alone=True)
    assert made is not None
    return made


def test_it_says_what_systematic_and_chaotic_mean_and_what_removes_chaos(block: Block) -> None:
    text = " ".join(block.lead)
    for part in (
        "repeated 16 times",
        "2,700 tokens in 30 sequences",
        "goes away when its part is aligned",
        "batch-invariant kernels",
        "FP16, FP32",
    ):
        assert part in text


def test_both_charts_have_error_bars_and_every_part(block: Block) -> None:
    forest, left = block.figures
    assert set(forest.data[0]["y"]) == {"rmsnorm", "rope", "swiglu", "all together", "self-control"}
    assert all(length > 0 for length in forest.data[0]["error_x"]["array"])
    assert [trace["name"] for trace in left.data] == ["systematic part", "mean |d|"]
    for trace in left.data:
        assert trace["y"] == ["rmsnorm", "rope", "swiglu", "all of them"]
        assert trace["x"][-1] == 0.0
    systematic, mean = left.data
    assert (
        systematic["x"][0] < 50 < 90 < mean["x"][0]
    )  # aligning the strongest takes most of one and little of the other


def test_tables_give_decisions_effects_interactions_and_the_second_kind_of_noise(block: Block) -> None:
    attribution, effects, crossed, confirmed = block.tables
    assert attribution.rows[0][:2] == ["rmsnorm", "responsible"]
    assert [row[0] for row in effects.rows] == ["(as it is)", "rmsnorm", "rope", "swiglu", "everything", "chaos alone"]
    assert [row[0] for row in crossed.rows][-1] == "swiglu × rmsnorm"
    assert {row[-1] for row in confirmed.rows} == {"yes"}
    assert all(len(row) == len(table.columns) for table in block.tables for row in table.rows)


def test_notes_say_who_was_replicated_and_what_responsible_means(block: Block) -> None:
    text = " ".join(block.notes)
    assert "Only the trainer was replicated" in text and "Holm" in text and "responsible: rmsnorm" in text


def test_failed_control_warns_and_names_nobody(tmp_path: Path) -> None:
    block = attribution_block(open_run(write_bisect(tmp_path / "run", ranked=False)), "k", alone=True)
    assert block is not None and block.warning is not None
    assert block.notes[0].startswith("not ranked: a control failed: ")


def test_one_sequence_gives_a_page_without_error_bars(tmp_path: Path) -> None:
    run = write_bisect(tmp_path / "run", num_sequences=1)
    page = write_report([run], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "one sequence gives no standard error" in page
    block = attribution_block(open_run(run), "k", alone=True)
    assert block is not None and set(block.figures[0].data[0]["error_x"]["array"]) == {0.0}


def test_command_to_repeat_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    given = {"resume": True, "by": "layer", "confirm": True}
    with create_run(
        tmp_path / "run", command="bisect", options={"model": "m", "prompts": "p.txt", **given}, given=given
    ):
        pass
    command = command_line(open_run(tmp_path / "run").manifest)
    assert "--resume" not in command and "--by layer" in command and "--confirm" in command
