"""``rpadiag report``: a self-contained HTML file or a Markdown summary from runs; needs no engine and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpadiag.cli.output import say
from rpadiag.errors import UsageError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, of one model and prompts.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="HTML file to write; replaced if it exists.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Markdown summary to write, for a CI job or a pull request; replaced if it exists.",
        ),
    ] = None,
) -> None:
    """Draw one or more runs into a single HTML file that needs no network, or summarise them in Markdown.

    Several runs (a comparison and a bisection) must be of the same tokens and weights.
    """
    if html is None and markdown is None:
        raise UsageError("no file to write", hint="add --html FILE or --markdown FILE, or both")
    if html == markdown:
        raise UsageError(f"--html and --markdown name the same file, {html}", hint="name two files")
    if html is not None:
        from rpadiag.reports.html import write_report

        say(str(write_report(runs, html)))
    if markdown is not None:
        from rpadiag.reports.markdown import write_markdown

        say(str(write_markdown(runs, markdown)))
