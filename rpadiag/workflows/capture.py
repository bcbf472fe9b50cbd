"""``rpadiag capture``: one stack on a prompt file, into a bundle that can be compared on another machine.

Sequences go through one at a time: the engine appends to a raw file on disk, which becomes a safetensors file when the
sequence has ended. Neither memory nor scratch space grows with the number of prompts, and an interrupted capture goes on
where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import NotComparableError
from rpadiag.runs.manifest import environment_facts, now_utc, strict_json, token_digest, weights_digest
from rpadiag.workflows.alignment import align_trainer
from rpadiag.workflows.capture_job import Job, check_disk, prepare, size_in_words
from rpadiag.workflows.inputs import check_model, load_trainer
from rpadiag.workflows.options import CaptureOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.rollout import start_rollout, visible_sites

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.bundle_collect import BundleCollection

# What must be as it was for a capture to go on: entries of the bundle's meta, and of its options.
SAME_META = (
    "engine", "dtype", "device", "device_name", "attention", "attention_backend", "vllm_version", "versions", "numerics", "config",
    "sites",
)  # fmt: skip
SAME_OPTIONS = (
    "engine", "mode", "tp", "generate", "seed", "align", "contract", "emulate", "engine_args", "max_tokens", "revision",
)  # fmt: skip

Captures = Callable[[Sequence[int]], Iterator[tuple[int, "TokenSequence", Path]]]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a finished capture answers with. num_resumed: sequences that were there already."""

    bundle: Path
    label: str
    num_sequences: int
    num_resumed: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """A stack that is ready. captures: (number, sequence with generated tokens, raw file) for the numbers given, one by one."""

    label: str
    manifest: Mapping[str, Any]
    digests: Mapping[str, str]
    sites: Sequence[str]
    absent: Mapping[str, str]
    captures: Captures


def run_capture(
    options: CaptureOptions, progress: Progress = SILENT, *, given: Mapping[str, Any] | None = None
) -> Captured:
    """Capture into ``options.bundle``. given: the options that the user set, for the bundle's meta.

    Raises RpadiagError for anything the user can mend. What is finished by then stays, and ``resume`` goes on with it.
    """
    from rpadiag.engines.bundle_collect import BundleCollection

    check_model(options, progress)
    job = prepare(options, progress)
    formula = size_in_words(job, options.generate, range(len(job.sequences)))
    progress.note(f"this bundle takes {formula}")
    if options.resume and (options.bundle / "bundle.json").exists():
        collection = BundleCollection.reopen(options.bundle)
    else:
        check_disk(options, job, range(len(job.sequences)))  # before a directory is made
        collection = BundleCollection.create(options.bundle)
    collection.set_effective(device=job.device, dtype=job.dtype)
    num_resumed = len(collection.entries)
    with collection:
        _check_sequences(collection, job, options.generate)
        todo = [i for i in range(len(job.sequences)) if i not in collection.entries]
        if todo:
            check_disk(options, job, todo)
            with _open(options, job, collection, progress) as engine:
                _claim(collection, _meta(options, job, engine, given or {}, collection.effective))
                _capture(collection, job, engine, todo, progress)
    entries = collection.entries.values()
    return Captured(
        bundle=options.bundle,
        label=collection.meta["label"],
        num_sequences=len(entries),
        num_resumed=num_resumed,
        num_tokens=sum(len(e["token_ids"]) for e in entries),
        num_bytes=sum(e["num_bytes"] for e in entries),
    )


# -- going on --------------------------------------------------------------------------------------


def _check_sequences(collection: BundleCollection, job: Job, num_generate: int) -> None:
    """NotComparableError where a finished sequence is not of these prompts."""
    for number, entry in sorted(collection.entries.items()):
        ids = tuple(entry["token_ids"])
        now = job.sequences[number].token_ids if number < len(job.sequences) else ()
        if not now or ids[: len(now)] != now or len(ids) != len(now) + num_generate:
            raise NotComparableError(
                f"cannot go on with bundle {collection.path}: sequence {number} has other tokens there",
                detail=f"{len(ids)} tokens there, {len(now)} and {num_generate} to generate now",
                hint="repeat the command with the same prompts, tokenizer and --max-tokens, or capture into another directory",
            )


def _claim(collection: BundleCollection, meta: Mapping[str, Any]) -> None:
    """Write the meta of a bundle that begins; of one that goes on, check that it would be the same."""
    before = collection.meta
    if not before or not collection.entries:
        collection.set_meta(meta)
        return
    pairs = [(name, before.get(name), meta.get(name)) for name in SAME_META]
    then, now = before.get("options", {}).get("effective", {}), meta["options"]["effective"]
    pairs += [(f"--{name.replace('_', '-')}", then.get(name), now.get(name)) for name in SAME_OPTIONS]
    pairs += [(name, before.get(name, {}).get("digest"), meta[name]["digest"]) for name in ("weights", "tokens")]
    changed = [(name, a, b) for name, a, b in pairs if a != b]
    if changed:
        raise NotComparableError(
            f"cannot go on with bundle {collection.path}: it was begun with another {changed[0][0].removeprefix('--')}",
            detail="\n".join(f"{name}: {a} there, {b} now" for name, a, b in changed),
            hint="repeat the command that it was begun with, or capture into another directory",
        )


