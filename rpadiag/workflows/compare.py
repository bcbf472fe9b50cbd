"""``rpadiag compare``: both stacks on the same tokens, every site held against the other, one verdict.

Prompts go through one at a time: the rollout engine captures one into a bundle inside the run directory, the trainer
is held against it, the bundle is deleted. Neither memory nor disk grows with the number of prompts, and the rollout's
logprobs are those of a plain engine call with one prompt, which anyone can repeat.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.compare.causes import batch_invariance, known_causes
from rpadiag.compare.evidence import Control, Evidence
from rpadiag.compare.metrics import logprob_metrics
from rpadiag.compare.pairing import Pairing, SequencePair, check_positions
from rpadiag.compare.verdict import decide
from rpadiag.findings import Finding, Verdict
from rpadiag.runs import RunWriter, create_run
from rpadiag.runs.manifest import differing_tensors
from rpadiag.sites import REDUCED, in_execution_order, match_sites, reduced_site, split_site
from rpadiag.workflows.alignment import align_trainer
from rpadiag.workflows.compare_rows import prompt_row, token_columns
from rpadiag.workflows.control import fp32_control
from rpadiag.workflows.decoding import decode_finding, sample_tokens, sampling_of
from rpadiag.workflows.floors import measure_floors
from rpadiag.workflows.inputs import Inputs, check_model, load_inputs
from rpadiag.workflows.options import CompareOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.rollout import Rollout, start_rollout, visible_sites
from rpadiag.workflows.scored import Scored
from rpadiag.workflows.sharding import (
    begin_late,
    begin_together,
    collect,
    join_parts,
    path_of_part,
    progress_of,
    share_of,
    splitting,
)

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.ranks import Ranks
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
    ranks = splitting(options)
    progress = progress_of(ranks, progress)
    check_model(options, progress)

    def begin() -> RunWriter:
        path = options.run if ranks is None else path_of_part(options.run, ranks.rank)
        return create_run(path, command="compare", options=options.to_dict(), given=given or {})

    with begin() if ranks is None else begin_together(ranks, begin) as run, ExitStack() as stack:
        found = _compare_in(
            run,
            options,
            progress,
            stack,
            prepare_trainer=prepare_trainer,
            rollout_overrides=rollout_overrides,
            running=running,
            ranks=ranks,
        )
        if ranks is not None and not ranks.rank:
            join_parts(run, ranks)
    if ranks is not None and ranks.rank:
        ranks.gather("closed")
    return found


def _compare_in(
    run: RunWriter,
    options: CompareOptions,
    progress: Progress,
    stack: ExitStack,
    *,
    prepare_trainer: PrepareTrainer | None,
    rollout_overrides: Mapping[str, Any] | None,
    running: VllmEngine | None,
    ranks: Ranks | None,
) -> Comparison:
    """The comparison of :func:`run_compare`, written to ``run``; with ``ranks`` this rank's share of it, and on rank 0 the whole."""
    inputs = load_inputs(options, progress, attention=options.attention, num_generate=options.generate)
    run.set_effective(device=inputs.device, dtype=inputs.dtype)
    if prepare_trainer is not None:
        prepare_trainer(inputs.trainer)
    chosen = match_sites(options.sites, list(inputs.facts.sites_over(options.tp)))
    alignment = _align(options, inputs, run, stack)
    with progress.stage(f"start {options.rollout} engine"):
        rollout = stack.enter_context(start_rollout(options, inputs, run, overrides=rollout_overrides, running=running))
    chosen = visible_sites(chosen, rollout, asked=bool(options.sites))
    differing = _check_weights(run, inputs, rollout)
    stacks = {  # before the control, which runs both in FP32
        "trainer": {**inputs.trainer.manifest(), "model": options.model, "aligned": alignment},
        "rollout": {**rollout.engine.manifest(), "model": options.model, "sampling": _sampling(options)},
    }
    causes = known_causes(stacks["trainer"], stacks["rollout"])
    run.set_manifest(**stacks, rollout_label=rollout.label)
    if differing:
        return stop_incomparable(run, weights_differ(differing, causes, dtype=inputs.dtype, label=rollout.label))
    pairing = Pairing(inputs.trainer, sites=chosen, precision="model", experts_per_token=inputs.facts.experts_per_token)
    share = inputs if ranks is None else share_of(inputs, ranks)
    scored = _compare_all(options, share, rollout, pairing, run, progress)
    told: dict[str, Any] = {"dtype": inputs.dtype, "label": rollout.label, "causes": causes}
    if ranks is not None:
        collect(ranks, scored, pairing)
        run.set_manifest(ranks={"rank": ranks.rank, "size": ranks.size, "divide": "prompts"})
        if ranks.rank:
            return conclude(run, scored, pairing, Control(reason="rank 0 runs it"), **told)
    floors = measure_floors(inputs, rollout, scored, progress)
    told["causes"] = (*causes, *batch_invariance(stacks["rollout"], floors))
    with nullcontext(run) if ranks is None else begin_late(run, ranks, options) as later:
        control = fp32_control(
            options,
            inputs,
            rollout,
            later,
            progress,
            sequences=scored.sequences,
            sites=chosen,
            prepare_trainer=prepare_trainer,
        )
    run.set_manifest(
        sites={"requested": list(chosen), "absent": absent_points(options, inputs, rollout)},
        control={"precision": "fp32", "reason": control.reason, "num_tokens": control.num_tokens},
    )
    return conclude(run, scored, pairing, control, floors=floors, **told)


