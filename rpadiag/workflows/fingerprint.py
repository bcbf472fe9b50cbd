"""``rpadiag fingerprint``: which contract each region of each layer follows, on a run, a bundle or a model with prompts.

A run keeps its tokens and no activations: they are captured again, with the model that its manifest names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError, UsageError
from rpadiag.findings import Finding
from rpadiag.runs.manifest import dump_json
from rpadiag.runs.writer import write_atomically
from rpadiag.workflows.inputs import Inputs, load_inputs, resolve_device
from rpadiag.workflows.options import FingerprintOptions, ModelOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.smollm2 import resolve_model

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.bundle import Bundle
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.regions.fingerprint_file import RegionSummary
    from rpadiag.workflows.fingerprint_sites import SiteFingerprints

FILE = "fingerprint.json"


@dataclass(frozen=True, kw_only=True)
class FingerprintResult:
    """findings: one per region, then the exceptions. content: what the file holds. path: where, if one was written."""

    findings: tuple[Finding, ...]
    content: Mapping[str, Any]
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.content,
            "findings": [f.to_dict() for f in self.findings],
            "path": str(self.path) if self.path else None,
        }


def run_fingerprint(options: FingerprintOptions, progress: Progress = SILENT) -> FingerprintResult:
    """Fingerprint what the options name; write the file to ``output``, or into the run or bundle directory."""
    from rpadiag.regions.fingerprint_file import file_content, summarise
    from rpadiag.workflows.fingerprint_sites import Captured, captured_from, fingerprint_sites, weights_of

    with _source(options, progress) as source:
        captured: Captured = captured_from(
            (source.bundle.capture(i), len(s.token_ids)) for i, s in enumerate(source.bundle.sequences)
        )
        facts = source.trainer.facts
        weights = weights_of(source.trainer.model, facts)
        with progress.stage("fingerprint layers", facts.num_layers) as stage:
            found = fingerprint_sites(captured, weights, facts, options.regions, stage.advance)
    summaries = {r: summarise(r, group, plain=found.plain) for r, group in found.found.items() if r in options.regions}
    content = file_content(summaries, found.sites, source=source.facts)
    target = options.output or source.directory
    path = None
    if target is not None:
        path = target / FILE if target.is_dir() else target
        try:
            write_atomically(path, dump_json(content))
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return FingerprintResult(findings=tuple(_findings(summaries, found, source.label)), content=content, path=path)


def _findings(summaries: Mapping[str, RegionSummary], found: SiteFingerprints, label: str) -> Iterator[Finding]:
    """One sentence per region, then the sites that do not follow it, the implementations that agree, what was not seen."""
    from rpadiag.regions.presets import PRESETS

    for rank, (region, s) in enumerate(summaries.items()):
        numbers = {"num_sites": s.num_sites, "num_determined": s.num_determined, "num_disagreeing": len(s.disagreeing)}
        if s.contract is not None:
            fitting = s.num_sites - len(s.disagreeing)
            names = f" (as {', '.join(s.presets[:4])})" if s.presets else " (no known implementation does this)"
            example = next(f for f in found.found[region].values() if f.matches)
            text = (
                f"{region} of {label}: {s.contract.name(example.dtype)}{names}; {fitting} of {s.num_sites} sites agree, "
                f"{s.num_determined} determine it alone"
            )
            rare = [f.level_two for f in found.found[region].values() if f.level_two is not None]
            if rare:
                worst = max(rare, key=lambda two: two.num_differing)
                numbers["num_sites_with_rare_mismatches"] = len(rare)
                text += (
                    f"; {len(rare)} sites have rare mismatches, at most {worst.num_differing} elements ({worst.cause})"
                )
            yield Finding(code="contract", severity="info", text=text, region=region, numbers=numbers, rank=rank)
        else:
            none_fits = any(f.status == "no known contract" for f in found.found[region].values())
            code = "no-known-contract" if none_fits else "not-determined"
            yield Finding(
                code=code, severity="warning", text=f"{region} of {label}: {s.reason}", region=region, numbers=numbers, rank=rank
            )  # fmt: skip
        for site in s.disagreeing[:3] if s.contract is not None else ():
            text = f"{site} does not follow it: {found.found[region][site].text}"
            yield Finding(
                code="site-disagrees", severity="warning", text=text, region=region, site=site, rank=10 + rank
            )
    shared = [set(s.presets) for s in summaries.values() if s.contract is not None]
    together = [p for p in PRESETS if len(shared) > 1 and all(p in names for names in shared)]
    if together:
        regions = ", ".join(r for r, s in summaries.items() if s.contract is not None)
        text = f"{regions} of {label} together: as {', '.join(together)}"
        yield Finding(code="presets", severity="info", text=text, numbers={"presets": together}, rank=9)
    for region, reason in found.missing.items():
        yield Finding(
            code="not-captured", severity="notice", text=f"{region} of {label}: {reason}", region=region, rank=20
        )


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What to look at. directory: where the file goes by default; trainer: gives weights and frequencies."""

    bundle: Bundle
    trainer: TrainerEngine
    label: str
    facts: Mapping[str, Any]
    directory: Path | None = None


