"""Everything the command line does, as functions: ``import rpadiag`` and call ``rpadiag.compare(...)``.

A function takes the options of its command by name, as its options class in :mod:`rpadiag.workflows.options` documents them: what ``--max-tokens 64`` is
there, ``max_tokens=64`` is here. Paths may be text. Nothing is printed, and every expected failure is a
:class:`rpadiag.errors.RpadiagError` with its hint. Functions that write a run return it as a :class:`Result`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rpadiag.runs import Run
from rpadiag.runs import open_run as _open_run
from rpadiag.workflows.arguments import of_types, paths_of, refused
from rpadiag.workflows.options import (
    BisectOptions,
    BundlesOptions,
    CaptureOptions,
    CompareOptions,
    FingerprintOptions,
    ScoringOptions,
)

if TYPE_CHECKING:
    import pandas as pd

    from rpadiag.findings import Judgement
    from rpadiag.workflows.capture import Captured
    from rpadiag.workflows.fingerprint import FingerprintResult
    from rpadiag.workflows.rollouts import RolloutsResult

P = ParamSpec("P")
Answer = TypeVar("Answer")
PathLike = str | Path


class Result(Run):
    """A complete run: tables as pandas, verdict, findings and metrics; a notebook shows it as a short page.

    ``sites()``, ``tokens()``, ``prompts()``, ``attribution()``: data frames, whole or a few columns. ``verdict``, ``findings``, ``metrics``,
    ``manifest``: what the command wrote, as plain objects. ``findings_frame()``, ``metrics_frame()``: the same as data frames.
    """

    def findings_frame(self) -> pd.DataFrame:
        """One row a finding, most important first: code, severity, text, region, site."""
        import pandas as pd

        columns = ["code", "severity", "text", "region", "site"]
        return pd.DataFrame([{c: f.get(c) for c in columns} for f in self.findings], columns=columns)

    def metrics_frame(self) -> pd.DataFrame:
        """Log-probability metrics: one row a metric, one column a source (``all``, ``prefill``, ``decode``, ``rescored``)."""
        import pandas as pd

        by_source = self.metrics.get("logprob") or {}
        numbers = {s: {k: v for k, v in m.items() if not isinstance(v, list)} for s, m in by_source.items()}
        return pd.DataFrame(numbers)

    def report(self, html: PathLike, **options: Any) -> Judgement | None:
        """The HTML report of this run; ``options`` are those of :func:`report`."""
        return report([self.path], html=html, **options)

    def _repr_html_(self) -> str:
        from html import escape

        said = self.verdict
        head = (
            escape(str(said["sentence"])) if said else f"A run of rpadiag {escape(str(self.manifest.get('command')))}"
        )
        rows = [f"<li>{escape(str(f['text']))}</li>" for f in self.findings[:5]]
        frame = self.metrics_frame()
        shown = [m for m in ("num_tokens", "mean_abs_d", "k3_kl", "chi2_token", "max_abs_d") if m in frame.index]
        table = frame.loc[shown].to_html(escape=True, float_format=lambda x: f"{x:.4g}") if shown else ""
        return (
            f"<p><strong>{head}</strong></p><ul>{''.join(rows)}</ul>{table}<p><code>{escape(str(self.path))}</code></p>"
        )


def open_run(path: PathLike) -> Result:
    """A complete run directory. Raises InputError for one that is missing, did not finish, or is of another format."""
    (where,) = paths_of("path", [path])
    run = _open_run(where)
    return Result(run.path, run.manifest)


def _command(options: Callable[P, Any], work: Callable[[Any], Answer], text: str) -> Callable[P, Answer]:
    """A function with the arguments of an options class, defaults and types included."""

    def call(*args: P.args, **kwargs: P.kwargs) -> Answer:
        return work(options(*args, **of_types(options, kwargs)))

    call.__doc__ = f"{text}\n\n{_documented(options)}"
    call.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    return call


def _documented(options: Any) -> str:
    """What the options class and those it extends say about their fields."""
    classes = [c for c in reversed(options.__mro__) if dataclasses.is_dataclass(c)]
    return "\n\n".join(inspect.cleandoc(c.__doc__ or "") for c in classes)


def _compare(options: CompareOptions) -> Result:
    from rpadiag.workflows.compare import run_compare

    run_compare(options)
    return open_run(options.run)


def _compare_bundles(options: BundlesOptions) -> Result:
    from rpadiag.workflows.compare_bundles import run_compare_bundles

    run_compare_bundles(options)
    return open_run(options.run)


def _bisect(options: BisectOptions) -> Result:
    from rpadiag.workflows.bisect import run_bisect

    run_bisect(options)
    return open_run(options.run)


def _capture(options: CaptureOptions) -> Captured:
    from rpadiag.workflows.capture import run_capture

    return run_capture(options)


def _fingerprint(options: FingerprintOptions) -> FingerprintResult:
    from rpadiag.workflows.fingerprint import run_fingerprint

    return run_fingerprint(options)


compare = _command(
    CompareOptions, _compare, "Both stacks on the same tokens: verdict and evidence (``rpadiag compare``)."
)
compare_bundles = _command(BundlesOptions, _compare_bundles, "Two captured stacks, with neither engine.")
bisect = _command(BisectOptions, _bisect, "The divergence attributed to regions, with error bars (``rpadiag bisect``).")
capture = _command(CaptureOptions, _capture, "What one stack computed, as a bundle (``rpadiag capture``).")
fingerprint = _command(FingerprintOptions, _fingerprint, "The rounding contract that kernels follow; ``.content`` is what :func:`rpadiag.align` takes as ``contract`` (``rpadiag fingerprint``).")  # fmt: skip


def rollouts(
    files: PathLike | Sequence[PathLike] = (),
    *,
    records: Iterable[Mapping[str, Any]] = (),
    schema: str | None = None,
    run: PathLike | None = None,
    model: str | None = None,
    **scoring: Any,
) -> RolloutsResult:
    """Recorded rollouts, checked for faults and measured (``rpadiag rollouts``): ``.verdict``, ``.faults``, ``.findings``, ``.metrics``.

    files: .jsonl or .parquet files, or directories of them. records: or what is in memory, one mapping of lists for each sequence.
    model: score the tokens with this trainer; ``scoring`` are then the further fields of :class:`rpadiag.workflows.options.ScoringOptions`
    (dtype, device, temperature, align, contract, ...). run: directory to write.
    """
    from rpadiag.errors import UsageError
    from rpadiag.workflows.rollouts import RolloutsOptions, run_rollouts

    given, rows = paths_of("files", files), list(records)
    if bool(given) == bool(rows):
        raise UsageError("rollouts are files or records, one of the two", hint="rpadiag.rollouts('step_40.jsonl')")
    if scoring and model is None:
        raise UsageError(f"{', '.join(scoring)}: of the trainer that scores the tokens", hint="give model=... as well")
    asked = None if model is None else ScoringOptions(**of_types(ScoringOptions, {"model": model, **scoring}))
    options = RolloutsOptions(
        files=tuple(given),
        scoring=asked,
        **of_types(RolloutsOptions, {"schema": schema, "run": run}),
    )
    return run_rollouts(options, records=rows)


def gate(
    runs: PathLike | Run | Sequence[PathLike | Run],
    *gates: str,
    policy: PathLike | None = None,
    baseline: PathLike | Sequence[PathLike] = (),
) -> Judgement:
    """Gates such as ``"k3_kl<=1e-3"`` held against runs (``rpadiag report --gate``): ``.gates`` with a status and a sentence each, ``.changes`` since the baseline.

    Errors: UsageError for a gate that means nothing or a relative one without baseline, NotComparableError for a baseline of other tokens.
    """
    from rpadiag.errors import UsageError
    from rpadiag.workflows.judging import judged

    found = judged(
        _paths("runs", runs),
        _texts("gates", gates),
        _policy(policy),
        _paths("baseline", baseline),
    )
    if found is None:
        raise UsageError("no gate is given", hint='rpadiag.gate("runs/now", "k3_kl<=1e-3")')
    return found


def report(
    runs: PathLike | Run | Sequence[PathLike | Run],
    *,
    html: PathLike | None = None,
    markdown: PathLike | None = None,
    junit: PathLike | None = None,
    gates: str | Sequence[str] = (),
    policy: PathLike | None = None,
    baseline: PathLike | Sequence[PathLike] = (),
    history: PathLike | Sequence[PathLike] = (),
) -> Judgement | None:
    """Runs as one HTML file, a Markdown summary or JUnit (``rpadiag report``); what the gates said, or None without any.

    Files that exist are replaced. history: earlier runs, or directories of them, for the trend.
    """
    from rpadiag.errors import UsageError
    from rpadiag.workflows.judging import changes_along, judged

    paths = _paths("runs", runs)
    if html is None and markdown is None and junit is None and not (gates or policy or baseline):
        raise UsageError("nothing to do", hint="give html=FILE, markdown=FILE, junit=FILE, gates or a baseline")
    if history and html is None:
        raise UsageError("history is drawn on the page, and no page was asked for", hint="give html=FILE as well")
    judgement = judged(paths, _texts("gates", gates), _policy(policy), _paths("baseline", baseline))
    if html is not None:
        from rpadiag.reports.html import write_report

        write_report(
            paths,
            *paths_of("html", [html]),
            judgement=judgement,
            history=_paths("history", history),
            changes=changes_along(paths),
        )
    if markdown is not None:
        from rpadiag.reports.markdown import write_markdown

        write_markdown(paths, *paths_of("markdown", [markdown]), judgement=judgement)
    if junit is not None:
        from rpadiag.reports.junit import write_junit

        write_junit(paths, *paths_of("junit", [junit]), judgement=judgement)
    return judgement


def _paths(name: str, given: PathLike | Run | Sequence[PathLike | Run]) -> list[Path]:
    several = [given] if isinstance(given, str | Path | Run) else given
    if not isinstance(several, Iterable):
        raise refused(name, given, "a run, a path, or a list of them")
    return paths_of(name, [one.path if isinstance(one, Run) else one for one in several])


def _policy(given: PathLike | None) -> Path | None:
    return None if given is None else paths_of("policy", [given])[0]


def _texts(name: str, given: str | Iterable[str]) -> list[str]:
    """One text or several."""
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for one in several:
        if not isinstance(one, str):
            raise refused(name, one, 'text such as "k3_kl<=1e-3"')
    return several


__all__ = [
    "Result",
    "bisect",
    "capture",
    "compare",
    "compare_bundles",
    "fingerprint",
    "gate",
    "open_run",
    "report",
    "rollouts",
]
