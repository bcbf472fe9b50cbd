"""Claiming the directory of a run, and giving it back where a command was refused before there was anything to keep."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rpadiag.errors import InputError
from rpadiag.runs import manifest as facts
from rpadiag.runs.schema import FORMAT_NAME, FORMAT_VERSION
from rpadiag.runs.writer import JOURNAL, MANIFEST, RunWriter, writing


def create_run(
    path: str | Path, *, command: str, options: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> RunWriter:
    """Claim the directory ``path`` and write its manifest with status ``started``.

    command: the rpadiag command. options: every option with the value in force. given: those that the user
    set. Raises InputError when the directory exists and is not empty, or cannot be written.
    """
    where = Path(path)
    with writing(where):
        if where.exists() and not where.is_dir():
            raise InputError(f"run {where} is a file", hint="name a directory with --run")
        made = not where.exists()
        where.mkdir(parents=True, exist_ok=True)
        if any(where.iterdir()):
            raise _occupied(where)
        try:
            (where / MANIFEST).open("x").close()  # two processes cannot both pass here
        except FileExistsError:
            raise _occupied(where) from None
    manifest: dict[str, Any] = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "status": "started",
        "command": command,
        "options": {"given": facts.strict_json(given or {}), "effective": facts.strict_json(options)},
        "started_utc": facts.now_utc(),
        "git": facts.git_state(),
        **facts.strict_json(facts.environment_facts()),
    }
    writer = RunWriter(where, manifest)
    writer.give_back = partial(_give_back, where, made=made)
    try:
        writer.write_manifest()
    except InputError:
        writer.give_back()
        raise
    return writer


def _occupied(path: Path) -> InputError:
    from rpadiag.runs.reader import status_of

    status = status_of(path)
    what = f"it holds a run with status {status}" if status else "it is not empty"
    return InputError(
        f"run directory {path} exists", detail=what, hint="name another directory with --run, or remove this one"
    )


def _give_back(path: Path, *, made: bool) -> bool:
    """Leave the directory as it was before the run: gone where the run made it, else empty. False, and nothing done, where it holds more
    than a manifest and a journal without forwards."""
    journal = path / JOURNAL
    try:
        if {p.name for p in path.iterdir()} - {MANIFEST, JOURNAL} or list(journal.glob("*.parquet")):
            return False
        shutil.rmtree(journal, ignore_errors=True)
        (path / MANIFEST).unlink()
        if made:
            path.rmdir()
    except OSError:
        return False
    return True