def _sampling(options: CompareOptions) -> dict[str, Any] | None:
    return {"num_tokens": options.generate, **sampling_of(options), "seed": options.seed} if options.generate else None


def _align(options: CompareOptions, inputs: Inputs, run: RunWriter, stack: ExitStack) -> dict[str, Any] | None:
    if not options.align:
        return None
    entry = align_trainer(inputs.trainer, options.align, options.contract, stack.enter_context)
    run.set_effective(contract=entry["contract"], align=entry["regions"])
    return entry


def _check_weights(run: RunWriter, inputs: Inputs, rollout: Rollout) -> list[str]:
    """Record both stacks' weight digests; names of the tensors that differ or exist on one side only."""
    ours, theirs = inputs.trainer.weight_digests(), rollout.engine.weight_digests()
    run.set_weights("trainer", ours)
    run.set_weights("rollout", theirs)
    return differing_tensors(ours, theirs)


def weights_differ(differing: list[str], causes: Sequence[Finding], *, dtype: str, label: str) -> Verdict:
    """The verdict alone: numbers of different weights would only mislead."""
    from rpadiag.compare.aggregate import Aggregate

    return decide(
        Evidence(
            dtype=dtype,
            aggregate=Aggregate(),
            control=Control(reason="weights differ"),
            mean_abs_d=float("nan"),
            max_abs_d=float("nan"),
            num_tokens=0,
            rollout=label,
            weights_differing=differing,
            causes=causes,
        )
    )


def stop_incomparable(run: RunWriter, verdict: Verdict) -> Comparison:
    """Write the run with the verdict and nothing else."""
    record_verdict(run, verdict)
    return Comparison(run=run.path, verdict=verdict, metrics={}, floors=())


def _compare_all(
    options: CompareOptions, inputs: Inputs, rollout: Rollout, pairing: Pairing, run: RunWriter, progress: Progress
) -> Scored:
    scored = Scored(sequences=[], trainer=[], rollout=[])
    # a sequence's seed is that of its place among all prompts, also where this process has some of them
    first = inputs.prompts[0].index if inputs.prompts else 0
    sampled = sample_tokens(replace(options, seed=options.seed + first), inputs, rollout, progress)
    sequences = inputs.sequences if sampled is None else sampled.sequences
    captured = [s for s in with_inputs(pairing.sites, inputs) if split_site(s)[1] not in rollout.absent]
    prompts = {p.index: p for p in inputs.prompts}
    with progress.stage("compare prompts", total=len(inputs.sequences)) as bar:
        one_by_one = captured_one_by_one(
            rollout,
            sequences,
            sites=captured,
            scratch=run.scratch_dir(),
            decode=sampled is not None,
            **sampling_of(options),
        )
        for index, (result, capture) in enumerate(one_by_one):
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
            theirs = result.scores if sampled is None else sampled.merged(index, result.scores)
            rescored = None if sampled is None or sampled.rescored is None else sampled.rescored[index]
            run.add_tokens(token_columns(result.sequence, scores, theirs, inputs.texts(result.sequence), rescored))
            scored.sequences.append(result.sequence)
            scored.trainer.append(scores)
            scored.rollout.append(theirs)
            if rescored is not None:
                scored.decoded.append(result.scores)
                scored.rescored.append(rescored)
            bar.advance()
    return scored


