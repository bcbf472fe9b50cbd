"""A run of which several processes wrote a part each: tables become directories of Parquet files, one part per process.

``sites.parquet/part-00001.parquet`` is what the second process wrote. Parts are joined in the order of their numbers, which is the order
that one process alone would have written in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rpadiag.errors import InputError
from rpadiag.runs.reader import open_run
from rpadiag.runs.schema import table_named

if TYPE_CHECKING:
    from rpadiag.runs.writer import RunWriter


def part_name(number: int) -> str:
    """File name of a part inside a table's directory."""
    return f"part-{number:05d}.parquet"


def join(run: RunWriter, parts: Sequence[Path]) -> None:
    """Let ``run`` take over the tables of complete runs when it completes, and their prompts into its digest now.

    Raises InputError for a part that is not complete.
    """
    for path in parts:
        rows = open_run(path).table("prompts", ["prompt", "token_digest"]).to_pylist()
        for row in rows:
            run._tokens.update(f"{row['prompt']} {row['token_digest']}\n".encode())
        run._num_sequences += len(rows)
        run.parts.append(path)


def joined_tables(path: Path, num_rows: Mapping[str, int], parts: Sequence[Path]) -> dict[str, int]:
    """Make directories of the tables in ``path`` and those of the same name in ``parts``; returns rows of each table.

    Without parts nothing changes. A table that only some processes wrote has the parts of those.
    """
    total = dict(num_rows)
    if not parts:
        return total
    written = [dict(open_run(part).manifest["tables"]) for part in parts]
    for name in dict.fromkeys([*num_rows, *(n for tables in written for n in tables)]):
        file = table_named(name).file
        sources = [p / file for p, tables in ((path, num_rows), *zip(parts, written, strict=True)) if name in tables]
        directory = path / f"{file}.parts"
        directory.mkdir()
        for number, source in enumerate(sources):
            os.replace(source, directory / part_name(number))
        os.replace(directory, path / file)
        total[name] = num_rows.get(name, 0) + sum(tables.get(name, 0) for tables in written)
    return total


def files_of(path: Path) -> list[Path]:
    """The Parquet files of a table in order: the file itself, or the parts of a directory. Raises InputError where it has none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("part-*.parquet"))
    if not found:
        raise InputError(f"{path} has no parts", hint="the run is damaged; make it again")
    return found
