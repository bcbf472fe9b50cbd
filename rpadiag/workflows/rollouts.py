"""``rpadiag rollouts``: recorded token ids and log-probabilities of a training run, checked, then measured.

One pass over the files, a batch at a time. Faults of the data come first: where one is recognised the numbers are not given as a mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError
from rpadiag.findings import Finding, Verdict
from rpadiag.workflows.options import ScoringOptions
from rpadiag.workflows.progress import SILENT, Progress, Stage

if TYPE_CHECKING:
    from rpadiag.compare.metric_sums import MetricSums
    from rpadiag.rollouts.batch import Batch
    from rpadiag.rollouts.files import RolloutFiles
    from rpadiag.runs import RunWriter
    from rpadiag.workflows.rollouts_score import Scorer

MAX_OUTLIERS_NAMED = 5
BEYOND_ROUNDING = 0.25  # nats, mean |d|; rounding to BF16 was seen to make 0.02 to 0.12


@dataclass(frozen=True, kw_only=True)
class RolloutsOptions:
    """files: .jsonl or .parquet, or directories of them. schema: None to recognise it. run: directory to write, or None.

    scoring: the trainer whose log-probabilities are taken in place of the file's; None takes the file's.
    """

    files: tuple[Path, ...]
    schema: str | None = None
    run: Path | None = None
    scoring: ScoringOptions | None = None

    def to_dict(self) -> dict[str, Any]:
        run = None if self.run is None else str(self.run)
        scoring = {} if self.scoring is None else self.scoring.to_dict()
        return {"files": [str(f) for f in self.files], "schema": self.schema, "run": run, **scoring}


@dataclass(frozen=True, kw_only=True)
class RolloutsResult:
    """What the files say. metrics: empty where the data are at fault. verdict: None where recorded numbers alone cannot give one."""

    schema: str
    num_sequences: int
    verdict: Verdict | None
    findings: tuple[Finding, ...]
    metrics: Mapping[str, Any]
    faults: tuple[str, ...]
    run: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": None if self.run is None else str(self.run),
            "schema": self.schema,
            "num_sequences": self.num_sequences,
            "faults": list(self.faults),
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "findings": [f.to_dict() for f in self.findings],
            "metrics": dict(self.metrics),
        }


def run_rollouts(
    options: RolloutsOptions,
    progress: Progress = SILENT,
    *,
    given: Mapping[str, Any] | None = None,
    records: Sequence[Mapping[str, Any]] = (),
    manifest: Mapping[str, Any] | None = None,
) -> RolloutsResult:
    """Read, check and measure; write ``options.run`` where one is named.

    records: what a trainer has in memory, in place of ``options.files``: one mapping of lists for each sequence.
    manifest: further entries of the run's manifest, such as the stacks that made the records.
    Raises InputError for files that cannot be read, that hold no trainer log-probabilities or no token that counts.
    """
    from rpadiag.rollouts.files import open_rollouts, rollout_records
    from rpadiag.runs import create_run

    files: RolloutFiles
    if options.files:
        files = open_rollouts(options.files, schema=options.schema)
    else:
        files = rollout_records(records, schema=options.schema)
    if not files.has_trainer and options.scoring is None:
        raise InputError(
            f"{files.paths[0]} has no log-probabilities of the trainer (column {files.schema.trainer})",
            detail=f"it is of schema {files.schema.name} and has {', '.join(files.columns)}",
            hint="score the tokens with the weights that sampled them: --model MODEL; or record the trainer's as well (docs/rollouts.md)",
        )
    if options.scoring is not None:
        from rpadiag.workflows.rollouts_score import check_scoring_model, start_scoring

        check_scoring_model(options.scoring, progress)
    with ExitStack() as stack:
        run = None
        source = {"schema": files.schema.name, "source": files.schema.source, "columns": list(files.columns)}
        if options.run is not None:
            run = stack.enter_context(
                create_run(options.run, command="rollouts", options=options.to_dict(), given=given or {})
            )
            run.set_manifest(rollouts=source, **(manifest or {}))
        seen = _Seen()
        scorer = None
        if options.scoring is not None:
            scorer = stack.enter_context(start_scoring(options.scoring, run, progress))
        doing = "read" if scorer is None else "score"
        with progress.stage(
            f"{doing} {len(files.paths)} {'file' if len(files.paths) == 1 else 'files'} of {files.schema.name}"
        ) as stage:
            _read(files, seen, run, scorer, stage)
        if scorer is not None and run is not None:
            run.set_manifest(rollouts={**source, "temperatures": sorted(scorer.temperatures)})
        result = _conclude(files, seen, options.run, scorer)
        if run is not None:
            _record(run, result)
    return result


@dataclass(kw_only=True)
class _Seen:
    sums: MetricSums = field(init=False)
    observed: Any = field(init=False)

    def __post_init__(self) -> None:
        from rpadiag.compare.metric_sums import MetricSums
        from rpadiag.rollouts.observed import Observed

        self.sums, self.observed = MetricSums(), Observed()


def _read(files: RolloutFiles, seen: _Seen, run: RunWriter | None, scorer: Scorer | None, stage: Stage) -> None:
    from rpadiag.rollouts.batch import lay_out

    for chunk in files.chunks():
        batch = lay_out(chunk, files.schema, first=seen.observed.num_sequences)
        columns: dict[str, Any] = {}
        if scorer is not None:
            batch, columns = scorer.score(batch, stage)
        seen.observed.add(batch)
        assert batch.p is not None  # asked before the first record
        seen.sums.add(batch.p, batch.q, sequence_ids=batch.row + batch.first)
        if run is not None:
            _write(run, batch, scorer, columns)
    if not seen.observed.num_sequences:
        raise InputError(
            f"{files.paths[0]} holds no record",
            hint="the process that wrote it may have been stopped before its first record",
        )
    if not seen.sums.num_tokens and not seen.observed.misfits:
        raise InputError(
            f"no token of {files.paths[0]} counts",
            detail=f"{seen.observed.num_sequences:,} sequences were read; {seen.sums.num_nonfinite:,} tokens have a log-probability that is not finite",
            hint=f"look at {', '.join(files.schema.mask) or 'the log-probabilities'}",
        )


def _write(run: RunWriter, batch: Batch, scorer: Scorer | None, scored: Mapping[str, Any]) -> None:
    import numpy as np

    int32 = np.int32
    run.add_prompts(
        {
            "prompt": batch.first + i,
            "num_prompt_tokens": int(batch.num_prompt[i]),
            "text": None if scorer is None else scorer.prompt_text(batch, i),
            "token_ids": batch.ids[batch.starts[i] : batch.starts[i + 1]].astype(int32),
        }
        for i in range(batch.num_sequences)
    )
    assert batch.p is not None
    columns: dict[str, Any] = {
        "prompt": (batch.row + batch.first).astype(int32),
        "position": batch.position.astype(int32),
        "token": batch.token.astype(int32),
        "source": np.full(len(batch.row), "decode"),
        "p": batch.p,
        "q": batch.q,
        **scored,
    }
    run.add_tokens(columns)


def _conclude(files: RolloutFiles, seen: _Seen, run: Path | None, scorer: Scorer | None) -> RolloutsResult:
    from rpadiag.compare.metrics import metrics_of
    from rpadiag.rollouts.fault import KINDS
    from rpadiag.rollouts.faults import recognise

    faults = recognise(seen.observed)
    verdict = _verdict(faults)
    metrics: dict[str, Any] = {}
    findings = list(faults)
    if scorer is not None:
        findings += scorer.findings(faults)
    if verdict is None or verdict.kind != "not comparable":
        metrics = metrics_of(seen.sums)
        findings += _statements(metrics, faulty=bool(faults) or metrics["mean_abs_d"] > BEYOND_ROUNDING)
        if verdict is None and metrics["max_abs_d"] == 0:
            verdict = _identical(metrics)
        if verdict is None and metrics["mean_abs_d"] > BEYOND_ROUNDING:
            verdict = _unexplained(metrics)
    return RolloutsResult(
        schema=files.schema.name,
        num_sequences=seen.observed.num_sequences,
        verdict=verdict,
        findings=tuple(findings),
        metrics=metrics,
        faults=tuple(f.code for f in faults if f.code in KINDS),
        run=run,
    )


def _verdict(faults: Sequence[Finding]) -> Verdict | None:
    """The first fault decides: of data, positions or weights, the sides are not comparable; of a definition, they compute different things."""
    from rpadiag.rollouts.fault import KINDS

    first = next((f for f in faults if f.severity == "error"), None)
    if first is None:
        return None
    if KINDS[first.code] == "definition":
        sentence = f"Different computation: the log-probabilities are of different distributions. {first.text}"
        return Verdict(kind="different computation", sentence=sentence, site="logprob", evidence=tuple(faults))
    return Verdict(
        kind="not comparable", sentence=f"Not comparable: this is not rounding. {first.text}", evidence=tuple(faults)
    )


def _identical(metrics: Mapping[str, Any]) -> Verdict:
    return Verdict(
        kind="identical",
        sentence=f"Identical: all {metrics['num_tokens']:,} log-probabilities agree to the last bit. Make sure that one column is not a copy of the other, "
        "as verl's bypass mode makes it.",
    )


def _unexplained(metrics: Mapping[str, Any]) -> Verdict:
    return Verdict(
        kind="inconclusive",
        sentence=f"No answer: mean |d| of {metrics['mean_abs_d']:.3g} nats (n = {metrics['num_tokens']:,}) is more than rounding makes, and no fault that rpadiag knows explains it. "
        "Compare the stacks on the same tokens with rpadiag compare before trusting these numbers.",
    )


def _statements(metrics: Mapping[str, Any], *, faulty: bool) -> list[Finding]:
    out = []
    if not faulty:
        out.append(
            Finding(
                code="no-fault",
                severity="info",
                text=f"No fault of the data is recognised. Trainer and rollout differ by {metrics['mean_abs_d']:.3g} nats per token (mean |d|, n = {metrics['num_tokens']:,} in "
                f"{metrics['num_sequences']:,} sequences), k3_kl {metrics['k3_kl']:.2e}, mean ratio {metrics['rollout_is_mean']:.4f}. Whether that is rounding alone "
                "is for rpadiag compare, which has an FP32 control.",
                numbers={k: metrics[k] for k in ("mean_abs_d", "k3_kl", "rollout_is_mean", "num_tokens")},
                rank=50,
            )
        )
    outliers = metrics.get("sequence_outliers") or []
    if outliers:
        named = ", ".join(f"{o['prompt']} ({o['mean_abs_d']:.3g} nats)" for o in outliers[:MAX_OUTLIERS_NAMED])
        more = f" and {len(outliers) - MAX_OUTLIERS_NAMED} more" if len(outliers) > MAX_OUTLIERS_NAMED else ""
        out.append(
            Finding(
                code="sequence-outliers",
                severity="notice",
                text=f"Sequences far above the others in mean |d|: {named}{more}.",
                numbers={"num_sequences": len(outliers)},
                rank=60,
            )
        )
    if metrics["num_nonfinite"]:
        out.append(
            Finding(
                code="non-finite",
                severity="warning",
                text=f"{metrics['num_nonfinite']:,} tokens are left out: a log-probability is NaN, infinite or null.",
                numbers={"num_tokens": metrics["num_nonfinite"]},
                rank=40,
            )
        )
    return out


def _record(run: RunWriter, result: RolloutsResult) -> None:
    by_source = {"all": dict(result.metrics), "decode": dict(result.metrics)} if result.metrics else {}
    counts = {"num_faults": len(result.faults), "faults": list(result.faults), "num_sequences": result.num_sequences}
    run.set_metrics({"logprob": by_source, "rollouts": counts})
    if result.verdict is not None:
        run.set_verdict(result.verdict)
    for finding in result.findings:
        run.add_finding(finding)
