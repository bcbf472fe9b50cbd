"""``rpadiag report``: one self-contained HTML file from runs; needs no engine and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpadiag.cli.output import say


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, of one model and prompts.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="HTML file to write; replaced if it exists.")],
) -> None:
    """Draw one or more runs into a single HTML file that needs no network.

    Several runs (a comparison and a bisection) must be of the same tokens and weights.
    """
    from rpadiag.reports.html import write_report

    write_report(runs, html)
    say(str(html))
