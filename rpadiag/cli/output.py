"""Printing of answers. Markup is off: site patterns and prompts contain brackets, and they are data."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

NOT_MEASURED = "-"
FINDINGS_SHOWN = 12


@cache
def _console() -> Console:
    """Standard output. Elsewhere than on a terminal lines are as long as they need to be. NO_COLOR is rich's own."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 10_000
    return Console(markup=False, highlight=False, emoji=False, width=width)


def say(text: str = "", *, style: str | None = None) -> None:
    """One paragraph of the answer; control characters in it are shown, not obeyed."""
    _console().print(printable(text), style=style, soft_wrap=not sys.stdout.isatty())


def hint(text: str) -> None:
    """What to do next, on standard error."""
    print(f"hint: {text}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Strict JSON: a number that is not finite is null, as in the run directory."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """A titled table: the first ``left`` columns are words, the others are numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(Text(name), justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    say()
    say(title, style="bold")
    _console().print(table)


def print_findings(findings: Sequence[Mapping[str, Any]], *, limit: int = FINDINGS_SHOWN) -> None:
    """Numbered findings, most important first."""
    for number, finding in enumerate(findings[:limit], start=1):
        mark = f"{finding['severity']}: " if finding["severity"] in ("warning", "error") else ""
        say(f"{number}. {mark}{finding['text']}")
    if len(findings) > limit:
        say(f"and {len(findings) - limit} more in findings.json")


def number(value: Any, *, digits: int = 3) -> str:
    """A measured number with few digits; what was not measured is a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOT_MEASURED
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    return f"{value:.{digits}g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.{digits - 1}e}"


def percent(share: Any) -> str:
    """A share as a percentage; exactly zero is shown as such, small shares keep two digits."""
    if share is None or math.isnan(share):
        return NOT_MEASURED
    if share == 0:
        return "0 %"
    return f"{100 * share:.1f} %" if share >= 1e-3 else f"{100 * share:.2g} %"


@contextmanager
def interruptible(run: Path, *, resume: bool = False) -> Iterator[None]:
    """On Ctrl-C, say what is left of the run before leaving. resume: the command can continue it."""
    try:
        yield
    except KeyboardInterrupt:
        from rpadiag.runs.reader import status_of

        status = status_of(run)
        if status is None:
            print(f"interrupted before {run} was begun", file=sys.stderr)
        elif status == "complete":
            print(f"interrupted; {run} is complete", file=sys.stderr)
        else:
            print(f"interrupted; {run} is left with status {status} and cannot be read as a run", file=sys.stderr)
            hint(
                f"continue it with the same command and --resume, or remove {run}"
                if resume
                else f"remove {run} before using the name again, or choose another --run"
            )
        raise
