"""Reading rollout files by the batch: JSON Lines and Parquet, only the columns that a schema needs.

Memory is bounded by the batch, not by the file. JSON Lines are cut into blocks at line ends and parsed by Arrow, a few blocks
ahead in other threads; a block that Arrow refuses is read line by line, so that an error names its line. Nothing is
ever unpickled: ``.pt`` and ``.pkl`` files run code when they are read, and are refused.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError, NotComparableError
from rpadiag.rollouts.schemas import Schema, find_schema

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20  # a line of a million tokens with ids, masks and both log-probabilities has about 40 MB
ROWS_PER_BATCH = 1024
NUM_THREADS = 2
ONE_LIST = "write one list of numbers a record"
ONE_MAPPING = "give one mapping of lists for each sequence"
SUFFIXES = (".jsonl", ".parquet")
PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some records of a file as an Arrow table, the first of them number ``first`` of the file, from 0."""

    table: pa.Table
    path: Path
    first: int


@dataclass(frozen=True, kw_only=True)
class RolloutFiles:
    """Files of one schema. ``columns``: what the files have of it."""

    paths: tuple[Path, ...]
    schema: Schema
    columns: tuple[str, ...]

    @property
    def has_trainer(self) -> bool:
        return self.schema.trainer in self.columns

    def chunks(self) -> Iterator[Chunk]:
        """The records of every file, in order."""
        for path in self.paths:
            yield from _parquet_chunks(path, self) if path.suffix == ".parquet" else _json_chunks(path, self)


