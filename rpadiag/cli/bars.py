"""Progress on standard error: bars on a terminal, elsewhere a line when a step starts, while it takes long, and when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rpadiag.workflows.progress import Progress, Stage

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID

EVERY_S = 30.0  # a counted step says so often in a log how far it is


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A receiver for a workflow's steps that lives as long as the command."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichBars

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with RichBars(*columns, console=console) as bars:
        yield _Bars(bars)


class _Lines:
    """For logs: a line when a step starts and one with its time when it ends, well or not."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        line = _Line(name, total)
        line.say(f"{name} ..." if total is None else f"{name} ({total}) ...")
        try:
            yield line
        except BaseException:
            line.say(f"{name}: stopped after {line.wall_s:.1f} s")
            raise
        line.say(f"{name}: {line.wall_s:.1f} s")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Line:
    """A step in a log; a counted one says every EVERY_S seconds how far it is."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total, self._done = name, total, 0
        self._began = self._said = time.monotonic()

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        if self._total and time.monotonic() - self._said >= EVERY_S and self._done < self._total:
            self.say(f"{self._name}: {self._done} of {self._total} after {self.wall_s:.0f} s")


class _Bars:
    def __init__(self, bars: RichBars) -> None:
        self._bars = bars

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        task = self._bars.add_task(name, total=total)
        yield _Bar(self._bars, task)
        done = self._bars.tasks[task].completed or 1
        self._bars.update(task, total=total or done, completed=total or done)

    def note(self, text: str) -> None:
        self._bars.console.print(text)


class _Bar:
    def __init__(self, bars: RichBars, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, steps: int = 1) -> None:
        self._bars.advance(self._task, steps)
