"""``rpadiag compare --trainer BUNDLE --rollout BUNDLE``: two captures, neither engine needed.

Totals come from the bundles alone, read as bit patterns without torch. Local divergence needs the trainer's operations: with
MODEL they are run, without it a site has it only where everything that it reads is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.compare.causes import batch_invariance, known_causes
from rpadiag.compare.evidence import Control
from rpadiag.compare.pairing import Pairing, SequencePair
from rpadiag.compare.verdict_causes import tokens_differ
from rpadiag.engines.bundle import Bundle, BundleCapture
from rpadiag.engines.bundle_files import SCORES
from rpadiag.errors import InputError, NotComparableError
from rpadiag.findings import Finding
from rpadiag.prompts import Prompt
from rpadiag.runs import RunWriter, create_run
from rpadiag.runs.manifest import differing_tensors
from rpadiag.sites import inputs_of, split_site
from rpadiag.workflows.bundle_pair import BundlePair, common_sites, digests_of, open_control, open_pair
from rpadiag.workflows.compare import Comparison, conclude, stop_incomparable, weights_differ
from rpadiag.workflows.compare_rows import prompt_row, token_columns
from rpadiag.workflows.options import BundlesOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.scored import Scored

if TYPE_CHECKING:
    from rpadiag.engines.trainer import TrainerEngine

NO_MODEL = "without MODEL there is no operation to feed the rollout's input to"
NO_FP32 = "--trainer-fp32 and --rollout-fp32 were not given"
# Entries of a bundle's meta that a run keeps elsewhere, or has no use for.
_NOT_IN_MANIFEST = ("weights", "facts", "sites", "absent", "tokens", "options", "started_utc")


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """What a bundle has of :class:`rpadiag.engines.base.TokenScores`; None for what it did not record."""

    logprob: np.ndarray
    entropy: np.ndarray | None
    rank: np.ndarray | None
    argmax: np.ndarray | None
    positions: np.ndarray | None


def run_compare_bundles(
    options: BundlesOptions, progress: Progress = SILENT, *, given: Mapping[str, Any] | None = None
) -> Comparison:
    """Compare two bundles and write ``options.run``.

    Raises InputError for what is no bundle, NotComparableError for different dtypes or a MODEL with other weights; different
    tokens or weights of the two are a verdict.
    """
    pair, differing_tokens = open_pair(options.trainer, options.rollout)
    sites, absent = common_sites(pair, options.sites)
    control_pair = open_control(options, pair)
    with create_run(options.run, command="compare", options=options.to_dict(), given=given or {}) as run:
        run.set_effective(dtype=pair.dtype)
        _describe(run, pair, sites, absent)
        if differing_tokens:
            return stop_incomparable(run, tokens_differ(differing_tokens))
        causes = (*known_causes(pair.trainer.meta, pair.rollout.meta), *batch_invariance(pair.rollout.meta))
        differing, unchecked = _check_weights(run, pair)
        if differing:
            return stop_incomparable(run, weights_differ(differing, causes, dtype=pair.dtype, label=pair.label))
        with ExitStack() as stack:
            engine = _operations(options, pair.trainer, pair.dtype, progress, stack)
            pairing, scored = _compare(run, pair, sites, engine, "model", progress)
        with ExitStack() as stack:
            control = _control(run, options, control_pair, sites, progress, stack)
        run.set_manifest(
            control={"precision": "fp32", "reason": control.reason, "num_tokens": control.num_tokens},
        )
        for finding in (*unchecked, _no_floors()):
            run.add_finding(finding)
        return conclude(
            run,
            scored,
            pairing,
            control,
            dtype=pair.dtype,
            label=pair.label,
            causes=causes,
            no_local=pairing.no_local,
        )


def _describe(run: RunWriter, pair: BundlePair, sites: Sequence[str], absent: Mapping[str, str]) -> None:
    stacks = {
        name: {k: v for k, v in bundle.meta.items() if k not in _NOT_IN_MANIFEST}
        for name, bundle in (("trainer", pair.trainer), ("rollout", pair.rollout))
    }
    run.set_manifest(
        **stacks,
        rollout_label=pair.label,
        sites={"requested": list(sites), "absent": dict(absent)},
        bundles={
            "trainer": {"started_utc": pair.trainer.meta.get("started_utc")},
            "rollout": {"started_utc": pair.rollout.meta.get("started_utc")},
        },
    )


def _check_weights(run: RunWriter, pair: BundlePair) -> tuple[list[str], list[Finding]]:
    """Record the digests; (tensors that differ, what could not be checked)."""
    digests = {"trainer": digests_of(pair.trainer), "rollout": digests_of(pair.rollout)}
    for stack, found in digests.items():
        if found is not None:
            run.set_weights(stack, found)
    ours, theirs = digests["trainer"], digests["rollout"]
    if ours is not None and theirs is not None:
        return differing_tensors(ours, theirs), []
    silent = " and ".join(stack for stack, found in digests.items() if found is None)
    text = f"Weights were not checked: the bundle of the {silent} records no digests. That they are the same is an assumption."
    return [], [Finding(code="weights-unchecked", severity="warning", text=text, rank=3)]


# -- comparing -------------------------------------------------------------------------------------


class _CapturedTrainer:
    """The trainer's bundle in the place of a trainer engine, with the operations of ``engine`` where there is one."""

    def __init__(self, pair: BundlePair, engine: TrainerEngine | None) -> None:
        self.engine = engine
        self._facts = pair.facts
        self.capture: BundleCapture | None = None

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        sites: Sequence[str] = (),
        on_site: Callable[[str, Any], None] | None = None,
    ) -> _Scores:
        """What was captured of this sequence, handed over site by site."""
        assert self.capture is not None and len(token_ids) == len(self.capture.sequence.token_ids)
        for site in sites:
            if on_site is not None and site in self.capture.sites:
                on_site(site, _read(self.capture, bits=self.engine is None)(site))
        return _scores(self.capture)

    def reads(self, site: str) -> tuple[str, ...]:
        if self.engine is not None:
            return self.engine.reads(site)
        if self._facts is not None:
            return self._facts.reads(site)
        assert self.capture is not None  # a foreign bundle: the layers that it shows are taken for all
        layers = [n for n, _ in map(split_site, self.capture.sites) if n is not None]
        return inputs_of(site, self.capture.sites, num_layers=1 + max(layers, default=0))

    def replay(
        self,
        site: str,
        inputs: Sequence[Any],
        *,
        positions: Any = None,
        token_ids: Sequence[int] | None = None,
    ) -> Any:
        assert self.engine is not None
        return self.engine.replay(site, inputs, positions=positions, token_ids=token_ids)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The rollout's capture as pairing reads it: tensors, or bit patterns where torch is not needed."""

    sites: Sequence[str]
    positions: Any
    read: Callable[[str], Any]


