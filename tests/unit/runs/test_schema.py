"""The schema is well formed and says everything once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rpadiag.errors import UsageError
from rpadiag.runs.schema import TABLES, TYPES, ULP_COLUMNS, markdown_table, table_named


@pytest.mark.parametrize("name", TABLES)
def test_every_column_has_a_known_type_a_unit_and_a_meaning(name: str) -> None:
    table = TABLES[name]
    assert len(set(table.column_names)) == len(table.columns)
    assert set(table.key) <= set(table.column_names)
    for column in table.columns:
        assert column.type in TYPES
        assert column.unit and len(column.text) > 10


@pytest.mark.parametrize("name", TABLES)
def test_arrow_schema_carries_type_unit_and_nullability(name: str) -> None:
    for column, field in zip(TABLES[name].columns, TABLES[name].arrow(), strict=True):
        assert field.name == column.name and field.nullable == column.nullable
        assert field.metadata[b"unit"].decode() == column.unit
        assert (
            str(field.type)
            .replace("double", "float64")
            .replace("float", "float32")
            .replace("float3264", "float64")
            .replace("element: ", "")
            .replace("item: ", "")
            == column.type
        )


def test_every_ulp_column_has_a_local_twin_that_may_be_null() -> None:
    columns = {c.name: c for c in TABLES["sites"].columns}
    for c in ULP_COLUMNS:
        twin = columns[f"local_{c.name}"]
        assert (twin.type, twin.unit, twin.nullable) == (c.type, c.unit, True)


def test_markdown_has_one_row_per_column_and_no_stray_cell() -> None:
    for name, table in TABLES.items():
        lines = markdown_table(name).strip().splitlines()
        assert len(lines) == len(table.columns) + 2
        for line in lines:
            assert line.replace("\\|", "").count("|") == 6, line


def test_unknown_table_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"known tables: prompts, tokens, sites, attribution[\s\S]*did you mean tokens"
    ):
        table_named("token")


def test_importing_runs_loads_no_heavy_library() -> None:
    heavy = "{'pandas', 'pyarrow', 'torch', 'numba', 'numpy', 'duckdb', 'polars'}"
    code = f"import sys, rpadiag.runs; print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
