"""Writing a run directory so that it never looks complete when it is not.

``manifest.json`` says ``started`` before any work and ``complete`` only after every other file has its final
name and is on disk. Tables go to ``*.part`` in row groups, so memory does not grow with their length. Every
disk error leaves as an InputError that names the run and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from rpadiag.errors import InputError, RpadiagError
from rpadiag.findings import Finding, Verdict, most_important_first
from rpadiag.runs import manifest as facts
from rpadiag.runs.schema import Table, table_named

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MANIFEST = "manifest.json"
FINDINGS = "findings.json"
METRICS = "metrics.json"
WEIGHTS = "weights.json"
SCRATCH = "scratch"
JOURNAL = "replicates"  # see rpadiag.runs.journal
ROWS_PER_GROUP = 16_384
BYTES_PER_GROUP = 8 << 20

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Rows = Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]


def disk_error(path: Path, error: OSError) -> InputError:
    """The user-facing form of an OSError while writing under ``path``."""
    why = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        hint = "free some space or choose another place with --run; this run is not complete and will not be read"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "choose a directory you can write to with --run"
    else:
        hint = "choose another directory with --run"
    return InputError(f"cannot write run {path}: {why}", hint=hint)


def _disk_full(error: BaseException) -> OSError | None:
    """The OSError behind an exception that a full disk caused; libraries keep its message, numpy only the counts."""
    if isinstance(error, OSError) and error.errno is not None:
        return error if error.errno in _FULL else None
    words = (os.strerror(errno.ENOSPC), "requested and 0 written")
    if isinstance(error, RpadiagError) or not any(w in str(error) for w in words):
        return None
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError in the block becomes the error of :func:`disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, flush it to disk, then give it its name; OSError passes through and leaves nothing."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _sync_directory(path: Path) -> None:
    """Put the names in a directory on disk, so that a manifest cannot outlive the files it lists."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _TableWriter:
    """One growing Parquet file. Rows are validated, buffered, and flushed as a row group."""

    def __init__(self, directory: Path, table: Table) -> None:
        self.table = table
        self.num_rows = 0
        self._part = directory / f"{table.file}.part"
        self._path = directory / table.file
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._file: IO[bytes] | None = None
        self._parquet: pq.ParquetWriter | None = None

    def add(self, rows: Rows) -> None:
        """Append rows (mappings) or columns (one mapping of equal-length sequences)."""
        chunk = self._arrow(_columns_of(self.table, rows))
        if chunk.num_rows == 0:
            return
        self._pending.append(chunk)
        self._pending_rows += chunk.num_rows
        self._pending_bytes += chunk.nbytes
        self.num_rows += chunk.num_rows
        if self._pending_rows >= ROWS_PER_GROUP or self._pending_bytes >= BYTES_PER_GROUP:
            self._flush()

    def _arrow(self, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
        import pyarrow as pa

        schema = self.table.arrow()
        arrays = []
        for field in schema:
            try:
                array = pa.array(columns[field.name], type=field.type, from_pandas=False)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise ValueError(f"{self.table.name}.{field.name} is {field.type}: {error}") from error
            if array.null_count and not field.nullable:
                raise ValueError(f"{self.table.name}.{field.name} may not be null")
            arrays.append(array)
        return pa.Table.from_arrays(arrays, schema=schema)

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._file is None:
            self._file = open(self._part, "wb")  # noqa: SIM115 - open until close() or abandon()
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._file, self.table.arrow(), compression="zstd", version="2.6")
        if self._pending:
            self._parquet.write_table(pa.concat_tables(self._pending).combine_chunks())
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def close(self) -> None:
        """Write what is left and the footer, sync, and give the file its name."""
        self._flush()
        assert self._parquet is not None and self._file is not None
        self._parquet.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)

    def abandon(self) -> None:
        """Drop the file: a partial table is not kept."""
        self._pending = []
        for closable in (self._parquet, self._file):
            with contextlib.suppress(OSError, ValueError):  # ValueError: the file below is closed already
                if closable is not None:
                    closable.close()
        for path in (self._part, self._path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _columns_of(table: Table, rows: Rows) -> dict[str, Sequence[Any]]:
    """Rows or columns as columns; a name the schema lacks, or a missing non-nullable one, is a ValueError."""
    names = table.column_names
    if isinstance(rows, Mapping):
        given = dict(rows)
        lengths = {len(v) for v in given.values()}
        if len(lengths) > 1:
            raise ValueError(f"{table.name}: columns differ in length: { {k: len(v) for k, v in given.items()} }")
        size = lengths.pop() if lengths else 0
    else:
        listed = list(rows)
        size = len(listed)
        present = dict.fromkeys(k for row in listed for k in row)
        given = {k: [row.get(k) for row in listed] for k in present}
    unknown = [k for k in given if k not in names]
    if unknown:
        raise ValueError(f"{table.name} has no column {', '.join(unknown)}; its columns are {', '.join(names)}")
    missing = [c.name for c in table.columns if not c.nullable and c.name not in given]
    if size and missing:
        raise ValueError(f"{table.name} rows lack {', '.join(missing)}")
    return {name: given.get(name, [None] * size) for name in names}


class RunWriter:
    """The open run. Use as a context manager: leaving it writes the final status.

    Leaving normally gives ``complete``; KeyboardInterrupt gives ``interrupted``, any other exception ``failed`` with
    its type and message, and in both cases the tables are dropped. An RpadiagError before there was any result gives the
    directory back instead, by ``give_back``. A process that is killed leaves ``started``.
    Wrong column names, types or nulls raise ValueError: they are mistakes of the caller, not of the user.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._manifest = manifest
        self._began = time.monotonic()
        self._tables: dict[str, _TableWriter] = {}
        self._metrics: dict[str, Any] = {}
        self._verdict: dict[str, Any] | None = None
        self._findings: list[dict[str, Any]] = []
        self._weights: dict[str, dict[str, str]] = {}
        self._num_sequences = 0
        self._tokens = hashlib.blake2b(digest_size=16)  # over "prompt digest" lines, in the order they were added
        self._given: set[str] = set()
        self._closed = False
        self.give_back: Callable[[], bool] | None = None  # set by create_run; says whether the directory is free again
        self.parts: list[Path] = []  # complete runs whose tables this one takes over

    # -- what the run holds ----------------------------------------------------------------------

    def add_prompts(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append prompts; ``num_tokens`` and ``token_digest`` are filled in from ``token_ids``."""
        full = []
        for row in rows:
            digest = facts.token_digest(row["token_ids"])
            full.append({**row, "num_tokens": len(row["token_ids"]), "token_digest": digest})
            self._tokens.update(f"{row['prompt']} {digest}\n".encode())
            self._num_sequences += 1
        self._add("prompts", full)

    def add_tokens(self, rows: Rows) -> None:
        """Append scored tokens, as rows or as columns (numpy arrays stay arrays)."""
        self._add("tokens", rows)

    def add_sites(self, rows: Rows) -> None:
        """Append site statistics; ``UlpStats.columns()`` gives the ULP columns."""
        self._add("sites", rows)

    def add_attribution(self, rows: Rows) -> None:
        """Append attribution estimates."""
        self._add("attribution", rows)

    def add_effects(self, rows: Rows) -> None:
        """Append what aligning a part does to a metric."""
        self._add("effects", rows)

    def add_replicates(self, rows: Rows) -> None:
        """Append forwards of a bisection."""
        self._add("replicates", rows)

    def _add(self, name: str, rows: Rows) -> None:
        if self._closed:
            raise ValueError(f"run {self.path} is closed")
        writer = self._tables.setdefault(name, _TableWriter(self.path, table_named(name)))
        with writing(self.path):
            writer.add(rows)

    def set_manifest(self, **values: Any) -> None:
        """Set top-level manifest entries (JSON data) and write the manifest, still ``started``."""
        reserved = {"format", "format_version", "status", "tables", "tokens"} & set(values)
        if reserved:
            raise ValueError(f"manifest entries set by the writer alone: {', '.join(sorted(reserved))}")
        self._manifest.update(facts.strict_json(values))
        self._given |= set(values)
        self.write_manifest()

    def set_effective(self, **values: Any) -> None:
        """Options as they turned out where the user left the choice open: ``device``, ``dtype``, ``contract``."""
        self._manifest["options"]["effective"].update(facts.strict_json(values))
        self.write_manifest()

    def set_weights(self, stack: str, tensors: Mapping[str, str]) -> None:
        """Record the digest of every mapped tensor that ``stack`` (``trainer`` or ``rollout``) runs with."""
        self._weights[stack] = dict(tensors)
        summary = {s: {"digest": facts.weights_digest(t), "num_tensors": len(t)} for s, t in self._weights.items()}
        self.set_manifest(weights=summary)

    def set_metrics(self, values: Mapping[str, Any]) -> None:
        """Set top-level entries of ``metrics.json``."""
        self._metrics.update(facts.strict_json(values))

    def set_verdict(self, verdict: Verdict) -> None:
        self._verdict = facts.strict_json(verdict.to_dict())

    def add_finding(self, finding: Finding) -> None:
        self._findings.append(facts.strict_json(finding.to_dict()))

    def scratch_dir(self) -> Path:
        """A directory inside the run for bundles and the like; gone when the run is closed, however it ends."""
        scratch = self.path / SCRATCH
        with writing(self.path):
            scratch.mkdir(exist_ok=True)
        return scratch

    # -- ending -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._complete()
            except BaseException as late:
                self._give_up(late)
                raise
            return
        self._give_up(error)
        full = _disk_full(error)
        if full is not None:
            raise disk_error(self.path, full) from error

    def _complete(self) -> None:
        from rpadiag.runs.parts import joined_tables

        with writing(self.path):
            for writer in self._tables.values():
                writer.close()
            num_rows = joined_tables(self.path, {n: w.num_rows for n, w in self._tables.items()}, self.parts)
            if self._weights:
                write_atomically(self.path / WEIGHTS, facts.dump_json(self._weights))
            write_atomically(self.path / METRICS, facts.dump_json(self._metrics))
            ordered = most_important_first(self._findings)
            write_atomically(self.path / FINDINGS, facts.dump_json({"verdict": self._verdict, "findings": ordered}))
            shutil.rmtree(self.path / SCRATCH, ignore_errors=True)
            _sync_directory(self.path)
        self._manifest["tables"] = num_rows
        if self._num_sequences:
            self._manifest["tokens"] = {"digest": self._tokens.hexdigest(), "num_sequences": self._num_sequences}
        self._finish("complete")
        shutil.rmtree(self.path / JOURNAL, ignore_errors=True)

    def _give_up(self, error: BaseException) -> None:
        """Record why the run ended; a disk that is still full leaves the status at ``started``."""
        for writer in self._tables.values():
            writer.abandon()
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)
        for leftover in (*self.path.glob("*.part"), self.path / METRICS, self.path / FINDINGS, self.path / WEIGHTS):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
        refused = isinstance(error, RpadiagError) and not isinstance(
            error.__cause__, OSError
        )  # a disk may have room again
        results = self._metrics or self._findings or set(self._tables) - {"prompts"}
        if refused and not results and self.give_back is not None and self.give_back():
            self._closed = True
            return
        # the sentence alone: an engine's detail is the end of its log, with paths of the machine
        self._manifest["error"] = {"type": type(error).__name__, "message": getattr(error, "message", str(error))}
        with contextlib.suppress(InputError):
            self._finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _finish(self, status: str) -> None:
        self._closed = True
        late = facts.strict_json(facts.environment_facts())  # again: libraries have been imported since the start
        self._manifest.update({k: v for k, v in late.items() if k not in self._given})
        self._manifest.update(status=status, ended_utc=facts.now_utc(), wall_s=round(time.monotonic() - self._began, 3))
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write the manifest as it is by now."""
        with writing(self.path):
            write_atomically(self.path / MANIFEST, facts.dump_json(self._manifest))