def captured_one_by_one(
    rollout: Rollout, sequences: Sequence[TokenSequence], *, sites: Sequence[str], scratch: Path, **how: Any
) -> Iterator[tuple[Any, Any]]:
    """(result, capture) of one sequence after another; ``how``: further arguments of the engine's ``score``.

    The rollout works on the next sequence while the caller compares the last one; at most two captures are on disk.
    """
    from rpadiag.engines.bundle import open_bundle

    def capture(index: int) -> Any:
        return rollout.engine.score([sequences[index]], sites=sites, bundle_dir=scratch / f"sequence-{index}", **how)

    # Two transformers forwards in two threads would share the attention registry; a real engine is another process.
    ahead: Executor = ThreadPoolExecutor(max_workers=1) if rollout.real else _Inline()
    with ahead:
        future = ahead.submit(capture, 0) if sequences else None
        for index in range(len(sequences)):
            assert future is not None
            try:
                (result,) = future.result()
            except KeyboardInterrupt:
                rollout.stop()  # leaving waits for the thread, and the thread for the engine, which may be hung
                raise
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
    needed = set(sites)
    for site in sites:
        needed.update(inputs.trainer.reads(site))
        if given := reduced_site(site):
            needed.add(given)
    return [s for s in in_execution_order(needed) if s != "logprob"]


def absent_points(options: CompareOptions, inputs: Inputs, rollout: Rollout) -> dict[str, str]:
    """Why a point is in neither stack, or not seen in the rollout."""
    return {p: why for p, why in inputs.facts.absent_reasons.items() if not (options.tp > 1 and p in REDUCED)} | dict(
        rollout.absent
    )


def conclude(
    run: RunWriter,
    scored: Scored,
    pairing: Pairing,
    control: Control,
    *,
    dtype: str,
    label: str,
    floors: Sequence[Mapping[str, Any]] = (),
    causes: Sequence[Finding] = (),
    no_local: str | None = None,
) -> Comparison:
    """Metrics and verdict of what was scored and paired, written to the run. label: how the rollout is named in sentences."""
    p, q, ids, decode = scored.columns()
    ours, theirs = scored.argmaxes()
    everything = np.ones(len(p), dtype=bool)
    by_source = {
        name: logprob_metrics(
            p[mask],
            q[mask],
            sequence_ids=ids[mask],
            p_argmax=None if ours is None else ours[mask],
            q_argmax=None if theirs is None else theirs[mask],
        )
        for name, mask in (("all", everything), ("prefill", ~decode), ("decode", decode))
        if mask.any() or name == "all"
    }
    if scored.rescored:
        again = np.concatenate([s.logprob for s in scored.rescored])
        by_source["rescored"] = logprob_metrics(p[decode], again[decode], sequence_ids=ids[decode])
    metrics = by_source["all"]
    run.set_metrics({"logprob": by_source, "floors": list(floors)})
    difference = np.abs(p.astype(np.float64) - q.astype(np.float64))
    verdict = decide(
        Evidence(
            dtype=dtype,
            aggregate=pairing.aggregate,
            control=control,
            mean_abs_d=float(metrics["mean_abs_d"]),
            max_abs_d=float(metrics["max_abs_d"]),
            num_tokens=len(p),
            num_generated=int(decode.sum()),
            num_nonfinite=int((~np.isfinite(difference)).sum()),
            rollout=label,
            positions=check_positions(
                [
                    (s.prompt, ours.positions, theirs.positions)
                    for s, ours, theirs in zip(scored.sequences, scored.trainer, scored.rollout, strict=True)
                ]
            ),
            floors={f["name"]: f["mean_abs_d"] for f in floors},
            causes=causes,
            no_local=no_local,
        )
    )
    verdict = replace(
        verdict, evidence=(*verdict.evidence, *pairing.reductions.finding(), *decode_finding(by_source, floors))
    )
    record_verdict(run, verdict)
    return Comparison(run=run.path, verdict=verdict, metrics=metrics, floors=floors)


def record_verdict(run: RunWriter, verdict: Verdict) -> None:
    run.set_verdict(verdict)
    for finding in verdict.evidence:
        run.add_finding(finding)


__all__ = ["Comparison", "run_compare"]
