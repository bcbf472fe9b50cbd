"""How a workflow says what it is doing, without knowing who listens.

The command line draws bars on stderr; tests and library callers pass :data:`SILENT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stage(Protocol):
    """One step of a workflow that is running."""

    def advance(self, steps: int = 1) -> None:
        """``steps`` more of the stage's total are done."""


class Progress(Protocol):
    """Receiver of a workflow's steps."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        """Begin a step; ``total`` is its number of units, None where it cannot be known (an engine start)."""

    def note(self, text: str) -> None:
        """Say one thing that is not a step, such as an automatic choice."""


class _SilentStage:
    def advance(self, steps: int = 1) -> None:
        del steps


class SilentProgress:
    """Receives everything and shows nothing."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        del name, total
        yield _SilentStage()

    def note(self, text: str) -> None:
        del text


SILENT: Progress = SilentProgress()
