"""Replicates written as they come, so that an interrupted bisection can go on.

While a run is open its ``replicates/`` holds ``identity.json`` (what the replicates depend on) and one Parquet file per forward,
``000000.parquet`` and so on, with the columns of ``replicates.parquet`` and one row. A file gets its name only when it is whole and on disk, so
whatever ends the process, every named file counts. A complete run has the one table instead. One process at a time may hold
the journal; that is a lock of the operating system, which a killed process does not keep.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rpadiag.errors import InputError, NotComparableError
from rpadiag.runs import manifest as facts
from rpadiag.runs.claim import create_run
from rpadiag.runs.reader import status_of
from rpadiag.runs.schema import FORMAT_VERSION, table_named
from rpadiag.runs.writer import JOURNAL, MANIFEST, SCRATCH, RunWriter, disk_error, write_atomically

IDENTITY = "identity.json"
LOCK = "lock"
TABLE = "replicates"


class Journal:
    """The open journal of a run. Use as a context manager, inside the run's own."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.path = run / JOURNAL
        self._lock: IO[bytes] | None = None
        self._num = 0

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = open(self.path / LOCK, "ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"run {self._run} is being written by another process", hint="wait for it, or stop it first"
            ) from error
        except OSError as error:
            raise disk_error(self._run, error) from error
        for left in self.path.glob("*.part"):
            left.unlink(missing_ok=True)
        self._num = 1 + max((int(p.stem) for p in self._files()), default=-1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def _files(self) -> list[Path]:
        return sorted(p for p in self.path.glob("*.parquet") if p.stem.isdigit())

    def bind(self, identity: Mapping[str, Any]) -> None:
        """Record what the replicates depend on, or raise NotComparableError where those that are there depend on something else.

        identity: JSON data; the first difference is shown, both sides by name.
        """
        now = json.loads(facts.dump_json(facts.strict_json(dict(identity))))
        where = self.path / IDENTITY
        if not self._files():
            try:
                write_atomically(where, facts.dump_json(now))
            except OSError as error:
                raise disk_error(self._run, error) from error
            return
        try:
            then = json.loads(where.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {where}", detail=str(error), hint="remove the run and begin again"
            ) from error
        for name, before, after in _differences(then, now, ""):
            raise NotComparableError(
                f"run {self._run} cannot be resumed: {name} is not what it was",
                detail=f"its replicates: {before}\nnow: {after}",
                hint="resume with the same options, prompts and model, or begin another run with another --run",
            )

    def append(self, row: Mapping[str, Any]) -> None:
        """One forward: a row of ``replicates.parquet``. Whole and on disk when this returns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path / f"{self._num:06d}.parquet"
        part = path.with_suffix(".parquet.part")
        schema = table_named(TABLE).arrow()
        columns = {name: pa.array([row[name]], type=schema.field(name).type) for name in schema.names}
        try:
            with open(part, "wb") as file:
                pq.write_table(pa.table(columns, schema=schema), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            raise disk_error(self._run, error) from error
        self._num += 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every forward that is there, in the order they were written; ``logprobs`` is a float64 array."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for path in self._files():
            try:
                table = pq.read_table(path)
                row = {name: table.column(name)[0].as_py() for name in table.column_names if name != "logprobs"}
                row["logprobs"] = table.column("logprobs").combine_chunks().values.to_numpy()
            except (OSError, pa.ArrowInvalid, KeyError, IndexError) as error:
                raise InputError(
                    f"cannot read {path}", detail=str(error), hint="remove that file and resume again"
                ) from error
            yield row

    def copy_to(self, run: RunWriter) -> None:
        """Put every forward into the run's table; the journal itself goes when the run is complete."""
        for row in self.rows():
            run.add_replicates([row])


def _differences(then: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, before, after) of every leaf that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(set(then) | set(now)):
            yield from _differences(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif then != now:
        yield name, then, now


@contextmanager
def journaled_run(
    path: str | Path,
    *,
    command: str,
    options: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Iterator[tuple[RunWriter, Journal]]:
    """A run with a journal: begun as :func:`rpadiag.runs.create_run` does, or with ``resume`` continued.

    Resuming drops what was half written, keeps the journal, and makes the status ``started`` once more. Raises InputError where
    there is nothing to resume: no run, one that is complete, one of another command or format, one that is still being written.
    """
    where = Path(path)
    if not resume:
        with create_run(where, command=command, options=options, given=given) as run, Journal(where) as journal:
            yield run, journal
        return
    _check_resumable(where, command)
    with Journal(where) as journal, _reopened(where, command, options, given or {}) as run:
        yield run, journal


def _check_resumable(where: Path, command: str) -> dict[str, Any]:
    """The manifest of a run that may be resumed."""
    status = status_of(where)
    if status is None:
        raise InputError(
            f"there is nothing to resume in {where}", detail="it holds no run", hint="leave out --resume to begin one"
        )
    manifest: dict[str, Any] = json.loads((where / MANIFEST).read_text(encoding="utf-8"))
    if status == "complete":
        raise InputError(f"run {where} is complete already", hint=f"rpadiag report {where} --html {where}.html")
    if manifest.get("command") != command or manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"run {where} cannot be resumed by rpadiag {command}",
            detail=f"it is of rpadiag {manifest.get('command')}, run format {manifest.get('format_version')}",
            hint="name another directory with --run",
        )
    return manifest


def _reopened(where: Path, command: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> RunWriter:
    """The run of a directory whose journal this process holds."""
    manifest = _check_resumable(where, command)  # again: it may have been completed before the lock was ours
    shutil.rmtree(where / SCRATCH, ignore_errors=True)
    for left in (*where.glob("*.part"), *where.glob("*.parquet")):
        left.unlink(missing_ok=True)
    for entry in ("error", "ended_utc", "wall_s", "tables", "tokens", "weights"):
        manifest.pop(entry, None)
    resumed = [*manifest.pop("resumed_utc", ()), facts.now_utc()]
    writer = RunWriter(
        where,
        manifest
        | {
            "status": "started",
            "options": {"given": facts.strict_json(given), "effective": facts.strict_json(options)},
            "git": facts.git_state(),
            **facts.strict_json(facts.environment_facts()),
        },
    )
    writer.set_manifest(resumed_utc=resumed)
    return writer
