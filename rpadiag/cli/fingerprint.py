"""``rpadiag fingerprint``: which rounding contract the kernels of a stack follow, from what they computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpadiag.cli import completion
from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.output import hint, print_findings, print_json
from rpadiag.sites import ALIGNABLE_REGIONS
from rpadiag.workflows.arguments import named_regions
from rpadiag.workflows.options import DTYPES, MODES, STACKS, FingerprintOptions


def fingerprint(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run or bundle directory; or a model, with PROMPTS.")
    ],
    prompts: Annotated[
        Path | None, typer.Argument(metavar="[PROMPTS]", help="Prompt file; MODEL is then run on it.")
    ] = None,
    stack: Annotated[
        str,
        typer.Option(
            "--stack",
            metavar="|".join(STACKS),
            help="Whose kernels to look at.",
            autocompletion=completion.one_of(STACKS),
        ),
    ] = "rollout",
    regions: shared.Regions = ",".join(ALIGNABLE_REGIONS),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="JSON file that rpadiag.align reads.  [default: in a run or bundle directory]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="|".join(DTYPES),
            help="Dtype of weights and activations.  [default: the run's or bundle's; of a model bfloat16]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda|cuda:N",
            help="Where to capture.  [default: as the run was; of a model auto]",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="|".join(MODES),
            help="How vLLM runs: compiled shows attention alone.  [default: as the run did; of a model eager]",
            show_default=False,
        ),
    ] = None,
    max_tokens: shared.MaxTokens = None,
    seed: shared.Seed = 0,
    revision: shared.Revision = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    output_format: shared.Format = "table",
) -> None:
    """Name the contract that reproduces each region bit for bit, or say why it cannot be determined.

    A run keeps no tensors, so RUN's stack runs again on its tokens, which takes as long as before; a bundle is read as it is.
    """
    shared.check_format(output_format)
    options = FingerprintOptions(
        target=target,
        prompts=prompts,
        stack=stack,
        regions=named_regions(regions),
        output=output,
        dtype=dtype,
        device=device,
        mode=mode,
        max_tokens=max_tokens,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    shared.require_stacks(vllm=prompts is not None and stack == "rollout")
    from rpadiag.workflows.fingerprint import run_fingerprint

    with progress_on_stderr() as progress:
        result = run_fingerprint(options, progress)
    if output_format == "json":
        print_json(result.to_dict())
    else:
        print_findings([finding.to_dict() for finding in result.findings], limit=len(result.findings))
    if result.path is not None:
        hint(f"rpadiag.align(model, contract={str(result.path)!r}) follows it")
