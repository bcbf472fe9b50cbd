"""``rpadiag demo``: compare, bisect and report on a model and prompts that ship as packages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.output import print_findings, say
from rpadiag.workflows.demo import MAX_TOKENS, NUM_PROMPTS, REPLICATES, DemoOptions, run_demo


def demo(
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Where to write; each demo gets the next free number.")
    ] = Path("runs-demo"),
    rollout: shared.Rollout = "vllm",
    num_prompts: Annotated[
        int,
        typer.Option(
            "--num-prompts", metavar="N", min=2, max=NUM_PROMPTS, help="Only the first N of the eight prompts."
        ),
    ] = NUM_PROMPTS,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens of each prompt.")] = MAX_TOKENS,
    replicates: shared.Replicates = REPLICATES,
) -> None:
    """Compare, bisect and report on SmolLM2-135M: 8 to 12 minutes on two CPU cores, no GPU, no hub."""
    options = DemoOptions(
        directory=into, rollout=rollout, num_prompts=num_prompts, max_tokens=max_tokens, replicates=replicates
    )
    shared.require_stacks(vllm=rollout == "vllm")
    try:
        with progress_on_stderr() as progress:
            done = run_demo(options, progress)
    except KeyboardInterrupt:
        print(f"interrupted; what was written is under {into}, and the next demo goes beside it", file=sys.stderr)
        raise
    say(done.sentence, style="bold")
    say()
    say("The three most important findings:")
    print_findings(done.findings)
    say()
    if all(finding["text"] != done.answer for finding in done.findings):
        say(done.answer)
        say()
    say(f"report: {done.html}")