@contextmanager
def _source(options: FingerprintOptions, progress: Progress) -> Iterator[_Source]:
    """The bundle that the target names, captured first where there is none."""
    target = Path(options.target)
    if options.prompts is not None:
        inputs = load_inputs(_model_options(options, options.target, options.prompts), progress)
        with _captured(options, inputs, progress) as source:
            yield source
        return
    bundle_dir = next((d for d in (target, target / options.stack) if (d / "bundle.json").is_file()), None)
    if bundle_dir is not None:
        yield _from_bundle(bundle_dir, options, progress)
        return
    if not (target / "manifest.json").is_file():
        raise UsageError(
            f"{options.target} is neither a run nor a bundle",
            hint="give a run directory, a bundle directory, or MODEL and PROMPTS",
        )
    with _from_run(target, options, progress) as source:
        yield source


def _model_options(options: FingerprintOptions, model: str, prompts: Path) -> ModelOptions:
    return ModelOptions(
        model=model, prompts=prompts, dtype=options.dtype, device=options.device, max_tokens=options.max_tokens,
        seed=options.seed, revision=options.revision, trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _from_bundle(directory: Path, options: FingerprintOptions, progress: Progress) -> _Source:
    from rpadiag.engines.bundle import open_bundle

    bundle = open_bundle(directory)
    model = bundle.meta.get("model")
    if not model:
        raise InputError(
            f"bundle {directory} does not say which model it captured",
            detail="norm weights, epsilon and RoPE frequencies are read from the checkpoint",
            hint='add "model": a checkpoint directory or hub id to the meta of bundle.json',
        )
    trainer = _load_weights(str(model), options, progress, dtype=_bundle_dtype(bundle, options))
    label = _label(bundle.meta)
    return _Source(
        bundle=bundle, trainer=trainer, label=label, directory=directory, facts=_facts(bundle.meta, label, str(model))
    )  # fmt: skip


def _bundle_dtype(bundle: Bundle, options: FingerprintOptions) -> str:
    dtype = str(bundle.meta.get("dtype", options.dtype)).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16", "float32") else options.dtype


def _load_weights(model: str, options: FingerprintOptions, progress: Progress, *, dtype: str) -> TrainerEngine:
    from rpadiag.engines.trainer import TrainerEngine

    with progress.stage("load weights"):
        return TrainerEngine.load(
            resolve_model(model), dtype=dtype, device="cpu", revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip


@contextmanager
def _from_run(directory: Path, options: FingerprintOptions, progress: Progress) -> Iterator[_Source]:
    """Capture the tokens of a run again, on the stack asked for."""
    from rpadiag.runs import open_run

    run = open_run(directory)
    given = run.manifest.get("options", {}).get("effective", {})
    model = given.get("model")
    if not model:
        raise InputError(f"run {directory} does not say which model it ran")
    progress.note(f"{directory} keeps no activations; capturing its tokens again on the {options.stack} stack")
    again = replace(
        options, dtype=given.get("dtype", options.dtype), device=given.get("device", options.device),
        revision=given.get("revision"), mode=given.get("mode", options.mode),
    )  # fmt: skip
    rows = run.prompts(columns=["prompt", "token_ids"])
    with tempfile.TemporaryDirectory(prefix="rpadiag-") as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        lines = [dump_json({"token_ids": [int(t) for t in ids]}).replace("\n", " ") for ids in rows["token_ids"]]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        inputs = load_inputs(_model_options(again, str(model), prompts), progress)
        with _captured(again, inputs, progress) as source:
            yield replace(source, directory=directory)


@contextmanager
def _captured(options: FingerprintOptions, inputs: Inputs, progress: Progress) -> Iterator[_Source]:
    """Run the model on enough tokens, into a temporary bundle."""
    from rpadiag.workflows.fingerprint_sites import sites_to_capture

    sequences = _enough(inputs.sequences)
    sites = sites_to_capture(inputs.facts, options.regions)
    with tempfile.TemporaryDirectory(prefix="rpadiag-") as scratch:
        directory = Path(scratch) / "bundle"
        capture = _capture_trainer if options.stack == "trainer" else _capture_rollout
        with progress.stage(f"capture {options.stack}", len(sequences)) as stage:
            bundle = capture(options, inputs, sequences, sites, directory, stage.advance)
        label = _label(bundle.meta)
        yield _Source(
            bundle=bundle, trainer=inputs.trainer, label=label, facts=_facts(bundle.meta, label, inputs.model),
        )  # fmt: skip


def _enough(sequences: tuple[TokenSequence, ...]) -> tuple[TokenSequence, ...]:
    """The first sequences that together have the tokens that are looked at."""
    from rpadiag.workflows.fingerprint_sites import MAX_ROWS

    chosen: list[TokenSequence] = []
    rows = 0
    for sequence in sequences:
        chosen.append(sequence)
        rows += len(sequence.token_ids)
        if rows >= MAX_ROWS:
            break
    return tuple(chosen)


def _capture_trainer(
    options: FingerprintOptions, inputs: Inputs, sequences: tuple[TokenSequence, ...], sites: list[str], directory: Path,
    advance: Any,
) -> Bundle:  # fmt: skip
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.engines.bundle_writer import BundleWriter

    trainer = inputs.trainer
    with BundleWriter(directory, trainer.manifest()) as writer:
        for i, sequence in enumerate(sequences):
            writer.begin(i)
            scores = trainer.forward(sequence.token_ids, sites=sites, on_site=writer.append)
            writer.end(
                i, token_ids=sequence.token_ids, num_prompt_tokens=sequence.num_prompt_tokens, prompt=sequence.prompt,
                positions=scores.positions,
            )  # fmt: skip
            advance()
    return open_bundle(directory)


def _capture_rollout(
    options: FingerprintOptions, inputs: Inputs, sequences: tuple[TokenSequence, ...], sites: list[str], directory: Path,
    advance: Any,
) -> Bundle:  # fmt: skip
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.engines.vllm import VllmEngine

    longest = max(len(s.token_ids) for s in sequences)
    with VllmEngine.start(
        inputs.model, dtype=inputs.dtype, device=resolve_device(options.device), seed=options.seed,
        log_path=directory.parent / "vllm.log", enforce_eager=options.mode == "eager", max_model_len=longest + 1,
        revision=options.revision, trust_remote_code=options.trust_remote_code,
    ) as engine:  # fmt: skip
        seen = [site for site in sites if site in engine.sites]  # a compiled model shows attention alone
        engine.score(sequences, sites=seen, bundle_dir=directory, on_finished=lambda _: advance())
    return open_bundle(directory)


def _label(meta: Mapping[str, Any]) -> str:
    """Engine and version, as sentences name it."""
    versions = meta.get("versions", {})
    name = str(meta.get("engine", "engine"))
    version = meta.get("vllm_version") or (versions.get(name, "") if isinstance(versions, Mapping) else "")
    return f"{name} {version}".strip()


def _facts(meta: Mapping[str, Any], label: str, model: str) -> dict[str, Any]:
    keep = ("engine", "stack", "vllm_version", "versions", "dtype", "device", "device_name", "attention", "numerics")
    return {"label": label, "model": model, **{k: meta[k] for k in keep if k in meta}}
