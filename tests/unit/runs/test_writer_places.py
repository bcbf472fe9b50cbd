"""Places that a run cannot be written to: occupied, forbidden, and disks that fill up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from run_parts import start, status, token_columns

from rpadiag.errors import InputError
from rpadiag.runs import Run, RunWriter, open_run
from rpadiag.runs.writer import ROWS_PER_GROUP, write_atomically

MakeRun = Callable[..., Run]


def test_a_directory_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"run directory .* exists\nit is not empty\nhint: name another directory"):
        start(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_complete_run_is_refused_and_left_alone(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(InputError, match="it holds a run with status complete"):
        start(run.path)
    assert open_run(run.path).manifest == run.manifest


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "taken.json", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.json"]


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for where in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with start(where):
            pass
        assert status(where) == "complete"


def test_a_file_in_the_way_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        start(tmp_path / "file")
    with pytest.raises(InputError, match="Not a directory"):
        start(tmp_path / "file" / "run")


def test_a_parent_that_cannot_be_written_is_an_input_error() -> None:
    code = """
        import os, sys
        from rpadiag.errors import InputError
        from rpadiag.runs import create_run
        if os.getuid() == 0:
            os.setuid(65534)  # permissions do not hold root back
        try:
            create_run(sys.argv[1], command="compare", options={})
        except InputError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory() as outer:  # pytest's own directory is closed to other users
        os.chmod(outer, 0o755)
        locked = Path(outer) / "locked"
        locked.mkdir(mode=0o555)
        command = [sys.executable, "-c", textwrap.dedent(code), str(locked / "run")]
        done = subprocess.run(command, capture_output=True, text=True)
    assert "Permission denied" in done.stdout, done.stderr
    assert "hint: choose a directory you can write to" in done.stdout


@pytest.mark.parametrize("limit", [0, 100, 3_000, 20_000, 60_000])
def test_a_disk_that_fills_up_at_any_point_is_an_input_error_and_the_run_is_refused(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE stops every file at ``limit`` bytes, as a full disk or a quota would."""
    path = tmp_path / "run"
    code = f"""
        import resource, signal
        from pathlib import Path
        import numpy as np, pyarrow.parquet
        from rpadiag.errors import InputError
        from rpadiag.runs import create_run
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        n = 40_000
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
            with create_run({str(path)!r}, command="compare", options={{}}) as run:
                p = np.random.default_rng(0).standard_normal(n).astype(np.float32)
                run.add_tokens(dict(prompt=np.zeros(n, int), position=np.arange(n), token=np.arange(n),
                                    source=["prefill"] * n, p=p))
        except InputError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "cannot write run" in done.stdout and "hint: free some space" in done.stdout, done.stderr
    with pytest.raises(InputError):
        open_run(path)
    assert not list(path.glob("*.parquet"))


def test_a_full_disk_met_by_other_code_while_the_run_is_open_is_an_input_error_too(tmp_path: Path) -> None:
    def work(name: str, save: Callable[[], object]) -> None:
        with start(tmp_path / name):
            save()

    def foreign() -> None:  # what bindings of C++ and Rust writers raise
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    writers: dict[str, Callable[[], object]] = {
        "numpy": lambda: np.zeros(1 << 16).tofile("/dev/full"),
        "file": lambda: Path("/dev/full").write_bytes(b"x"),
        "foreign": foreign,
    }
    for name, save in writers.items():
        with pytest.raises(InputError, match=r"cannot write run .*No space left on device"):
            work(name, save)
        assert status(tmp_path / name) == "failed"


def _can_mount(where: Path) -> bool:
    where.mkdir(exist_ok=True)
    if os.getuid() != 0:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(where)], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", str(where)], check=True)
    return done.returncode == 0


def test_a_tmpfs_of_any_size_ends_in_a_complete_run_or_a_clear_refusal(
    tmp_path: Path, fill_run: Callable[[RunWriter], None]
) -> None:
    mount = tmp_path / "disk"
    if not _can_mount(mount):
        pytest.skip("mounting a small tmpfs needs root; RLIMIT_FSIZE covers one file at a time above")

    def on_disk_of(pages: int) -> str:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4}k", "tmpfs", str(mount)], check=True)
        try:
            return _write_into(mount / "run", fill_run)
        finally:
            subprocess.run(["umount", str(mount)], check=True)

    assert _write_into(tmp_path / "roomy", fill_run) == "complete"
    needed = sum(-(-f.stat().st_size // 4096) for f in (tmp_path / "roomy").iterdir())
    assert on_disk_of(needed * 2) == "complete"
    # no room for the manifest; for the tables; for the last few of the small files
    sizes = [1, 2, 4, needed // 2, *range(needed - 8, needed - 1)]
    assert {pages: on_disk_of(pages) for pages in sizes} == dict.fromkeys(sizes, "refused")


def _write_into(path: Path, fill_run: Callable[[RunWriter], None]) -> str:
    def write() -> None:
        with start(path) as run:
            fill_run(run)
            run.add_tokens(token_columns(ROWS_PER_GROUP * 2))
            (run.scratch_dir() / "bundle.bin").write_bytes(bytes(10_000))

    try:
        write()
    except InputError:
        shutil.rmtree(path)
        with pytest.raises(InputError, match="No space left on device\nhint: free some space"):
            write()
        with pytest.raises(InputError):
            open_run(path)
        return "refused"
    assert len(open_run(path).tokens()) == ROWS_PER_GROUP * 2 + 4
    return "complete"
