"""pandas, DuckDB and Polars read every file of a run, with the columns and units that the schema documents."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest
from unit.runs.conftest import TOKEN_IDS

from rpadiag.runs import Run, RunWriter
from rpadiag.runs.parts import join
from rpadiag.runs.schema import TABLES, Table

MakeRun = Callable[..., Run]
SQL = {
    "int32": "INTEGER", "int64": "BIGINT", "float32": "FLOAT", "float64": "DOUBLE", "bool": "BOOLEAN",
    "string": "VARCHAR", "list<int32>": "INTEGER[]", "list<int64>": "BIGINT[]", "list<float64>": "DOUBLE[]",
}  # fmt: skip
POLARS = {
    "int32": "Int32", "int64": "Int64", "float32": "Float32", "float64": "Float64", "bool": "Boolean",
    "string": "String", "list<int32>": "List(Int32)", "list<int64>": "List(Int64)", "list<float64>": "List(Float64)",
}  # fmt: skip

tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())


@tables
def test_pandas_reads_every_column(make_run: MakeRun, table: Table) -> None:
    pandas = pytest.importorskip("pandas")
    run = make_run()
    frame = pandas.read_parquet(run.path / table.file)
    assert tuple(frame.columns) == table.column_names
    assert len(frame) == run.manifest["tables"][table.name]
    for column in table.columns:
        if not column.nullable:
            assert frame[column.name].notna().all(), column.name
            if "list" not in column.type and column.type != "string":
                assert str(frame[column.name].dtype) == column.type


@tables
def test_duckdb_reads_every_column_with_its_type(make_run: MakeRun, table: Table) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    run = make_run()
    described = duckdb.sql(f"DESCRIBE SELECT * FROM '{run.path / table.file}'").fetchall()
    assert [(row[0], row[1]) for row in described] == [(c.name, SQL[c.type]) for c in table.columns]
    counted = duckdb.sql(f"SELECT count(*) FROM '{run.path / table.file}'").fetchall()
    assert counted == [(run.manifest["tables"][table.name],)]


@tables
def test_polars_reads_every_column_with_its_type(make_run: MakeRun, table: Table) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    run = make_run()
    frame = polars.read_parquet(run.path / table.file)
    assert [(n, str(d)) for n, d in frame.schema.items()] == [(c.name, POLARS[c.type]) for c in table.columns]
    assert frame.height == run.manifest["tables"][table.name]


@tables
def test_file_carries_units_and_is_compressed_with_zstandard(make_run: MakeRun, table: Table) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = make_run().path / table.file
    schema = parquet.read_schema(path)
    for column in table.columns:
        metadata = schema.field(column.name).metadata
        assert metadata[b"unit"].decode() == column.unit and metadata[b"text"].decode() == column.text
    group = parquet.read_metadata(path).row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_the_readers_agree_on_values_nulls_and_lists(make_run: MakeRun) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    polars = pytest.importorskip("polars", reason="polars is not installed")
    run = make_run()
    path = run.path / "sites.parquet"
    columns = ["site", "layer", "differing", "ulp_hist", "local_differing", "local_reason"]
    by_duckdb = duckdb.sql(f"SELECT {', '.join(columns)} FROM '{path}'").fetchall()
    by_polars = polars.read_parquet(path, columns=columns).rows()
    by_rpadiag = [tuple(row.values()) for row in run.table("sites", columns).to_pylist()]
    assert by_duckdb == by_polars == by_rpadiag
    assert by_duckdb[1][1] is None and by_duckdb[1][4] is None


def test_directory_of_parts_is_read_by_pandas_polars_duckdb_and_rpadiag_as_one_table(make_run: MakeRun) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    parts = []
    for number, ids in enumerate(TOKEN_IDS):

        def one_prompt(run: RunWriter, number: int = number, ids: list[int] = ids) -> None:
            run.add_prompts([{"prompt": number, "num_prompt_tokens": len(ids), "text": "\u2713", "token_ids": ids}])

        parts.append(make_run(f"part-{number}", one_prompt).path)
    whole = make_run("whole", lambda run: join(run, parts))
    table = whole.path / "prompts.parquet"
    assert table.is_dir()
    expected = [list(ids) for ids in TOKEN_IDS]
    assert [list(row) for row in pd.read_parquet(table)["token_ids"]] == expected
    assert polars.read_parquet(table)["token_ids"].to_list() == expected
    found = duckdb.sql(f"SELECT token_ids FROM '{table}/*.parquet' ORDER BY prompt").fetchall()
    assert [row[0] for row in found] == expected
    assert [list(row) for row in whole.prompts()["token_ids"]] == expected
