"""One self-contained HTML page from one or more runs."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpadiag.errors import InputError, NotComparableError, UsageError
from rpadiag.findings import Finding, Judgement
from rpadiag.reports import beside, sections, theme, trend
from rpadiag.reports.view import Figure, Section
from rpadiag.runs import Run, check_same_inputs, open_run

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("report.js", "sites.js", "sequences.js")  # in this order, in one script element

Changes = tuple[str, str, Sequence[Finding]]  # earlier run, later run, what changed between them


def write_report(
    run_dirs: Sequence[Path],
    html_path: Path,
    *,
    judgement: Judgement | None = None,
    history: Sequence[Path] = (),
    changes: Sequence[Changes] = (),
) -> Path:
    """Draw runs as one HTML file and return its path.

    judgement: gates and changes to show first. history: further runs, drawn in the trend of metrics alone. changes: what
    :func:`rpadiag.gates.changes_between` says of runs that stand side by side.
    A comparison and the bisections of the same inputs share a section; any other runs get one each. Tokens
    that the rollout generated are not part of the inputs. Raises NotComparableError where the only comparison and a
    bisection are of different inputs, InputError for a run that is not complete or a file that cannot be written. The file appears whole or not at all.
    """
    if not run_dirs:
        raise UsageError("no run to report", hint="rpadiag report RUN... --html FILE")
    with whole_file(html_path) as part:
        runs = [open_run(path) for path in run_dirs]
        groups = grouped(runs)
        page = [sections.build(group, f"s{i}") for i, group in enumerate(groups)]
        if len(groups) > 1:
            names = beside.names_of([group[0] for group in groups])
            page = [dataclasses.replace(s, title=f"{n}: {s.title}") for n, s in zip(names, page, strict=True)]
            page.insert(0, beside.side_by_side(groups, changes))
        if judgement is not None:
            page[0] = sections.judged(page[0], judgement)
        earlier, passed = trend.gather(history)
        trends = trend.history(runs, earlier, passed)
        if trends is not None:
            page.append(trends)
        part.write_text(_render(page), encoding="utf-8")
    return html_path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its name on success and goes away on failure.

    Opened before the work, so that a place that cannot be written is an InputError at once.
    """
    try:
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a directory", hint="name a file")
        if path.exists() and path.suffix in (".json", ".parquet") and (path.parent / "manifest.json").exists():
            raise InputError(f"cannot write {path}: it is a file of the run {path.parent}", hint="name another file")
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _unwritable(path, error) from error
    part = Path(name)
    try:
        yield part
        part.chmod(0o666 & ~_umask())
        os.replace(part, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(path: Path, error: OSError | ValueError) -> InputError:
    return InputError(
        f"cannot write {path}: {getattr(error, 'strerror', None) or error}",
        hint="name a file in a directory that exists and that you can write to",
    )


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that share a section, each group's comparison first, in the order given."""
    compares = [r for r in runs if r.manifest.get("command") == "compare"]
    bisects = [r for r in runs if r.manifest.get("command") == "bisect"]
    groups = [[r] for r in runs if r not in bisects]
    for bisect in bisects:
        home = next((c for c in compares if _same(c, bisect, only=len(compares) == 1)), None)
        if home is None:
            groups.append([bisect])
        else:
            next(g for g in groups if g[0] is home).append(bisect)
    return groups


def _same(compare: Run, bisect: Run, *, only: bool) -> bool:
    """Whether both ran on the same inputs; with a single comparison a mismatch is the user's mistake and raises."""
    try:
        check_same_inputs(compare, bisect, prompts_only=True)
    except NotComparableError:
        if only:
            raise
        return False
    return True


def _render(page: Sequence[Section]) -> str:
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_runs = [s for s in page if s.records]
    return environment.get_template("report.html.j2").render(
        title=page[0].title if len(of_runs) == 1 else f"{page[0].title} and {len(of_runs) - 1} more",
        version=next((v for s in page for r in s.records for k, v in r.facts if k == "rpadiag"), ""),
        sections=page,
        fonts={"sans": Markup(theme.SANS), "mono": Markup(theme.MONO)},
        light=Markup(theme.css_variables(theme.LIGHT)),
        dark=Markup(theme.css_variables(theme.DARK)),
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        report_js=Markup("\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS)),
        plotly_js=Markup(get_plotlyjs()),
        figures_json=Markup(script_json(_data(page))),
    )


def _data(page: Sequence[Section]) -> dict[str, Any]:
    """What the scripts read: colours, figures, what opens behind the cells of maps, the packed sequences."""
    blocks = [b for s in page for b in s.blocks]
    figures = [f for b in blocks for f in b.figures]
    return {
        "twins": theme.dark_twins(),
        "list": [_spec(f) for f in figures],
        "sites": {f.key: f.explorer for f in figures if f.explorer is not None},
        "packed": {b.sequences.key: b.sequences.packed for b in blocks if b.sequences is not None},
    }


def _spec(figure: Figure) -> dict[str, Any]:
    kept = ("key", "data", "layout", "narrow")
    return {k: getattr(figure, k) for k in kept} | {"choices": [dataclasses.asdict(c) for c in figure.choices]}


def script_json(value: Any) -> str:
    """JSON for inside a script element: no ``<``, ``>`` or ``&`` is left that could end it or start another."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})
