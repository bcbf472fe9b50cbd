"""``rpadiag demo``: the three commands of a first look, on a model and prompts that need no download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpadiag.errors import InputError
from rpadiag.findings import NUM_FINDINGS, one_of_each_kind
from rpadiag.workflows.options import BisectOptions, CompareOptions
from rpadiag.workflows.progress import SILENT, Progress

# Minutes on two CPU cores, and error bars that separate the strongest regions; a closer answer wants some thousand tokens.
MAX_TOKENS = 24
NUM_GENERATED = 4
REPLICATES = 32
NUM_PROMPTS = 8  # that ship with rpadiag


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """directory: where numbered demonstrations go. rollout: as in ``compare``. num_prompts: of those that ship, from the first on.
    max_tokens: of each prompt. replicates: as in ``bisect``."""

    directory: Path
    rollout: str = "vllm"
    num_prompts: int = NUM_PROMPTS
    max_tokens: int = MAX_TOKENS
    replicates: int = REPLICATES


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A finished demo. sentence, answer: the verdicts of the comparison and of the bisection. findings: the most important
    ones of both runs, as in ``findings.json``; the page begins with the same."""

    compare_run: Path
    bisect_run: Path
    html: Path
    sentence: str
    answer: str
    findings: Sequence[dict[str, Any]]


def run_demo(options: DemoOptions, progress: Progress = SILENT) -> Demonstration:
    """Compare, bisect and report SmolLM2-135M on the prompts that ship with rpadiag.

    Each call writes into the next free ``directory/<number>``; nothing written earlier is touched.
    """
    from importlib.resources import as_file, files

    from rpadiag.reports.html import write_report
    from rpadiag.runs import open_run
    from rpadiag.workflows.bisect import run_bisect
    from rpadiag.workflows.compare import run_compare
    from rpadiag.workflows.smollm2 import ALIAS, ensure_model

    home = _next_directory(options.directory)
    ensure_model(progress)
    html = home / "report.html"
    with as_file(files("rpadiag") / "data" / "demo_prompts.jsonl") as shipped:
        prompts = _first(options.num_prompts, shipped, home)
        compare = CompareOptions(
            model=ALIAS,
            prompts=prompts,
            run=home / "compare",
            rollout=options.rollout,
            max_tokens=options.max_tokens,
            generate=NUM_GENERATED,
        )
        bisect = BisectOptions(
            model=ALIAS,
            prompts=prompts,
            run=home / "bisect",
            replicates=options.replicates,
            max_tokens=options.max_tokens,
        )
        run_compare(compare, progress)
        run_bisect(bisect, progress)
    with progress.stage("draw the report"):
        write_report([compare.run, bisect.run], html)
    compared, bisected = open_run(compare.run), open_run(bisect.run)
    sentence, answer = (str((run.verdict or {}).get("sentence", "")) for run in (compared, bisected))
    return Demonstration(
        compare_run=compare.run,
        bisect_run=bisect.run,
        html=html,
        sentence=sentence,
        answer=answer,
        findings=one_of_each_kind((*compared.findings, *bisected.findings), answer=answer)[:NUM_FINDINGS],
    )


def _first(num_prompts: int, shipped: Path, home: Path) -> Path:
    """The file of prompts to use: the one that ships, or a copy of its beginning in ``home``."""
    if num_prompts < NUM_PROMPTS:
        lines = shipped.read_text(encoding="utf-8").splitlines(keepends=True)
        prompts = home / "prompts.jsonl"
        prompts.write_text("".join(lines[:num_prompts]), encoding="utf-8")
        return prompts
    return shipped.relative_to(Path.cwd()) if shipped.is_relative_to(Path.cwd()) else shipped


def _next_directory(parent: Path) -> Path:
    """Make ``parent/001`` or the first number that is free; two demos at once get different ones."""
    for number in range(1, 1000):
        home = parent / f"{number:03d}"
        try:
            home.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise InputError(f"{parent} is not a directory", hint="choose another place with --into") from None
            continue
        except OSError as error:
            raise InputError(
                f"{home} cannot be created", detail=str(error), hint="choose another place with --into"
            ) from error
        return home
    raise InputError(f"{parent} already holds 999 demonstrations", hint="remove some, or choose another --into")
