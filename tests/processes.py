"""Processes that a test started, apart from the engine that the tests of a worker share."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

STARTED_AMID: dict[str, Any] = {}  # surroundings() before and after the shared engine was started
SHARED: set[int] = set()  # filled by the fixture that starts the shared engine


def children(pid: int) -> list[int]:
    """Process ids that ``pid`` started and that still exist."""
    found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [p for p in found if p not in SHARED]


def loading_torch(parent: int) -> int | None:
    """The child of ``parent`` that has begun to load torch, None before there is one: an engine in the middle of its start."""
    for pid in children(parent):
        with contextlib.suppress(OSError):  # one that ended meanwhile
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                return pid
    return None


def surroundings() -> tuple[dict[str, str], bool]:
    """What vLLM must not touch in the process that starts it: the environment, and whether vLLM is imported there."""
    return dict(os.environ), "vllm" in sys.modules
