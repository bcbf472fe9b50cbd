"""Progress on standard error: bars on a terminal, one line per step elsewhere."""

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

MIN_LINE_S = 1.0  # steps shorter than this are not worth a second line in a log


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
    """For logs: a line when a step starts and one with its time when it ends."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        print(f"{name} ..." if total is None else f"{name} ({total}) ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        yield _Uncounted()
        wall_s = time.monotonic() - start
        if wall_s >= MIN_LINE_S:
            print(f"{name}: {wall_s:.1f} s", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Uncounted:
    def advance(self, steps: int = 1) -> None:
        del steps


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
