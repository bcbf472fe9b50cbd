"""docs/run-format.md says what the schema says, and its examples run.

Run as a script, this file writes the column tables into the document:

    python tests/unit/runs/test_schema_docs.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rpadiag.runs.schema import TABLES, markdown_table
from rpadiag.sites import POINTS

DOCUMENT = Path(__file__).parents[3] / "docs" / "run-format.md"
BEGIN = "<!-- columns: begin; generated from rpadiag/runs/schema.py by tests/unit/runs/test_schema_docs.py -->\n"
END = "<!-- columns: end -->\n"


def with_columns(text: str) -> str:
    """The document with the block between the markers replaced by the schema's tables."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{markdown_table()}\n{END}{tail}"


def test_column_tables_in_the_document_are_those_of_the_schema() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_columns(text), f"run: python {Path(__file__).name} (see its docstring)"


def test_document_names_every_file_of_a_run(make_run: Callable) -> None:  # type: ignore[type-arg]
    text = DOCUMENT.read_text(encoding="utf-8")
    for file in make_run().path.iterdir():
        assert f"`{file.name}`" in text
    assert {t.file for t in TABLES.values()} <= set(re.findall(r"`(\w+\.parquet)`", text))


def test_document_explains_every_point_with_its_region() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for point in POINTS.values():
        assert f"| `{point.name}` | `{point.region}` | {point.text} |" in text


def test_document_explains_every_manifest_entry_that_the_writer_makes(make_run: Callable) -> None:  # type: ignore[type-arg]
    manifest_section = DOCUMENT.read_text(encoding="utf-8").split("## Manifest")[1].split("<!--")[0]
    for entry in make_run().manifest:
        assert f"`{entry}`" in manifest_section


def test_examples_in_the_document_run(make_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[type-arg]
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    pytest.importorskip("polars", reason="polars is not installed")
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {"RUN": str(make_run(f"run{blocks.index(block)}").path)})
    out = capsys.readouterr().out
    assert "complete Only rounding differs." in out and "mean_abs_d" in out and "layers.3.q_rope" in out


if __name__ == "__main__":
    DOCUMENT.write_text(with_columns(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
