"""``rpadiag compare``: both stacks on the same tokens, every site held against the other, one verdict.

Prompts go through one at a time: the rollout engine captures one into a bundle inside the run directory, the trainer
is held against it, the bundle is deleted. Neither memory nor disk grows with the number of prompts, and the rollout's
logprobs are those of a plain engine call with one prompt, which anyone can repeat.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.compare.evidence import Control, Evidence
from rpadiag.compare.metrics import logprob_metrics
from rpadiag.compare.pairing import Pairing, SequencePair, check_positions
from rpadiag.compare.verdict import decide
from rpadiag.errors import CaptureError
from rpadiag.findings import Verdict
from rpadiag.runs import RunWriter, create_run
from rpadiag.runs.manifest import differing_tensors
from rpadiag.sites import match_sites, split_site
from rpadiag.workflows.compare_rows import prompt_row, token_columns
from rpadiag.workflows.control import fp32_control
from rpadiag.workflows.floors import measure_floors
from rpadiag.workflows.inputs import Inputs, check_model, load_inputs
from rpadiag.workflows.options import DEFAULT_CONTRACT, CompareOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.rollout import Rollout, start_rollout

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenScores, TokenSequence
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.engines.vllm import VllmEngine

PrepareTrainer = Callable[["TrainerEngine"], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a finished comparison answers with. metrics: the standard logprob metrics over all tokens."""

    run: Path
    verdict: Verdict
    metrics: Mapping[str, Any]
    floors: Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class _Scored:
    """Scores of every sequence on both stacks; a few numbers per token."""

    sequences: list[TokenSequence]
    trainer: list[TokenScores]
    rollout: list[TokenScores]

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """p, q, sequence index and decode flag of every scored token."""
        p = np.concatenate([s.logprob for s in self.trainer])
        q = np.concatenate([s.logprob for s in self.rollout])
        ids = np.concatenate([np.full(len(s.logprob), i) for i, s in enumerate(self.trainer)])
        decode = np.concatenate([np.arange(1, len(t.token_ids)) >= t.num_prompt_tokens for t in self.sequences])
        return p, q, ids, decode

    def argmaxes(self) -> tuple[np.ndarray, np.ndarray]:
        """Most likely token of the trainer and of the rollout, for every scored token."""
        return (
            np.concatenate([s.argmax for s in self.trainer]),
            np.concatenate([s.argmax for s in self.rollout]),
        )


def run_compare(
    options: CompareOptions,
    progress: Progress = SILENT,
    *,
    given: Mapping[str, Any] | None = None,
    prepare_trainer: PrepareTrainer | None = None,
    rollout_overrides: Mapping[str, Any] | None = None,
    running: VllmEngine | None = None,
) -> Comparison:
    """Compare the stacks and write ``options.run``.

    given: the options the user set, for the manifest. prepare_trainer: called with every trainer engine after it is
    loaded (model dtype and FP32), for trainers that rpadiag does not build itself: synced weights, patched modules.
    rollout_overrides: configuration entries that the rollout engine is started with in place of the checkpoint's.
    running: a started engine of this model to use and leave running, for many comparisons without as many starts.
    Raises RpadiagError for anything the user can mend; the run directory then says ``failed``.
    """
    check_model(options, progress)
    with (
        create_run(options.run, command="compare", options=options.to_dict(), given=given or {}) as run,
        ExitStack() as stack,
    ):
        inputs = load_inputs(options, progress, attention=options.attention, num_generate=options.generate)
        run.set_effective(device=inputs.device, dtype=inputs.dtype)
        if prepare_trainer is not None:
            prepare_trainer(inputs.trainer)
        chosen = match_sites(options.sites, list(inputs.facts.sites))
        alignment = _align(options, inputs, run, stack)
        with progress.stage(f"start {options.rollout} engine"):
            rollout = stack.enter_context(
                start_rollout(options, inputs, run, overrides=rollout_overrides, running=running)
            )
        chosen = _visible(chosen, rollout, asked=bool(options.sites))
        differing = _check_weights(run, inputs, rollout)
        if differing:
            return _stop_incomparable(run, inputs, rollout, options, differing)
        pairing = Pairing(
            inputs.trainer, sites=chosen, precision="model", experts_per_token=inputs.facts.experts_per_token
        )
        stacks = {  # before the control, which runs both in FP32
            "trainer": {**inputs.trainer.manifest(), "model": options.model, "aligned": alignment},
            "rollout": {**rollout.engine.manifest(), "model": options.model},
        }
        scored = _compare_all(options, inputs, rollout, pairing, run, progress)
        floors = measure_floors(inputs, rollout, scored.sequences, scored.trainer, scored.rollout, progress)
        control = fp32_control(
            options,
            inputs,
            rollout,
            run,
            progress,
            sequences=scored.sequences,
            sites=chosen,
            prepare_trainer=prepare_trainer,
        )
        run.set_manifest(
            **stacks,
            rollout_label=rollout.label,
            sites={"requested": list(chosen), "absent": inputs.facts.absent_reasons | dict(rollout.absent)},
            control={"precision": "fp32", "reason": control.reason, "num_tokens": control.num_tokens},
        )
        return _conclude(run, inputs, rollout, pairing, scored, floors, control)