@dataclass(frozen=True, kw_only=True)
class RolloutRecords(RolloutFiles):
    """Records that are in memory already, as a trainer has them: lists of numbers by column. ``paths`` holds their name alone."""

    rows: tuple[Mapping[str, Any], ...]

    def chunks(self) -> Iterator[Chunk]:
        import pyarrow as pa

        (path,) = self.paths
        shape = _arrow_schema(dict(self.rows[0]), self, path)
        for start in range(0, len(self.rows), ROWS_PER_BATCH):
            some = self.rows[start : start + ROWS_PER_BATCH]
            try:
                columns = {f.name: pa.array([row[f.name] for row in some], type=f.type) for f in shape}
            except (KeyError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise InputError(
                    f"{path}: records {start + 1} to {start + len(some)} are not like the first one",
                    detail=str(error),
                    hint="give every record the columns of the first, with numbers of the same kind",
                ) from error
            yield Chunk(table=pa.table(columns), path=path, first=start)


def rollout_records(
    rows: Sequence[Mapping[str, Any]], *, schema: str | None = None, name: str = "records"
) -> RolloutRecords:
    """Records in memory under the schema that their columns, or ``schema``, say. name: what messages call them.

    Raises InputError for no record or columns of no known schema.
    """
    if not rows:
        raise InputError(f"{name} holds no record", hint=ONE_MAPPING)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise InputError(f"{name}, record {number} is a {type(row).__name__}, not a mapping", hint=ONE_MAPPING)
    known = find_schema(list(rows[0]), schema, name)
    columns = tuple(c for c in (*known.lists, *known.scalars) if c in rows[0])
    plain = tuple({c: _as_list(row[c]) for c in columns if c in row} for row in rows)
    return RolloutRecords(paths=(Path(name),), schema=known, columns=columns, rows=plain)


def _as_list(value: Any) -> Any:
    """Arrays, tensors and tuples as the lists that JSON would have."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_as_list(v) for v in value] if isinstance(value, tuple) else value


def open_rollouts(given: Sequence[Path], *, schema: str | None = None) -> RolloutFiles:
    """Look at the files and settle their schema. A directory stands for the files in it, at any depth.

    Raises InputError for files that are missing, empty, of another kind or of no known schema, NotComparableError for files
    of different schemas.
    """
    paths = tuple(p for g in given for p in _files_of(g))
    found: dict[Path, tuple[Schema, tuple[str, ...]]] = {}
    for path in paths:
        columns = _columns_of(path)
        known = find_schema(columns, schema, str(path))
        found[path] = (known, tuple(c for c in (*known.lists, *known.scalars) if c in columns))
    first_schema, first_columns = found[paths[0]]
    for path, (other, names) in found.items():
        if other.name != first_schema.name or set(names) != set(first_columns):
            raise NotComparableError(
                f"{paths[0]} and {path} were not written alike",
                detail=f"{paths[0]}: {first_schema.name}, {', '.join(first_columns)}\n{path}: {other.name}, {', '.join(names)}",
                hint="give files of one trainer at a time",
            )
    return RolloutFiles(paths=paths, schema=first_schema, columns=tuple(dict.fromkeys(first_columns)))


def _files_of(given: Path) -> list[Path]:
    if given.is_dir():
        inside = sorted(p for p in given.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not inside:
            raise InputError(
                f"{given} holds no {' or '.join(SUFFIXES)} file",
                hint="name the directory that the trainer wrote its records into",
            )
        return inside
    if not given.exists():
        raise InputError(f"{given} does not exist", hint="name a .jsonl or .parquet file, or a directory of them")
    if given.suffix in PICKLED:
        raise InputError(
            f"{given} is pickled: reading it would run what it says",
            detail="rpadiag reads JSON Lines and Parquet",
            hint="convert it where you trust it; docs/rollouts.md has the lines for verl, SkyRL, OpenRLHF and slime",
        )
    if given.suffix not in SUFFIXES:
        raise InputError(f"{given} is neither {' nor '.join(SUFFIXES)}", hint="rename it to what it is")
    return [given]


def _columns_of(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        return list(_parquet(path).schema_arrow.names)
    return list(_first_record(path))


# -- Parquet ------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise _broken_parquet(path, error) from error


def _broken_parquet(path: Path, error: Exception) -> InputError:
    return InputError(
        f"cannot read {path}: it is not a whole Parquet file",
        detail=str(error).splitlines()[0] if str(error) else None,
        hint="the process that wrote it may have been stopped, or the copy cut short",
    )


def _parquet_chunks(path: Path, files: RolloutFiles) -> Iterator[Chunk]:
    import pyarrow as pa

    first = 0
    try:
        for batch in _parquet(path).iter_batches(batch_size=ROWS_PER_BATCH, columns=list(files.columns)):
            yield Chunk(table=pa.Table.from_batches([batch]), path=path, first=first)
            first += batch.num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise _broken_parquet(path, error) from error


# -- JSON Lines ---------------------------------------------------------------------------------------


def _first_record(path: Path) -> dict[str, Any]:
    for _, block in _blocks(path):
        line = block.split(b"\n", 1)[0]
        return _record(line, path, 1)
    raise InputError(f"{path} is empty", hint="the process that wrote it may have been stopped before its first record")


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    if not line.strip():
        raise InputError(f"{path}, line {number}: it is blank", hint="every line holds one record")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", errors="replace")
        raise InputError(
            f"{path}, line {number} is not valid JSON: {shown!r}",
            detail=str(error) or type(error).__name__,
            hint="remove that line, or cut the file before it: rpadiag reads no record that may be broken",
        ) from error
    if not isinstance(found, dict):
        raise InputError(
            f"{path}, line {number} is a {type(found).__name__}, not an object",
            hint="every line holds one record: {COLUMN: VALUE, ...}",
        )
    return found


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number of the first line from 0, whole lines); about BLOCK_BYTES each, more where a line is longer."""
    number = 0
    rest = b""
    try:
        with open(path, "rb") as file:
            while read := file.read(BLOCK_BYTES):
                end = read.rfind(b"\n") + 1
                if not end:
                    rest += read
                    if len(rest) > MAX_LINE_BYTES:
                        raise InputError(
                            f"{path}, line {number + 1} is longer than {MAX_LINE_BYTES >> 20} MiB",
                            detail="a million tokens with both log-probabilities need about 40 MB",
                            hint="write one sequence a line",
                        )
                    continue
                block = rest + read[:end]
                yield number, block
                number += block.count(b"\n")
                rest = read[end:]
            if rest:
                yield number, rest + b"\n"
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _json_chunks(path: Path, files: RolloutFiles) -> Iterator[Chunk]:
    shape = _arrow_schema(_first_record(path), files, path)
    ahead: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
        for number, block in _blocks(path):
            ahead.append(pool.submit(_parse, block, shape, path, number))
            while len(ahead) > NUM_THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _arrow_schema(record: dict[str, Any], files: RolloutFiles, path: Path) -> pa.Schema:
    """The Arrow types of the columns that are read, after the first record: lists, or NeMo-RL's lists of one list."""
    import pyarrow as pa

    def innermost(name: str, value: Any) -> pa.DataType:
        while isinstance(value, list):
            value = next((v for v in value if v is not None), None)
        exact = name in files.schema.ids or name in (files.schema.rollout_ids, files.schema.positions)
        if isinstance(value, bool) and not exact:
            return pa.bool_()
        return pa.int64() if exact else pa.float64() if name in files.schema.scalars else pa.float32()

    fields = []
    for name in files.columns:
        value = record[name]
        kind = innermost(name, value)
        depth = 0
        while isinstance(value, list):
            depth, value = depth + 1, value[0] if value else None
        if name in files.schema.lists and not 1 <= depth <= 2:
            raise InputError(f"{path}, line 1: {name} is not a list of numbers", hint=ONE_LIST)
        for _ in range(depth):
            kind = pa.list_(kind)
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def _parse(block: bytes, shape: pa.Schema, path: Path, number: int) -> Chunk:
    import pyarrow as pa
    import pyarrow.json as pj

    lines = block.count(b"\n")
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(explicit_schema=shape, unexpected_field_behavior="ignore"),
        )
        if table.num_rows == lines:
            return Chunk(table=table, path=path, first=number)
    except pa.ArrowInvalid:
        pass
    return Chunk(table=_by_line(block, shape, path, number), path=path, first=number)