def _meta(
    options: CaptureOptions, job: Job, engine: _Engine, given: Mapping[str, Any], effective: Mapping[str, Any]
) -> dict[str, Any]:
    """What a comparison and its manifest need of this side; docs/bundle-format.md lists it."""
    lines = "".join(f"{s.prompt} {token_digest(s.token_ids)}\n" for s in job.sequences)
    found = {
        "config": job.config,
        **engine.manifest,
        "model": options.model,
        "stack": "trainer" if options.engine == "trainer" else "rollout",
        "label": engine.label,
        "facts": dataclasses.asdict(job.facts),
        "sites": list(engine.sites),
        "absent": dict(engine.absent),
        "weights": {
            "digest": weights_digest(engine.digests), "num_tensors": len(engine.digests), "tensors": dict(engine.digests),
        },
        "tokens": {
            "digest": hashlib.blake2b(lines.encode(), digest_size=16).hexdigest(), "num_sequences": len(job.sequences),
        },
        "options": {"given": dict(given), "effective": {**options.to_dict(), **effective}},
        "started_utc": now_utc(),
        "environment": environment_facts(),
    }  # fmt: skip
    return dict(strict_json(found))


# -- capturing -------------------------------------------------------------------------------------


def _capture(collection: BundleCollection, job: Job, engine: _Engine, todo: Sequence[int], progress: Progress) -> None:
    prompts = {p.index: p for p in job.prompts}
    with progress.stage("capture prompts", total=len(todo)) as bar:
        for number, sequence, raw in engine.captures(todo):
            entry = {
                "prompt": sequence.prompt,
                "token_ids": list(sequence.token_ids),
                "num_prompt_tokens": sequence.num_prompt_tokens,
                "text": prompts[sequence.prompt].text or None,
                "token_texts": job.tokenizer.texts(sequence.token_ids),
            }
            collection.add(number, raw, entry)
            bar.advance()


@contextmanager
def _open(options: CaptureOptions, job: Job, collection: BundleCollection, progress: Progress) -> Iterator[_Engine]:
    """The stack that the options ask for, ready to capture."""
    from rpadiag.workflows.compare import captured_one_by_one

    with ExitStack() as stack:
        if options.engine == "trainer":
            with progress.stage("load trainer"):
                trainer = _trainer(options, job, collection, stack.enter_context)
            yield trainer
            return
        with progress.stage(f"start {options.engine} engine"):
            rollout = stack.enter_context(start_rollout(options, job, collection))
        seen = visible_sites(list(job.sites), rollout, asked=bool(options.sites))

        def captures(numbers: Sequence[int]) -> Iterator[tuple[int, TokenSequence, Path]]:
            chosen = [job.sequences[i] for i in numbers]
            one_by_one = captured_one_by_one(
                rollout, chosen, sites=seen, scratch=collection.scratch(), num_generate=options.generate
            )
            for number, (result, capture) in zip(numbers, one_by_one, strict=True):
                yield number, result.sequence, capture.path

        yield _Engine(
            label=rollout.label,
            manifest=rollout.engine.manifest(),
            digests=rollout.engine.weight_digests(),
            sites=seen,
            absent={**job.facts.absent, **rollout.absent},
            captures=captures,
        )


def _trainer(options: CaptureOptions, job: Job, collection: BundleCollection, enter: Callable[[Any], Any]) -> _Engine:
    from rpadiag.engines.bundle_writer import BundleWriter

    trainer = load_trainer(options, model=job.model, device=job.device, dtype=job.dtype, attention=options.attention)
    aligned: dict[str, Any] | None = None
    if options.align:
        aligned = align_trainer(trainer, options.align, options.contract, enter)

    def captures(numbers: Sequence[int]) -> Iterator[tuple[int, TokenSequence, Path]]:
        for number in numbers:
            sequence = job.sequences[number]
            directory = collection.scratch() / f"sequence-{number}"
            with BundleWriter(directory, {}) as writer:
                writer.begin(0)
                scores = trainer.forward(sequence.token_ids, sites=job.sites, on_site=writer.append)
                writer.end(
                    0,
                    token_ids=sequence.token_ids,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    positions=scores.positions,
                    scores=scores,
                )
            yield number, sequence, directory / "sequence-00000.bin"
            shutil.rmtree(directory, ignore_errors=True)

    manifest = trainer.manifest()
    version = manifest["versions"]["transformers"]
    return _Engine(
        label=f"transformers {version}",
        manifest={**manifest, "aligned": aligned},
        digests=trainer.weight_digests(),
        sites=job.sites,
        absent=dict(job.facts.absent),
        captures=captures,
    )
