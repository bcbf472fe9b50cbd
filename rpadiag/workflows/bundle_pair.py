"""Two bundles opened as a pair: the same tokens on both sides or not, the sites that both have, the control that goes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpadiag.engines.base import ModelFacts, TokenSequence
from rpadiag.engines.bundle import Bundle, open_bundle
from rpadiag.errors import CaptureError, InputError, NotComparableError
from rpadiag.runs.manifest import differing_tensors
from rpadiag.sites import in_execution_order, match_sites, reduced_site, split_site
from rpadiag.workflows.options import BundlesOptions

MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class BundlePair:
    """Two bundles, and the numbers of the same prompt in both: (trainer's, rollout's), in prompt order."""

    trainer: Bundle
    rollout: Bundle
    numbers: Sequence[tuple[int, int]]

    @property
    def dtype(self) -> str:
        """The dtype that both were captured in."""
        return str(self.trainer.meta.get("dtype") or self.rollout.meta.get("dtype") or "bfloat16")

    @property
    def label(self) -> str:
        """How the rollout is named in sentences."""
        meta = self.rollout.meta
        return str(meta.get("label") or meta.get("engine") or "the rollout")

    @property
    def facts(self) -> ModelFacts | None:
        """The model's facts, where rpadiag wrote one of the bundles."""
        for bundle in (self.trainer, self.rollout):
            if isinstance(found := bundle.meta.get("facts"), Mapping):
                given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
                return ModelFacts(**given)
        return None


def open_pair(trainer: Path, rollout: Path) -> tuple[BundlePair, list[str]]:
    """Both bundles, and in words where their tokens differ."""
    ours, theirs = open_bundle(trainer), open_bundle(rollout)
    dtypes = [bundle.meta.get("dtype") for bundle in (ours, theirs)]
    if None not in dtypes and dtypes[0] != dtypes[1]:
        raise NotComparableError(
            f"the bundles are of different dtypes: {trainer} of {dtypes[0]}, {rollout} of {dtypes[1]}",
            hint="capture both stacks with the same --dtype",
        )
    a, b = _by_prompt(ours), _by_prompt(theirs)
    differing = []
    for prompt in sorted(a.keys() | b.keys()):
        if prompt not in a or prompt not in b:
            differing.append(f"prompt {prompt} is in the {'rollout' if prompt in b else 'trainer'} bundle only")
        elif words := _token_difference(ours.sequences[a[prompt]], theirs.sequences[b[prompt]]):
            differing.append(words)
    numbers = [(a[p], b[p]) for p in sorted(a.keys() & b.keys())]
    return BundlePair(trainer=ours, rollout=theirs, numbers=numbers), differing


def _by_prompt(bundle: Bundle) -> dict[int, int]:
    """Prompt -> number of its sequence. A prompt that is there twice is an InputError."""
    found: dict[int, int] = {}
    for number, sequence in enumerate(bundle.sequences):
        if sequence.prompt in found:
            raise InputError(
                f"bundle {bundle.directory} has prompt {sequence.prompt} twice",
                detail=f"sequences {found[sequence.prompt]} and {number}",
                hint='give each sequence of bundle.json a "prompt" of its own',
            )
        found[sequence.prompt] = number
    if not found:
        raise InputError(f"bundle {bundle.directory} has no sequences")
    return found


def _token_difference(ours: TokenSequence, theirs: TokenSequence) -> str | None:
    a, b = ours.token_ids, theirs.token_ids
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return f"prompt {ours.prompt} has {len(a)} tokens in the trainer and {len(b)} in the rollout bundle, the same up to there"
    return f"prompt {ours.prompt}: token {at} is {a[at]} in the trainer and {b[at]} in the rollout bundle"


def common_sites(pair: BundlePair, patterns: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Sites to compare, and why a point is left out. A pattern that only matches what one side lacks is an error."""
    first_ours, first_theirs = pair.numbers[0] if pair.numbers else (0, 0)
    ours = set(pair.trainer.capture(first_ours).sites)
    theirs = set(pair.rollout.capture(first_theirs).sites)
    known = [*in_execution_order((ours | theirs) - {"logprob"}), "logprob"]
    chosen = match_sites(patterns, known)
    absent = {**dict(pair.trainer.meta.get("absent") or {}), **dict(pair.rollout.meta.get("absent") or {})}
    both = []
    for site in chosen:
        if site == "logprob" or (site in theirs and (site in ours or reduced_site(site) in theirs)):
            both.append(site)
            continue
        why = f"only in the {'trainer' if site in ours else 'rollout'} bundle"
        if patterns:
            raise CaptureError(f"site {site} is {why}", hint="capture it on both sides, or ask for other sites")
        absent[split_site(site)[1]] = why
    return both, absent


def digests_of(bundle: Bundle) -> dict[str, str] | None:
    weights = bundle.meta.get("weights")
    tensors = weights.get("tensors") if isinstance(weights, Mapping) else None
    return {str(k): str(v) for k, v in tensors.items()} if isinstance(tensors, Mapping) and tensors else None


def open_control(options: BundlesOptions, pair: BundlePair) -> BundlePair | None:
    """The two bundles in FP32, checked to be of the same tokens and configuration; None where none were given."""
    if options.trainer_fp32 is None or options.rollout_fp32 is None:
        return None
    control, differing = open_pair(options.trainer_fp32, options.rollout_fp32)
    where = f"the FP32 bundles {options.trainer_fp32} and {options.rollout_fp32}"
    if differing:
        raise NotComparableError(f"{where} have different tokens", detail="\n".join(differing[:MAX_NAMED]))
    for bundle in (control.trainer, control.rollout):
        if bundle.meta.get("dtype") != "float32":
            raise InputError(
                f"{bundle.directory} is no FP32 control: its dtype is {bundle.meta.get('dtype')}",
                hint="capture it with --dtype float32",
            )
    tokens = {s.prompt: s.token_ids for s in pair.rollout.sequences}
    for sequence in control.rollout.sequences:
        if tokens.get(sequence.prompt, ())[: len(sequence.token_ids)] != sequence.token_ids:
            raise NotComparableError(
                f"{where} have other tokens than the bundles they are the control of, first in prompt {sequence.prompt}",
                hint="capture the same prompts, or the first of them, with --dtype float32",
            )
    for name, fp32, model in (
        ("trainer", control.trainer, pair.trainer),
        ("rollout", control.rollout, pair.rollout),
    ):
        a, b = fp32.meta.get("config"), model.meta.get("config")
        if a is not None and b is not None and a != b:
            raise NotComparableError(
                f"the FP32 bundle of the {name} is of another configuration than {model.directory}",
                detail=f"{a} against {b}",
                hint="capture both precisions from the same checkpoint, with the same engine arguments",
            )
    ours, theirs = digests_of(control.trainer), digests_of(control.rollout)
    if ours is not None and theirs is not None and (names := differing_tensors(ours, theirs)):
        raise NotComparableError(f"{where} are of different weights, first {names[0]}")
    return control
