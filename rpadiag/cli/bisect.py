"""``rpadiag bisect``: which region's rounding is responsible for the divergence, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.compare import answer, leave
from rpadiag.cli.output import hint, interruptible, number, percent, print_findings, print_json, print_table, say
from rpadiag.sites import ALIGNABLE_REGIONS
from rpadiag.workflows.options import BisectOptions

if TYPE_CHECKING:
    from rpadiag.runs.reader import Run

DESIGNS = ("each", "only", "all", "self")
COLUMNS = ("design", "region", "systematic_sq", "systematic_sq_se", "chaotic_rms", "local_differing", "detectable")


def bisect(
    context: typer.Context,
    model: shared.Model,
    prompts: shared.Prompts,
    run: shared.RunDirectory,
    regions: shared.Regions = ",".join(ALIGNABLE_REGIONS),
    replicates: shared.Replicates = 16,
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

    Needs the trainer stack only. Aligning regions one at a time and looking at logprobs shows nothing, because the
    gap saturates; averaging over rounding replicates separates what belongs to a region from chaos.
    """
    shared.check_format(output_format)
    options = BisectOptions(
        model=model,
        prompts=prompts,
        run=run,
        regions=shared.regions_of(regions),
        replicates=replicates,
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
    shared.require_stacks(vllm=False)
    check_prompt_file(prompts)  # before a run directory is made
    with interruptible(run), progress_on_stderr() as progress:
        run_bisect(options, progress, given=shared.given_options(context))
    finished = open_run(run)
    if output_format == "json":
        print_json({**answer(finished), "attribution": finished.table("attribution").to_pylist()})
    else:
        show(finished)
    hint(f"rpadiag report {run} --html {run}.html")
    leave(finished)


def show(run: Run) -> None:
    """The answer of a bisection for a person: verdict, evidence, numbers."""
    verdict = run.verdict
    if verdict is not None:
        say(verdict["sentence"], style="bold")
        say()
    print_findings(run.findings)
    found = run.table("attribution", COLUMNS).to_pylist()
    found.sort(key=lambda row: (DESIGNS.index(row["design"]), -row["systematic_sq"]))
    rows = [
        (
            _name(row["design"], row["region"]),
            f"{row['systematic_sq']:.2e}",
            f"{row['systematic_sq_se']:.1e}",
            number(row["chaotic_rms"]),
            percent(row["local_differing"]),
            "yes" if row["detectable"] else "no",
        )
        for row in found
    ]
    header = ("trainer", "systematic, nats²", "± s.e.", "chaotic rms, nats", "made locally", "above zero")
    print_table("Attribution: systematic distance from the trainer with every region aligned", header, rows)
    say()
    say(f"run: {run.path}")


def _name(design: str, region: str) -> str:
    """What was scored in that row, against the trainer with every region aligned."""
    names = {"each": f"{region} not aligned", "only": f"only {region} aligned", "all": "none aligned"}
    return names.get(design, "self-control")
