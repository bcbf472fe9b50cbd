"""``rpadiag report``: runs as HTML, Markdown and JUnit, and the gates of a project; needs no engine and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpadiag.cli import options as shared
from rpadiag.cli.output import print_json, print_table, say
from rpadiag.errors import UsageError
from rpadiag.findings import GATE_WORDS

if TYPE_CHECKING:
    from rpadiag.findings import Judgement
    from rpadiag.reports.html import Changes
    from rpadiag.reports.view import Cell


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories; several stand side by side.")],
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
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="JUnit XML of the gates to write; replaced if it exists."),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option("--gate", metavar="EXPR", help="Such as 'k3_kl<=1e-3' or 'k3_kl<=baseline'; repeatable."),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="TOML file with named gates; see docs/gates.md.")
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        typer.Option("--baseline", metavar="RUN", help="Earlier run to hold differences against; repeatable."),
    ] = None,
    history: Annotated[
        list[Path] | None,
        typer.Option(
            "--history", metavar="DIR", help="Earlier runs, or a directory of them, for the trend; repeatable."
        ),
    ] = None,
    output_format: shared.Format = "table",
) -> None:
    """Draw runs into a single HTML file, summarise them in Markdown or JUnit, and hold gates against them.

    A comparison and a bisection must be of the same tokens and weights, and share a part of the page; any other runs stand
    side by side, their numbers in columns. Without a file, a gate or a baseline the answer is printed here: one run with its
    verdict, findings and numbers, several in columns. Leaves with 1 when a gate fails and with 2 when one cannot be answered.
    """
    shared.check_format(output_format)
    files = [path for path in (html, markdown, junit) if path is not None]
    _check(files, html=html, history=history)
    from rpadiag.workflows.judging import changes_along, judged

    if not (files or gate or policy or baseline):
        if len(runs) == 1:
            _show_one(runs[0], output_format)
        else:
            _show_beside(runs, changes_along(runs), output_format)
        return

    judgement = judged(runs, gate or [], policy, baseline or [])
    if html is not None:
        from rpadiag.reports.html import write_report

        write_report(runs, html, judgement=judgement, history=history or [], changes=changes_along(runs))
    if markdown is not None:
        from rpadiag.reports.markdown import write_markdown

        write_markdown(runs, markdown, judgement=judgement)
    if junit is not None:
        from rpadiag.reports.junit import write_junit

        write_junit(runs, junit, judgement=judgement)
    _show(judgement, files, output_format)
    if judgement is not None:
        from rpadiag.gates import exit_code

        if code := exit_code(judgement.gates):
            raise typer.Exit(code)


def _check(files: list[Path], *, html: Path | None, history: list[Path] | None) -> None:
    if history and html is None:
        raise UsageError("--history is drawn on the page, and no page was asked for", hint="add --html FILE")
    for path in files:
        if files.count(path) > 1:
            raise UsageError(f"two options name the same file, {path}", hint="name a file for each")


def _show_one(path: Path, output_format: str) -> None:
    """One run: its verdict, findings and numbers."""
    from rpadiag.cli import bisect, bisect_table, compare, rollouts
    from rpadiag.runs import open_run

    run = open_run(path)
    if run.manifest.get("command") == "rollouts":
        found = rollouts.answer(run)
        print_json(found) if output_format == "json" else rollouts.show(found)
    elif run.has("attribution"):
        print_json({**compare.answer(run), **bisect.tables(run)}) if output_format == "json" else bisect_table.show(run)
    else:
        print_json(compare.answer(run)) if output_format == "json" else compare.show(run)


def _show_beside(runs: list[Path], changes: Sequence[Changes], output_format: str) -> None:
    """Numbers of several runs in columns, then what changed from each to the next."""
    from rpadiag.reports.beside import numbers_of
    from rpadiag.reports.html import grouped
    from rpadiag.runs import open_run

    numbers = numbers_of(grouped([open_run(path) for path in runs]))
    if output_format == "json":
        rows = [
            {"group": group, "name": name, "cells": [_cell(cell) for cell in cells]}
            for group, found in numbers.groups
            for name, _, cells in found
        ]
        told = [{"from": a, "to": b, "changes": [f.to_dict() for f in found]} for a, b, found in changes]
        print_json({"runs": [name for name, _ in numbers.columns], "rows": rows, "changes": told})
        return
    for group, found in numbers.groups:
        lines = [[name, *(f"{c.text} ({c.note})" if c.note else c.text for c in cells)] for name, _, cells in found]
        print_table(group, ["", *(name for name, _ in numbers.columns)], lines)
    say()
    for before, after, changed in changes:
        for finding in changed:
            say(f"{before} to {after}: {finding.text}")


def _cell(cell: Cell) -> dict[str, Any]:
    """A cell for machines: the number and not how a page writes it."""
    return {"value": cell.value, "se": cell.se, "note": cell.note, "changed": cell.changed}


def _show(judgement: Judgement | None, files: list[Path], output_format: str) -> None:
    if output_format == "json":
        answer: dict[str, Any] = {"files": [str(path) for path in files]}
        if judgement is not None:
            answer["gates"] = [g.to_dict() for g in judgement.gates]
            answer["changes"] = [f.to_dict() for f in judgement.changes]
        print_json(answer)
        return
    for result in judgement.gates if judgement is not None else ():
        named = result.gate if result.name == result.gate else f"{result.name}: {result.gate}"
        where = f" [{Path(result.run).name}]" if result.run else ""
        say(
            f"{GATE_WORDS[result.status]}: {named}{where}: {result.text}",
            style="bold" if result.status != "pass" else None,
        )
        if result.reason and result.status != "pass":
            say(f"  because: {result.reason}")
    for finding in judgement.changes if judgement is not None else ():
        say(f"changed: {finding.text}")
    if judgement is not None and judgement.baselines and not judgement.changes:
        say("nothing that a run records changed since the baseline")
    for path in files:
        say(str(path))
