"""``rpadiag report`` on runs that are damaged, newer, mixed or hostile: a clear error, nothing half written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.cli.app import run as rpadiag
from rpadiag.errors import InputError
from rpadiag.reports.html import write_report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_compare(tmp_path / "run", num_prompts=2, num_tokens=16, generated=3, num_layers=1)


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *runs: Path) -> str:
    files = {name: tmp_path / f"out.{name}" for name in ("html", "markdown", "junit")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert rpadiag(["report", *map(str, runs), *options]) == 2
    assert not files["html"].exists() and not list(tmp_path.glob(".out*"))
    return capsys.readouterr().err


def test_truncated_table(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "sites.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert f"cannot read {path}" in refused(capsys, tmp_path, run)


def test_run_of_a_newer_format(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    assert "has format version 99; this rpadiag reads" in refused(capsys, tmp_path, run)


def test_table_of_another_program(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = json.loads((run / "manifest.json").read_text())["tables"]["tokens"]
    pq.write_table(pa.table({"prompt": ["x"] * rows}), run / "tokens.parquet")
    assert "tokens.parquet" in refused(capsys, tmp_path, run)


def test_comparison_and_bisection_of_different_models(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_bisect(tmp_path / "bisect", num_prompts=2, num_tokens=16, generated=3, weight="ff")
    assert "the trainer ran with different weights" in refused(capsys, tmp_path, run, other)


def rewritten(table: Path, column: str, change: Callable[[str], str]) -> None:
    import pyarrow.parquet as pq

    frame = pq.read_table(table).to_pandas()
    frame[column] = [change(value) for value in frame[column]]
    schema = pq.read_schema(table)
    pq.write_table(pa.Table.from_pandas(frame, schema=schema, preserve_index=False), table)


def test_site_of_another_vocabulary(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(run / "sites.parquet", "point", lambda point: "q_roped" if point == "q_rope" else point)
    assert "of the point q_roped, which this version of rpadiag does not know" in refused(capsys, tmp_path, run)


def test_part_whose_effects_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bisect = write_bisect(tmp_path / "bisect", num_prompts=2, num_tokens=16, generated=3, num_sequences=4)
    rewritten(bisect / "effects.parquet", "region", lambda region: "roped" if region == "rope" else region)
    assert "of rope" in refused(capsys, tmp_path, bisect)
    assert rpadiag(["report", str(bisect)]) == 2


@pytest.mark.parametrize("name", ["manifest.json", "tokens.parquet"])
def test_file_of_a_run_is_never_written_over(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / name).read_bytes()
    assert rpadiag(["report", str(run), "--markdown", str(run / name)]) == 2
    assert (run / name).read_bytes() == before
    assert "it is a file of the run" in capsys.readouterr().err


def test_name_that_no_file_can_have_is_an_input_error(run: Path) -> None:
    with pytest.raises(InputError, match="cannot write") as caught:
        write_report([run], Path("a\0b"))
    assert caught.value.hint


def test_json_cut_short(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "findings.json").write_text('{"verdict": ')
    assert "findings.json is not valid JSON" in refused(capsys, tmp_path, run)


def test_hostile_names_reach_neither_terminal_nor_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "a\x1b[2Jb<img src=x>"
    write_compare(
        where,
        num_prompts=2,
        num_tokens=16,
        generated=3,
        num_layers=1,
        prompt_text="\x1b]0;title\x07 <script>x</script>",
    )
    page = tmp_path / "r.html"
    assert rpadiag(["report", str(where), "--html", str(page), "--gate", "k3_kl<=1e-12"]) == 1
    assert "\x1b" not in capsys.readouterr().out
    assert "<script>x" not in page.read_text(encoding="utf-8") and "<img src=x>" not in page.read_text(encoding="utf-8")