def _read(capture: BundleCapture, *, bits: bool) -> Callable[[str], Any]:
    return capture.bits if bits else capture.read


def _scores(capture: BundleCapture) -> _Scores:
    columns = {name: capture.column(f"scores.{name}") for name in SCORES}
    logprob = columns.pop("logprob")
    if logprob is None:
        raise InputError(
            f"{capture.path} has no scores.logprob",
            detail="the log-probability of every token but the first, float32 [T-1], in nats",
            hint="write it beside the sites; docs/bundle-format.md has an example",
        )
    return _Scores(logprob=logprob.astype(np.float32), positions=capture.positions, **columns)


def _compare(
    run: RunWriter,
    pair: BundlePair,
    sites: Sequence[str],
    engine: TrainerEngine | None,
    precision: str,
    progress: Progress,
) -> tuple[Pairing, Scored]:
    """Hold every sequence of one bundle against the other; tokens and prompts are written for the model's precision only."""
    trainer = _CapturedTrainer(pair, engine)
    pairing = Pairing(
        trainer,
        sites=sites,
        precision=precision,
        experts_per_token=engine.facts.experts_per_token if engine is not None else 0,
        no_local=None if engine is not None else NO_MODEL,
    )
    scored = Scored(sequences=[], trainer=[], rollout=[])
    with progress.stage("compare prompts" if precision == "model" else "FP32 control", total=len(pair.numbers)) as bar:
        for ours, theirs in pair.numbers:
            trainer.capture, capture = pair.trainer.capture(ours), pair.rollout.capture(theirs)
            sequence, scores = pair.rollout.sequences[theirs], _scores(capture)
            side = _Side(sites=capture.sites, positions=capture.positions, read=_read(capture, bits=engine is None))
            sequence_pair = SequencePair(
                prompt=sequence.prompt,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                scores=scores,
                capture=side,
            )
            trainer_scores, rows = pairing.compare(sequence_pair)
            run.add_sites(rows)
            if precision == "model":
                texts = pair.rollout.token_texts(theirs) or pair.trainer.token_texts(ours)
                text = pair.rollout.text(theirs) or pair.trainer.text(ours) or ""
                prompt = Prompt(index=sequence.prompt, text=text, token_ids=sequence.token_ids, origin="bundle")
                run.add_prompts([prompt_row(prompt, sequence)])
                run.add_tokens(token_columns(sequence, trainer_scores, scores, texts))
            scored.sequences.append(sequence)
            scored.trainer.append(trainer_scores)
            scored.rollout.append(scores)
            bar.advance()
    return pairing, scored