def _by_line(block: bytes, shape: pa.Schema, path: Path, number: int) -> pa.Table:
    """The slow way, for a block with a line that is broken or typed differently; it names that line."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in shape.names}
    for offset, line in enumerate(block.splitlines()):
        record = _record(line, path, number + offset + 1)
        for field in shape:
            value = record.get(field.name)
            try:
                columns[field.name].append(
                    pa.scalar(_as_numbers(value, field.type), type=_unboolean(field.type)).as_py()
                )
            except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
                raise InputError(
                    f"{path}, line {number + offset + 1}: {field.name} is not what the first line has there",
                    detail=str(error).splitlines()[0],
                    hint="every line has the columns of the first, with numbers of the same kind",
                ) from error
    types = {field.name: _unboolean(field.type) for field in shape}
    return pa.table({name: pa.array(values, type=types[name]) for name, values in columns.items()})


def _as_numbers(value: Any, kind: pa.DataType) -> Any:
    """The value with 1 and 0 for true and false; ValueError for a fraction where whole numbers belong, which Arrow would cut off."""
    import pyarrow as pa

    if isinstance(value, list):
        inner = kind.value_type if pa.types.is_list(kind) else kind
        return [_as_numbers(v, inner) for v in value]
    if isinstance(value, float) and pa.types.is_integer(kind) and not value.is_integer():
        raise ValueError(f"{value} is not a whole number")
    if isinstance(value, bool) and pa.types.is_integer(kind):
        raise ValueError(f"{str(value).lower()} is not a whole number")
    return int(value) if isinstance(value, bool) else value


def _unboolean(kind: pa.DataType) -> pa.DataType:
    """The type with float for bool: a mask is ones and zeros where lines do not agree on how to write it."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(_unboolean(kind.value_type))
    return pa.float32() if pa.types.is_boolean(kind) else kind