def _visible(chosen: list[str], rollout: Rollout, *, asked: bool) -> list[str]:
    """The chosen sites that this engine can show; one that was asked for by name and is hidden is an error."""
    seen = [s for s in chosen if split_site(s)[1] not in rollout.absent]
    if asked and len(seen) < len(chosen):
        hidden = next(s for s in chosen if s not in seen)
        raise CaptureError(
            f"site {hidden} cannot be seen in {rollout.label}: {rollout.absent[split_site(hidden)[1]]}",
            hint="rerun with --mode eager, or ask for " + ", ".join(sorted({split_site(s)[1] for s in seen})),
        )
    return seen


def _align(options: CompareOptions, inputs: Inputs, run: RunWriter, stack: ExitStack) -> dict[str, Any] | None:
    if not options.align:
        return None
    from rpadiag.regions.align import align

    contract = options.contract or DEFAULT_CONTRACT
    run.set_effective(contract=contract)
    alignment = stack.enter_context(align(inputs.trainer.model, regions=options.align, contract=contract))
    return {"regions": list(options.align), "contract": contract, "contracts": alignment.to_dict()}


def _check_weights(run: RunWriter, inputs: Inputs, rollout: Rollout) -> list[str]:
    """Record both stacks' weight digests; names of the tensors that differ or exist on one side only."""
    ours, theirs = inputs.trainer.weight_digests(), rollout.engine.weight_digests()
    run.set_weights("trainer", ours)
    run.set_weights("rollout", theirs)
    return differing_tensors(ours, theirs)


def _stop_incomparable(
    run: RunWriter, inputs: Inputs, rollout: Rollout, options: CompareOptions, differing: list[str]
) -> Comparison:
    """Write the run with the verdict alone: numbers of different weights would only mislead."""
    from rpadiag.compare.aggregate import Aggregate

    verdict = decide(
        Evidence(
            dtype=inputs.dtype,
            aggregate=Aggregate(),
            control=Control(reason="weights differ"),
            mean_abs_d=float("nan"),
            max_abs_d=float("nan"),
            num_tokens=0,
            rollout=rollout.label,
            weights_differing=differing,
        )
    )
    run.set_manifest(
        trainer={**inputs.trainer.manifest(), "model": options.model},
        rollout={**rollout.engine.manifest(), "model": options.model},
        rollout_label=rollout.label,
    )
    _record_verdict(run, verdict)
    return Comparison(run=options.run, verdict=verdict, metrics={}, floors=())