def _operations(
    options: BundlesOptions, trainer: Bundle, dtype: str, progress: Progress, stack: ExitStack
) -> TrainerEngine | None:
    """MODEL loaded and aligned as the trainer's bundle says it was; None without MODEL."""
    if options.model is None:
        return None
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.workflows.inputs import resolve_device
    from rpadiag.workflows.smollm2 import resolve_model

    with progress.stage("load trainer"):
        engine = TrainerEngine.load(
            resolve_model(options.model, progress),
            dtype=dtype,
            device=resolve_device(options.device),
            attention=options.attention or str(trainer.meta.get("attention") or "sdpa"),
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    recorded = digests_of(trainer)
    differing = differing_tensors(recorded, engine.weight_digests()) if recorded is not None else []
    if differing:
        raise NotComparableError(
            f"{options.model} has other weights than the trainer that {trainer.directory} was captured of",
            detail=f"{len(differing)} tensors differ, first {differing[0]}",
            hint="name the model that was captured, or leave it out: then local divergence is not measured",
        )
    aligned = trainer.meta.get("aligned")
    if isinstance(aligned, Mapping):
        from rpadiag.regions.align import align

        stack.enter_context(align(engine.model, regions=tuple(aligned["regions"]), contract=str(aligned["contract"])))
    return engine


# -- the FP32 control ------------------------------------------------------------------------------


def _control(
    run: RunWriter,
    options: BundlesOptions,
    pair: BundlePair | None,
    sites: Sequence[str],
    progress: Progress,
    stack: ExitStack,
) -> Control:
    if pair is None:
        return Control(reason=NO_FP32)
    engine = _operations(options, pair.trainer, "float32", progress, stack)
    pairing, scored = _compare(run, pair, sites, engine, "fp32", progress)
    p, q, _, _ = scored.columns()
    difference = np.abs(p.astype(np.float64) - q)
    return Control(aggregate=pairing.aggregate, mean_abs_d=float(difference.mean()), num_tokens=len(difference))


def _no_floors() -> Finding:
    text = "Noise floors were not measured: a bundle holds one forward of its stack. rpadiag compare MODEL PROMPTS measures them."
    return Finding(code="floors-absent", severity="notice", text=text, rank=7)
