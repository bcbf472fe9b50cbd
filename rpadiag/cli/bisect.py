"""``rpadiag bisect``: which region's rounding is responsible for the divergence, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpadiag.cli import completion
from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.bisect_table import show
from rpadiag.cli.compare import answer, leave
from rpadiag.cli.output import hint, interruptible, print_json
from rpadiag.sites import ALIGNABLE_REGIONS
from rpadiag.workflows.arguments import named_regions
from rpadiag.workflows.options import ATTRIBUTABLE_REGIONS, BisectOptions

if TYPE_CHECKING:
    from rpadiag.runs.reader import Run


def bisect(
    context: typer.Context,
    model: shared.Model,
    prompts: shared.Prompts,
    run: shared.RunDirectory,
    regions: Annotated[
        str,
        typer.Option(
            "--regions",
            metavar="REGIONS",
            help=f"Comma separated, of {', '.join(ATTRIBUTABLE_REGIONS)}; all is the first three.",
            autocompletion=completion.comma_separated(("all", *ATTRIBUTABLE_REGIONS)),
        ),
    ] = ",".join(ALIGNABLE_REGIONS),
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="region|layer|region,layer",
            autocompletion=completion.comma_separated(("region", "layer")),
            help="What responsibility is assigned to: regions, groups of layers, or both; layer:N makes N groups.",
        ),
    ] = "region",
    replicates: shared.Replicates = 16,
    precision: Annotated[
        float | None,
        typer.Option(
            "--precision",
            metavar="REL",
            help="Stop when the standard error of the strongest part is below this share of it; --replicates is then the most.",
        ),
    ] = None,
    interactions: Annotated[
        bool, typer.Option("--interactions", help="Score combinations too: main effects and two-way interactions.")
    ] = False,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Repeat with a second kind of noise: equivalent batches, or on a CPU another order of sums; about twice the work.",
        ),
    ] = False,
    rollout: Annotated[
        str,
        typer.Option(
            "--rollout",
            metavar="none|vllm",
            help="vllm replicates the real engine too, under the same noise, and holds every trainer against it.",
        ),
    ] = "none",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the interrupted bisection in --run, with the same options.")
    ] = False,
    contract: shared.BisectContract = None,
    dtype: shared.Dtype = "bfloat16",
    device: shared.Device = "auto",
    attention: shared.Attention = "sdpa",
    max_tokens: shared.MaxTokens = None,
    seed: shared.Seed = 0,
    revision: shared.Revision = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    output_format: shared.Format = "table",
) -> None:
    """Attribute the systematic part of the divergence to regions, each with its standard error.

    Needs the trainer stack only, unless --rollout vllm is given. Aligning regions one at a time and looking at logprobs shows nothing, because the
    gap saturates; averaging over rounding replicates separates what belongs to a region from chaos. Interrupted, it
    goes on with --resume.
    """
    shared.check_format(output_format)
    options = BisectOptions(
        model=model,
        prompts=prompts,
        run=run,
        regions=named_regions(regions),
        by=by,
        replicates=replicates,
        precision=precision,
        interactions=interactions,
        confirm=confirm,
        rollout=rollout,
        resume=resume,
        contract=contract,
        dtype=dtype,
        device=device,
        attention=attention,
        max_tokens=max_tokens,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    from rpadiag.prompts import check_prompt_file
    from rpadiag.runs import open_run
    from rpadiag.workflows.bisect import run_bisect

    shared.check_contract(contract)
    shared.require_stacks(vllm=rollout == "vllm")
    check_prompt_file(prompts)  # before a run directory is made
    with interruptible(run, resume=True), progress_on_stderr() as progress:
        run_bisect(options, progress, given=shared.given_options(context))
    finished = open_run(run)
    if output_format == "json":
        print_json({**answer(finished), **tables(finished)})
    else:
        show(finished)
    hint(f"rpadiag report {run} --html {run}.html")
    leave(finished)


def tables(run: Run) -> dict[str, list[dict[str, Any]]]:
    """What the tables of a bisection hold, for JSON; the replicates themselves stay in the run."""
    return {name: run.table(name).to_pylist() for name in ("attribution", "effects")}
