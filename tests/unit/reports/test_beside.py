"""Runs side by side: the same number in every column, how far it is from the first run's, and what changed by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.findings import Finding
from rpadiag.reports import beside
from rpadiag.reports.view import Cell
from rpadiag.runs import Run, create_run, open_run


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[list[Run]]:
    root = tmp_path_factory.mktemp("runs")
    first = [open_run(write_compare(root / "a", num_layers=1)), open_run(write_bisect(root / "b"))]
    return [first, [open_run(write_compare(root / "c", num_layers=1, spread=3.0))]]


def rows_of(groups: list[list[Run]]) -> dict[str, list[Cell]]:
    section = beside.side_by_side(groups, [])
    made = section.blocks[0].beside
    assert made is not None and len(made.columns) == len(groups)
    return {label: list(cells) for _, rows in made.groups for label, _, cells in rows}


def test_every_row_has_a_cell_for_every_run(groups: list[list[Run]]) -> None:
    rows = rows_of(groups)
    assert all(len(cells) == 2 for cells in rows.values())
    for name in ("verdict", "mean_abs_d, nats", "k3_kl, nats", "trainer padded", "rope", "rmsnorm", "all together", "trainer: dtype"):  # fmt: skip
        assert name in rows


def test_number_far_from_the_first_runs_is_marked_with_how_far(groups: list[list[Run]]) -> None:
    first, other = rows_of(groups)["mean_abs_d, nats"]
    assert (first.changed, first.note) == (False, "")
    assert other.changed and other.note == "× 3.0"


def test_cells_hold_numbers_beside_their_text(groups: list[list[Run]]) -> None:
    rows = rows_of(groups)
    assert isinstance(rows["mean_abs_d, nats"][1].value, float) and isinstance(rows["num_tokens"][0].value, int)
    assert rows["self-control"][0].se is not None and rows["self-control"][1].value is None


def test_part_that_only_one_run_attributes_is_missing_in_the_other(groups: list[list[Run]]) -> None:
    first, other = rows_of(groups)["self-control"]
    assert "±" in first.text and other.text == "–"


@pytest.mark.parametrize(
    ("first", "value", "note"),
    [(1.0, 1.04, "+4.0 %"), (1.0, 0.96, "−4.0 %"), (1.0, 0.25, "÷ 4.0"), (0.0, 1.0, ""), (1.0, None, ""), (1.0, 1.0001, "±0 %"), (-1.0, 1.0, "")],
)  # fmt: skip
def test_distance_reads_as_percent_or_as_a_factor(first: float, value: float | None, note: str) -> None:
    assert beside._against(first, value) == note


def test_runs_of_one_name_are_told_apart_by_what_is_above_them(tmp_path: Path) -> None:
    runs = []
    for name in ("x", "y"):
        with create_run(tmp_path / name / "compare", command="compare", options={}):
            pass
        runs.append(open_run(tmp_path / name / "compare"))
    assert beside.names_of(runs) == ["x/compare", "y/compare"]
    assert beside.names_of([runs[0], runs[0]])[1].endswith("compare (2)")


def test_changes_are_named_between_the_runs_that_they_lie_between(groups: list[list[Run]]) -> None:
    change = Finding(code="contract-changed", severity="warning", region="rope", text="vLLM 0.19 before, 0.20 now")
    section = beside.side_by_side(groups, [("a", "c", [change])])
    (table,) = section.blocks[1].tables
    assert table.rows == [["a\u00a0→ c", "warning", "rope", "vLLM 0.19 before, 0.20 now"]]
    assert list(table.emphasis) == [0]
    quiet = beside.side_by_side(groups, [("a", "c", [])])
    assert quiet.blocks[1].lead == ["Nothing that the runs record changed between them."]