def _compare_all(
    options: CompareOptions, inputs: Inputs, rollout: Rollout, pairing: Pairing, run: RunWriter, progress: Progress
) -> _Scored:
    scored = _Scored(sequences=[], trainer=[], rollout=[])
    captured = [s for s in with_inputs(pairing.sites, inputs) if split_site(s)[1] not in rollout.absent]
    prompts = {p.index: p for p in inputs.prompts}
    with progress.stage("compare prompts", total=len(inputs.sequences)) as bar:
        for result, capture in captured_one_by_one(
            rollout, inputs.sequences, sites=captured, scratch=run.scratch_dir(), num_generate=options.generate
        ):
            pair = SequencePair(
                prompt=result.sequence.prompt,
                token_ids=result.sequence.token_ids,
                num_prompt_tokens=result.sequence.num_prompt_tokens,
                scores=result.scores,
                capture=capture,
            )
            scores, rows = pairing.compare(pair)
            run.add_sites(rows)
            run.add_prompts([prompt_row(prompts[pair.prompt], result.sequence)])
            run.add_tokens(token_columns(result.sequence, scores, result.scores, inputs.tokenizer))
            scored.sequences.append(result.sequence)
            scored.trainer.append(scores)
            scored.rollout.append(result.scores)
            bar.advance()
    return scored


def captured_one_by_one(
    rollout: Rollout, sequences: Sequence[TokenSequence], *, sites: Sequence[str], scratch: Path, num_generate: int
) -> Iterator[tuple[Any, Any]]:
    """(result, capture) of one sequence after another.

    The rollout works on the next sequence while the caller compares the last one; at most two captures are on disk.
    """
    from rpadiag.engines.bundle import open_bundle

    def capture(index: int) -> Any:
        return rollout.engine.score(
            [sequences[index]], sites=sites, bundle_dir=scratch / f"sequence-{index}", num_generate=num_generate
        )

    # Two transformers forwards in two threads would share the attention registry; a real engine is another process.
    ahead: Executor = ThreadPoolExecutor(max_workers=1) if rollout.real else _Inline()
    with ahead:
        future = ahead.submit(capture, 0) if sequences else None
        for index in range(len(sequences)):
            assert future is not None
            (result,) = future.result()
            if index + 1 < len(sequences):
                future = ahead.submit(capture, index + 1)
            directory = scratch / f"sequence-{index}"
            yield result, open_bundle(directory).capture(0)
            shutil.rmtree(directory, ignore_errors=True)


class _Inline(Executor):
    """Runs each task when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def with_inputs(sites: Sequence[str], inputs: Inputs) -> list[str]:
    """The sites to capture so that every chosen one can be replayed: the chosen ones and what they read."""
    have = list(inputs.facts.sites)
    needed = set(sites)
    for site in sites:
        needed.update(inputs.trainer.reads(site))
    return [s for s in have if s in needed and s != "logprob"]


def _conclude(
    run: RunWriter,
    inputs: Inputs,
    rollout: Rollout,
    pairing: Pairing,
    scored: _Scored,
    floors: list[dict[str, Any]],
    control: Control,
) -> Comparison:
    p, q, ids, decode = scored.columns()
    ours, theirs = scored.argmaxes()
    metrics = logprob_metrics(p, q, sequence_ids=ids, p_argmax=ours, q_argmax=theirs)
    by_source = {
        name: logprob_metrics(p[mask], q[mask], sequence_ids=ids[mask], p_argmax=ours[mask], q_argmax=theirs[mask])
        for name, mask in (("prefill", ~decode), ("decode", decode))
        if mask.any()
    }
    run.set_metrics({"logprob": {"all": metrics, **by_source}, "floors": floors})
    difference = np.abs(p.astype(np.float64) - q.astype(np.float64))
    verdict = decide(
        Evidence(
            dtype=inputs.dtype,
            aggregate=pairing.aggregate,
            control=control,
            mean_abs_d=float(metrics["mean_abs_d"]),
            max_abs_d=float(metrics["max_abs_d"]),
            num_tokens=len(p),
            num_nonfinite=int((~np.isfinite(difference)).sum()),
            rollout=rollout.label,
            positions=check_positions(
                [
                    (s.prompt, ours.positions, theirs.positions)
                    for s, ours, theirs in zip(scored.sequences, scored.trainer, scored.rollout, strict=True)
                ]
            ),
            floors={f["name"]: f["mean_abs_d"] for f in floors},
        )
    )
    _record_verdict(run, verdict)
    return Comparison(run=run.path, verdict=verdict, metrics=metrics, floors=floors)


def _record_verdict(run: RunWriter, verdict: Verdict) -> None:
    run.set_verdict(verdict)
    for finding in verdict.evidence:
        run.add_finding(finding)


__all__ = ["Comparison", "run_compare"]
