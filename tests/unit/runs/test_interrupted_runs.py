"""What a run directory holds after failure, Ctrl-C and kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from run_parts import start, status, token_columns

from rpadiag.errors import InputError, UsageError
from rpadiag.runs import Run, RunWriter, open_run
from rpadiag.runs.writer import ROWS_PER_GROUP

MakeRun = Callable[..., Run]


def test_status_is_started_while_the_work_is_running_and_such_a_run_is_refused(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.add_tokens(token_columns(3))
        assert status(run.path) == "started"
        with pytest.raises(InputError, match="not complete: its status is started"):
            open_run(run.path)
    assert status(tmp_path / "run") == "complete"


def test_an_exception_leaves_status_failed_with_its_reason_and_no_tables(tmp_path: Path) -> None:
    def work() -> None:
        with start(tmp_path / "run") as run:
            run.add_tokens(token_columns(ROWS_PER_GROUP + 1))
            (run.scratch_dir() / "bundle.bin").write_bytes(b"x" * 100)
            raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError):
        work()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.json"]
    with pytest.raises(InputError, match=r"status is failed\nended .* with ZeroDivisionError: by nothing"):
        open_run(tmp_path / "run")


def refused(where: Path, work: Callable[[RunWriter], object]) -> None:
    """A run that does ``work`` and is refused then."""

    def command() -> None:
        with start(where) as run:
            work(run)
            raise UsageError("no such thing")

    with pytest.raises(UsageError, match="no such thing"):
        command()


def test_a_refusal_before_any_result_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    refused(tmp_path / "new" / "run", lambda run: run.scratch_dir())
    assert not (tmp_path / "new" / "run").exists()
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", lambda run: run.set_effective(device="cpu"))
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_refusal_after_a_result_or_beside_a_file_that_appeared_leaves_status_failed(tmp_path: Path) -> None:
    refused(tmp_path / "rows", lambda run: run.add_tokens(token_columns(3)))
    refused(tmp_path / "metrics", lambda run: run.set_metrics({"floors": []}))
    refused(tmp_path / "notes", lambda run: (run.path / "notes.txt").write_text("keep me"))
    for name in ("rows", "metrics", "notes"):
        assert status(tmp_path / name) == "failed"
    assert (tmp_path / "notes" / "notes.txt").read_text() == "keep me"


def test_ctrl_c_leaves_status_interrupted(tmp_path: Path) -> None:
    child = _child(tmp_path / "run", "print('ready', flush=True); time.sleep(60)")
    child.send_signal(signal.SIGINT)
    child.wait(30)
    assert status(tmp_path / "run") == "interrupted"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.json"]
    with pytest.raises(InputError, match="status is interrupted"):
        open_run(tmp_path / "run")


def test_kill_9_leaves_status_started_and_the_run_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    child = _child(tmp_path / "run", "print('ready', flush=True); time.sleep(60)")
    child.kill()
    child.wait(30)
    with pytest.raises(InputError, match=r"status is started\n.*still running, or its process was killed"):
        open_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"exists\nit holds a run with status started"):
        start(tmp_path / "run")


def _child(path: Path, body: str) -> subprocess.Popen[str]:
    """A process that writes more than a row group into a run, then does ``body``; returned once it says ready."""
    code = f"""
        import time, numpy as np
        from rpadiag.runs import create_run
        n = {ROWS_PER_GROUP + 10}
        with create_run({str(path)!r}, command="compare", options={{}}) as run:
            run.add_tokens(dict(prompt=np.zeros(n, int), position=np.arange(n), token=np.arange(n), source=["prefill"] * n))
            {body}
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    assert (path / "tokens.parquet.part").exists()
    return child
