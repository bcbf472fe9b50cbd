"""``rpadiag compare``: run both stacks on the same prompts and say whether, where and how much they disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.output import hint, interruptible, number, percent, print_findings, print_json, print_table, say
from rpadiag.errors import EXIT_UNANSWERABLE
from rpadiag.workflows.options import CONTROLS, CompareOptions

if TYPE_CHECKING:
    from rpadiag.runs.reader import Run

# Shown in this order, of all that metrics.json holds: name there, name here.
METRICS = (
    ("num_tokens", "tokens"),
    ("mean_abs_d", "mean |d|, nats"),
    ("max_abs_d", "max |d|, nats"),
    ("kl", "kl"),
    ("k3_kl", "k3_kl"),
    ("log_ppl_diff", "log_ppl_diff"),
    ("chi2_token", "chi2_token"),
    ("rollout_is_eff_sample_size", "effective sample size"),
    ("rollout_actor_probs_pearson_corr", "Pearson correlation of probabilities"),
)


def compare(
    context: typer.Context,
    model: shared.Model,
    prompts: shared.Prompts,
    run: shared.RunDirectory,
    rollout: shared.Rollout = "vllm",
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", metavar="PRESET", help="What an emulated rollout follows.  [default: by device]"),
    ] = None,
    dtype: shared.Dtype = "bfloat16",
    device: shared.Device = "auto",
    mode: shared.Mode = "eager",
    attention: shared.Attention = "sdpa",
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites",
            metavar="GLOB",
            help="Sites to compare, such as q_rope or layers.0.*; repeatable.  [default: every site]",
        ),
    ] = None,
    max_tokens: shared.MaxTokens = None,
    generate: Annotated[
        int, typer.Option("--generate", metavar="N", help="Let the rollout sample N tokens per prompt; score them too.")
    ] = 0,
    align: Annotated[
        str | None,
        typer.Option("--align", metavar="REGIONS", help="Align the trainer first: rope,swiglu,rmsnorm or all."),
    ] = None,
    contract: shared.AlignContract = None,
    control: Annotated[
        str,
        typer.Option(
            "--control",
            metavar="|".join(CONTROLS),
            help="fp32 runs both stacks again in FP32, which tells rounding from a mistake.",
        ),
    ] = "fp32",
    seed: shared.Seed = 0,
    revision: shared.Revision = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    output_format: shared.Format = "table",
) -> None:
    """Compare the trainer's and the rollout engine's forward pass on the same tokens.

    Prints the verdict (identical, rounding only, different computation, not comparable or inconclusive) and the
    evidence for it, and writes every number to DIR.
    """
    shared.check_format(output_format)
    options = CompareOptions(
        model=model,
        prompts=prompts,
        run=run,
        rollout=rollout,
        emulate=emulate,
        dtype=dtype,
        device=device,
        mode=mode,
        attention=attention,
        sites=tuple(sites or ()),
        max_tokens=max_tokens,
        generate=generate,
        align=shared.regions_of(align),
        contract=contract,
        control=control,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    from rpadiag.prompts import check_prompt_file
    from rpadiag.runs import open_run
    from rpadiag.workflows.compare import run_compare

    shared.check_contract(emulate)
    shared.check_contract(contract)
    shared.require_stacks(vllm=rollout == "vllm")
    check_prompt_file(prompts)  # before a run directory is made
    with interruptible(run), progress_on_stderr() as progress:
        run_compare(options, progress, given=shared.given_options(context))
    finished = open_run(run)
    if output_format == "json":
        print_json(answer(finished))
    else:
        show(finished)
    hint(f"rpadiag report {run} --html {run}.html")
    leave(finished)


def leave(run: Run) -> None:
    """Leave with 2 when the run's verdict is that there is no answer; its numbers are written all the same."""
    if run.verdict is not None and run.verdict["kind"] in ("not comparable", "inconclusive"):
        raise typer.Exit(EXIT_UNANSWERABLE)


def answer(run: Run) -> dict[str, Any]:
    """The answer of a run for machines."""
    return {"run": str(run.path), "verdict": run.verdict, "findings": run.findings, "metrics": run.metrics}


def show(run: Run) -> None:
    """The answer of a comparison for a person: verdict, evidence, numbers."""
    verdict = run.verdict
    if verdict is not None:
        say(verdict["sentence"], style="bold")
        say()
    print_findings(run.findings)
    metrics = run.metrics
    _show_metrics(metrics.get("logprob") or {})
    _show_floors(metrics.get("floors") or [])
    _show_points(run)
    say()
    say(f"run: {run.path}")


def _show_metrics(by_source: dict[str, dict[str, Any]]) -> None:
    if not by_source:
        return
    sources = [name for name in ("all", "prefill", "decode") if name in by_source]
    if "decode" not in sources:
        sources = ["all"]
    rows = [(text, *(number(by_source[s].get(name)) for s in sources)) for name, text in METRICS]
    header = ("", *("all tokens" if s == "all" else s for s in sources))
    print_table("Logprobs: d = trainer - rollout", header, rows)


def _show_floors(floors: list[dict[str, Any]]) -> None:
    if not floors:
        return
    rows = [
        (
            f"{f['stack']}: {f['text']}",
            number(f["mean_abs_d"]),
            number(f["max_abs_d"]),
            percent(f["exact_share"]),
            number(f["num_tokens"]),
        )
        for f in floors
    ]
    print_table("Noise floors: each stack against itself", ("", "mean |d|", "max |d|", "exact", "tokens"), rows)


def _show_points(run: Run) -> None:
    """Local against propagated divergence, one row per point, pooled over layers and prompts."""
    if not run.has("sites"):
        return
    from rpadiag.reports.pooling import pool_sites

    pooled = pool_sites(run.sites(), precision="model", by=("point",))
    rows = [
        (str(r["point"]), str(r["region"]), percent(r["local_differing"]), percent(r["differing"]), number(int(r["n"])))
        for r in pooled.to_dict("records")
    ]
    title = "Sites: elements that differ, all layers"
    print_table(title, ("site", "region", "made here", "end to end", "elements"), rows, left=2)
