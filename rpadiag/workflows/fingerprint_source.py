"""What ``rpadiag fingerprint`` looks at: a bundle, a run whose tokens are captured again, or a model with prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError, NotComparableError, UsageError
from rpadiag.runs.manifest import differing_tensors, dump_json
from rpadiag.workflows.inputs import Inputs, check_model, load_inputs, load_trainer, resolve_device
from rpadiag.workflows.options import FingerprintOptions, ModelOptions
from rpadiag.workflows.progress import Progress
from rpadiag.workflows.smollm2 import resolve_model

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.bundle import Bundle
    from rpadiag.engines.emulated import EmulatedEngine
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.engines.vllm import VllmEngine
    from rpadiag.runs import Run


@dataclass(frozen=True, kw_only=True)
class Source:
    """What to look at. directory: where the file goes by default; trainer: gives weights and frequencies."""

    bundle: Bundle
    trainer: TrainerEngine
    label: str
    facts: Mapping[str, Any]
    directory: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Stacks:
    """How both stacks are made. emulate: preset in place of the real engine. align, contract: of the trainer.

    weights: stack -> tensor digests that it must have, in ``dtype``; the run that recorded them is ``run``.
    """

    dtype: str = "bfloat16"
    device: str = "auto"
    mode: str = "eager"
    revision: str | None = None
    attention: str = "auto"
    emulate: str | None = None
    align: Sequence[str] = ()
    contract: str | None = None
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    run: Path | None = None


@contextmanager
def open_source(options: FingerprintOptions, progress: Progress) -> Iterator[Source]:
    """The bundle that the target names, captured first where there is none.

    Raises NotComparableError where the model of a run has other weights now.
    """
    target = Path(options.target)
    if options.prompts is not None:
        stacks = _chosen(options, _Stacks())
        inputs = _load(options, stacks, options.target, options.prompts, progress)
        with _captured(options, stacks, inputs, progress) as source:
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


def _chosen(options: FingerprintOptions, stacks: _Stacks) -> _Stacks:
    """``stacks`` with whatever the user asked for by name."""
    asked = {name: getattr(options, name) for name in ("dtype", "device", "mode", "revision")}
    return replace(stacks, **{name: value for name, value in asked.items() if value is not None})


def _load(options: FingerprintOptions, stacks: _Stacks, model: str, prompts: Path, progress: Progress) -> Inputs:
    wanted = ModelOptions(
        model=model,
        prompts=prompts,
        dtype=stacks.dtype,
        device=stacks.device,
        max_tokens=options.max_tokens,
        seed=options.seed,
        revision=stacks.revision,
        trust_remote_code=options.trust_remote_code,
    )
    check_model(wanted, progress)
    return load_inputs(wanted, progress, attention=stacks.attention)


# -- bundles -----------------------------------------------------------------------------------------


def _from_bundle(directory: Path, options: FingerprintOptions, progress: Progress) -> Source:
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.engines.trainer import TrainerEngine

    bundle = open_bundle(directory)
    model = bundle.meta.get("model")
    if not model:
        raise InputError(
            f"bundle {directory} does not say which model it captured",
            detail="norm weights, epsilon and RoPE frequencies are read from the checkpoint",
            hint='add "model": a checkpoint directory or hub id to the meta of bundle.json',
        )
    with progress.stage("load weights"):
        trainer = TrainerEngine.load(
            resolve_model(str(model)),
            dtype=options.dtype or _bundle_dtype(bundle),
            device="cpu",
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    label = _label(bundle.meta)
    return Source(
        bundle=bundle, trainer=trainer, label=label, directory=directory, facts=_facts(bundle.meta, label, str(model))
    )


def _bundle_dtype(bundle: Bundle) -> str:
    dtype = str(bundle.meta.get("dtype", "")).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16", "float32") else "bfloat16"


# -- runs --------------------------------------------------------------------------------------------


@contextmanager
def _from_run(directory: Path, options: FingerprintOptions, progress: Progress) -> Iterator[Source]:
    """Capture the tokens of a run again, on the stack asked for, made as the run made it."""
    from rpadiag.runs import open_run

    run = open_run(directory)
    effective = run.manifest.get("options", {}).get("effective", {})
    model = effective.get("model")
    if not model:
        raise InputError(f"run {directory} does not say which model it ran")
    recorded = _as_recorded(run, effective)
    stacks = _chosen(options, recorded)
    if stacks.emulate is not None and options.mode is not None and options.stack == "rollout":
        raise UsageError(
            f"the rollout of {directory} was emulated ({stacks.emulate}), and --mode is of the real engine",
            hint="leave --mode out, or give MODEL and PROMPTS to look at vLLM itself",
        )
    progress.note(f"{directory} keeps no activations; capturing its tokens again on the {options.stack} stack")
    rows = run.prompts(columns=["prompt", "token_ids"])
    with tempfile.TemporaryDirectory(prefix="rpadiag-") as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        lines = [dump_json({"token_ids": [int(t) for t in ids]}).replace("\n", " ") for ids in rows["token_ids"]]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        inputs = _load(options, stacks, str(model), prompts, progress)
        _check_trainer(options, recorded, stacks, inputs, progress)
        if inputs.dtype != recorded.dtype:  # digests are of one dtype, and the checkpoint has just been checked
            stacks = replace(stacks, weights={})
        with _captured(options, stacks, inputs, progress) as source:
            yield replace(source, directory=directory)


def _as_recorded(run: Run, effective: Mapping[str, Any]) -> _Stacks:
    """The stacks of a run as its manifest tells them; what it does not tell is as by default."""
    told = {
        name: effective[name]
        for name in ("dtype", "device", "mode", "revision", "attention", "contract")
        if effective.get(name)
    }
    emulated = effective.get("rollout") == "emulated"
    return _Stacks(
        **told,
        emulate=str(effective["emulate"]) if emulated and effective.get("emulate") else None,
        align=tuple(effective.get("align") or ()),
        weights=run.weights,
        run=run.path,
    )


def _check_trainer(
    options: FingerprintOptions, recorded: _Stacks, stacks: _Stacks, inputs: Inputs, progress: Progress
) -> None:
    """The checkpoint must still be the one that the run loaded."""
    if "trainer" not in recorded.weights:
        progress.note(f"{recorded.run} records no weight digests: whether the model is still the same is not known")
        return
    trainer = inputs.trainer
    if inputs.dtype != recorded.dtype:
        loaded = ModelOptions(
            model=inputs.model,
            prompts=Path(),
            revision=stacks.revision,
            trust_remote_code=options.trust_remote_code,
        )
        with progress.stage(f"check the weights in {recorded.dtype}"):
            trainer = load_trainer(loaded, model=inputs.model, device="cpu", dtype=recorded.dtype, attention="auto")
    _check_weights("trainer", trainer.weight_digests(), recorded, inputs.model)


def _check_weights(stack: str, now: Mapping[str, str], stacks: _Stacks, model: str) -> None:
    """Raise NotComparableError unless a stack holds the tensors that the run recorded for it, if it recorded any."""
    then = stacks.weights.get(stack)
    differing = differing_tensors(then, now) if then else []
    if not then or not differing:
        return
    first = differing[0]
    raise NotComparableError(
        f"{model} has other weights than run {stacks.run} recorded",
        detail=f"{len(differing)} of {len(then)} tensors of the {stack} differ, first {first}: "
        f"{then.get(first, 'absent')} then, {now.get(first, 'absent')} now",
        hint="give the checkpoint and revision of the run back their place, or make the run again",
    )


# -- captures ----------------------------------------------------------------------------------------


@contextmanager
def _captured(options: FingerprintOptions, stacks: _Stacks, inputs: Inputs, progress: Progress) -> Iterator[Source]:
    """Run the model on enough tokens, into a temporary bundle."""
    from rpadiag.workflows.fingerprint_sites import sites_to_capture

    sequences = _enough(inputs.sequences)
    sites = sites_to_capture(inputs.facts, options.regions)
    with tempfile.TemporaryDirectory(prefix="rpadiag-") as scratch:
        directory = Path(scratch) / "bundle"
        capture = _capture_trainer if options.stack == "trainer" else _capture_rollout
        with progress.stage(f"capture {options.stack}", len(sequences)) as stage:
            bundle = capture(options, stacks, inputs, sequences, sites, directory, stage.advance)
        label = _label(bundle.meta)
        yield Source(bundle=bundle, trainer=inputs.trainer, label=label, facts=_facts(bundle.meta, label, inputs.model))


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
    options: FingerprintOptions, stacks: _Stacks, inputs: Inputs, sequences: tuple[TokenSequence, ...],
    sites: list[str], directory: Path, advance: Any,
) -> Bundle:  # fmt: skip
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.engines.bundle_writer import BundleWriter
    from rpadiag.regions.align import align
    from rpadiag.workflows.options import DEFAULT_CONTRACT

    trainer = inputs.trainer
    with ExitStack() as stack:
        aligned: dict[str, Any] = {}
        if stacks.align:
            contract = stacks.contract or DEFAULT_CONTRACT
            alignment = stack.enter_context(align(trainer.model, regions=stacks.align, contract=contract))
            aligned = {"aligned": list(alignment.contracts)}
        writer = stack.enter_context(BundleWriter(directory, {**trainer.manifest(), **aligned}))
        for i, sequence in enumerate(sequences):
            writer.begin(i)
            scores = trainer.forward(sequence.token_ids, sites=sites, on_site=writer.append)
            writer.end(
                i,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                prompt=sequence.prompt,
                positions=scores.positions,
            )
            advance()
    return open_bundle(directory)


def _capture_rollout(
    options: FingerprintOptions, stacks: _Stacks, inputs: Inputs, sequences: tuple[TokenSequence, ...],
    sites: list[str], directory: Path, advance: Any,
) -> Bundle:  # fmt: skip
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.workflows.fingerprint_blocks import block_sites

    longest = max(len(s.token_ids) for s in sequences)
    with _rollout(options, stacks, inputs, longest, directory.parent / "vllm.log") as engine:
        _check_weights("rollout", engine.weight_digests(), stacks, inputs.model)
        shown = getattr(engine, "sites", engine.facts.sites)  # a compiled model shows attention alone
        wanted = {*sites, *(() if stacks.mode == "eager" else block_sites(inputs.facts.num_layers))}
        engine.score(
            sequences,
            sites=[site for site in shown if site in wanted],
            bundle_dir=directory,
            on_finished=lambda _: advance(),
        )
    return open_bundle(directory)


def _rollout(
    options: FingerprintOptions, stacks: _Stacks, inputs: Inputs, longest: int, log: Path
) -> VllmEngine | EmulatedEngine:
    loaded: dict[str, Any] = {
        "dtype": inputs.dtype,
        "device": resolve_device(stacks.device),
        "seed": options.seed,
        "revision": stacks.revision,
        "trust_remote_code": options.trust_remote_code,
    }
    if stacks.emulate is not None:
        from rpadiag.engines.emulated import EmulatedEngine

        return EmulatedEngine.start(inputs.model, preset=stacks.emulate, attention=stacks.attention, **loaded)
    from rpadiag.engines.vllm import VllmEngine

    return VllmEngine.start(
        inputs.model, log_path=log, enforce_eager=stacks.mode == "eager", max_model_len=longest + 1, **loaded
    )


def _label(meta: Mapping[str, Any]) -> str:
    """Engine and version, as sentences name it."""
    name = str(meta.get("engine", "engine"))
    if meta.get("emulated"):
        return f"emulated {meta.get('preset', '')}".strip()
    versions = meta.get("versions", {})
    version = meta.get("vllm_version") or (versions.get(name, "") if isinstance(versions, Mapping) else "")
    regions = meta.get("aligned") or ()
    if isinstance(regions, Mapping):  # rpadiag capture also says what they follow
        regions = regions.get("regions", ())
    aligned = f" aligned in {', '.join(regions)}" if regions else ""
    return f"{name} {version}".strip() + aligned


def _facts(meta: Mapping[str, Any], label: str, model: str) -> dict[str, Any]:
    keep = (
        "engine", "stack", "vllm_version", "versions", "dtype", "device", "device_name", "attention", "numerics",
        "emulated", "preset", "aligned",
    )  # fmt: skip
    return {"label": label, "model": model, **{k: meta[k] for k in keep if k in meta}}
