"""``rpadiag rollouts``: how far apart trainer and rollout are in recorded data, and whether the data are at fault."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpadiag.cli import completion
from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.output import hint, number, print_findings, print_json, print_table, say
from rpadiag.errors import EXIT_UNANSWERABLE, UsageError
from rpadiag.findings import most_important_first
from rpadiag.rollouts.schemas import BY_NAME
from rpadiag.workflows.options import ScoringOptions

if TYPE_CHECKING:
    from rpadiag.runs.reader import Run

SCHEMAS = "|".join(BY_NAME)
METRICS = (
    ("num_tokens", "tokens"),
    ("num_sequences", "sequences"),
    ("mean_abs_d", "mean |d|, nats"),
    ("max_abs_d", "max |d|, nats"),
    ("kl", "kl"),
    ("k3_kl", "k3_kl"),
    ("log_ppl_diff", "log_ppl_diff"),
    ("chi2_token", "chi2_token"),
    ("rollout_is_mean", "mean ratio"),
    ("rollout_is_eff_sample_size", "effective sample size"),
    ("outside_ratio_share", "ratio outside 0.8 to 1.2, share"),
    ("rollout_actor_probs_pearson_corr", "Pearson correlation of probabilities"),
)


def rollouts(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help=".jsonl or .parquet files, or directories of them.")
    ],
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar=SCHEMAS,
            help="Whose records they are.  [default: by their columns]",
            autocompletion=completion.one_of(BY_NAME),
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Directory to write, for reports and gates; it must not exist yet."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Score the tokens with this trainer: the weights that sampled them.  [default: the file's own column]",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", help="MODEL's logits are divided by it.  [default: the file's, or 1]"
        ),
    ] = None,
    dtype: shared.Dtype = "bfloat16",
    device: shared.Device = "auto",
    attention: shared.Attention = "sdpa",
    align: shared.Align = None,
    contract: shared.AlignContract = None,
    revision: shared.Revision = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    output_format: shared.Format = "table",
) -> None:
    """Check recorded rollouts for faults of the data, then measure how far trainer and rollout are apart.

    A shifted column, another tokenisation, a temperature on one side, a truncated support, stale weights or a stale prefix cache
    is named and never counted as rounding; where the two sides are not comparable the exit code is 2. A file without the
    trainer's log-probabilities is scored by MODEL.
    """
    shared.check_format(output_format)
    from rpadiag.workflows.rollouts import RolloutsOptions, run_rollouts

    scoring = None
    if model is None:
        _check_no_scoring(shared.given_options(context))
    else:
        scoring = ScoringOptions(
            model=model,
            dtype=dtype,
            device=device,
            attention=attention,
            temperature=temperature,
            align=shared.aligned_of(align),
            contract=contract,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        shared.check_contract(contract)
        shared.require_stacks(vllm=False)
    options = RolloutsOptions(files=tuple(files), schema=schema, run=run, scoring=scoring)
    with progress_on_stderr() as progress:
        result = run_rollouts(options, progress, given=shared.given_options(context))
    if output_format == "json":
        print_json(result.to_dict())
    else:
        show(result.to_dict())
    if run is not None:
        hint(f"rpadiag report {run} --html {run}.html")
    if result.verdict is not None and result.verdict.kind in ("not comparable", "inconclusive"):
        raise typer.Exit(EXIT_UNANSWERABLE)


def _check_no_scoring(given: dict[str, Any]) -> None:
    """UsageError for an option that only means something with --model."""
    for name in given:
        if name not in ("files", "schema", "run", "output_format", "model"):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} is of the trainer that scores the tokens", hint=f"add --model MODEL, or leave {option} out"
            )


def answer(run: Run) -> dict[str, Any]:
    """What a run of recorded rollouts holds, as the command itself answers."""
    counts = run.metrics.get("rollouts") or {}
    return {
        "run": str(run.path),
        "schema": (run.manifest.get("rollouts") or {}).get("schema"),
        "num_sequences": counts.get("num_sequences"),
        "faults": counts.get("faults") or [],
        "verdict": run.verdict,
        "findings": run.findings,
        "metrics": (run.metrics.get("logprob") or {}).get("all") or {},
    }


def show(found: Mapping[str, Any]) -> None:
    """An answer for a person: verdict, findings, numbers, the sequences furthest apart."""
    said = found["verdict"]["sentence"] if found["verdict"] is not None else ""
    if said:
        say(said, style="bold")
        say()
    print_findings(most_important_first(f for f in found["findings"] if not said.endswith(f["text"])))
    metrics = found["metrics"]
    if metrics:
        rows = [(text, number(metrics.get(name))) for name, text in METRICS]
        print_table("Log-probabilities: d = trainer - rollout", ("", "all tokens"), rows)
        print_table(
            "Sequences furthest apart",
            ("sequence", "tokens", "mean |d|", "max |d|", "k3_kl"),
            [_sequence(row) for row in metrics.get("worst_sequences") or ()],
        )
    say()
    say(
        f"{number(found['num_sequences'])} sequences of schema {found['schema']}"
        + (f"; run: {found['run']}" if found["run"] else "")
    )


def _sequence(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("num_tokens", "mean_abs_d", "max_abs_d", "k3_kl")
    return (str(row["prompt"]), *(number(row[name]) for name in names))
