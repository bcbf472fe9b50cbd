"""A run's directory: which run it holds, that one process works in it, what a killed one left. Imports nothing that takes long, for sweep.py."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import read_table


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What makes a run what it is; stored in run.json, and a resumed run must have the same."""

    model: str
    arm: str
    seed: int
    preset: str
    overrides: tuple[str, ...] = ()
    engine: str = "eager"
    contract: str | None = None  # JSON of `rpadiag fingerprint`, for the arm that follows the engine

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"overrides": list(self.overrides)}


def check_identity(spec: Spec, out: Path) -> None:
    """Raises SystemExit where ``out`` holds work of another run. A directory whose run never came to a round does not count."""
    path, wanted = out / "run.json", spec.to_dict()
    if not path.exists() or not has_work(out):
        return
    found = read_json(path)
    if found != wanted:
        differ = {n: (found.get(n), wanted[n]) for n in wanted if found.get(n) != wanted[n]}
        raise SystemExit(f"error: {out} holds another run\n(there, asked for): {differ}\nhint: choose another --out")


def has_work(out: Path) -> bool:
    return (out / "steps.parquet").exists() or any(out.glob("checkpoint-*"))


def read_json(path: Path) -> dict[str, Any]:
    """Raises SystemExit for what is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: cannot read {path}: {error}\nhint: delete it, or choose another --out") from None
    if not isinstance(found, dict):
        raise SystemExit(f"error: {path} is not what this example writes\nhint: delete it, or choose another --out")
    return found


def rows_at(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """As read_table. Raises SystemExit for a table that cannot be read or has another schema version."""
    try:
        return read_table(path)
    except ValueError as error:
        raise SystemExit(f"error: {error}\nhint: delete its directory, or choose another --out") from None


def step_of(path: Path) -> int:
    """Updates made, from the name of a checkpoint."""
    return int(path.name.split("-")[1])


def drop_runs_after(step: int, runs: Path) -> None:
    """Delete the runs of updates that a killed training made after its last checkpoint: they are made, and measured, again."""
    for path in runs.glob("step-*"):
        if step_of(path) > step:
            shutil.rmtree(path)


@contextlib.contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Raises SystemExit where another process trains in this directory: of a sweep that was killed, its runs may go on for a while."""
    with (out / "lock").open("a") as lock:
        for left in reversed(range(5)):  # `is_taken` may hold it for a moment
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise SystemExit(
                        f"error: another process trains in {out}\nhint: wait until it stops by itself, or end it"
                    ) from None
                time.sleep(0.1)
        yield


def is_taken(out: Path) -> bool:
    """Does a process train in this directory?"""
    try:
        with (out / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
