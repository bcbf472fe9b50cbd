"""Processes that a test started, apart from the engine that the tests of a worker share."""

from __future__ import annotations

from pathlib import Path

SHARED: set[int] = set()  # filled by the fixture that starts the shared engine


def children(pid: int) -> list[int]:
    """Process ids that ``pid`` started and that still exist."""
    found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [p for p in found if p not in SHARED]
