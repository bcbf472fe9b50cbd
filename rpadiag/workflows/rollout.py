"""Starts the rollout engine that the options ask for: real vLLM, or an emulation that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rpadiag.errors import CaptureError
from rpadiag.sites import split_site
from rpadiag.workflows.inputs import Prompted
from rpadiag.workflows.options import CaptureOptions, CompareOptions, ModelOptions

if TYPE_CHECKING:
    from rpadiag.engines.emulated import EmulatedEngine
    from rpadiag.engines.vllm import VllmEngine

LOG_FILE = "vllm.log"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A started rollout engine. label: how it is named in sentences. absent: point -> why it cannot be seen."""

    engine: VllmEngine | EmulatedEngine
    label: str
    real: bool
    absent: Mapping[str, str] = field(default_factory=dict)

    def stop(self) -> None:
        """End a real engine at once, whatever it is doing."""
        if self.real:
            getattr(self.engine, "abort", self.engine.close)()


class Written(Protocol):
    """The run or bundle that is being written: the engine's log goes there, and what was chosen for the user is noted."""

    @property
    def path(self) -> Path: ...
    def set_effective(self, **values: Any) -> None: ...


def default_preset(device: str, dtype: str) -> str:
    """Contract preset of eager vLLM on this device; on a CPU it depends on the instruction set."""
    if device != "cpu":
        return "vllm-eager"
    from rpadiag.regions.presets import vllm_cpu_preset

    return vllm_cpu_preset(dtype).name


@contextmanager
def start_rollout(
    options: CompareOptions | CaptureOptions,
    inputs: Prompted,
    run: Written,
    *,
    overrides: Mapping[str, Any] | None = None,
    running: VllmEngine | None = None,
) -> Iterator[Rollout]:
    """The engine, stopped on leaving; one that is already ``running`` on this model is brought to the dtype and left running."""
    if running is not None:
        if running.manifest()["dtype"] != inputs.dtype:
            running.reload(dtype=inputs.dtype)
        yield _vllm(running)
        return
    if options.rollout == "emulated":
        from rpadiag.engines.emulated import EmulatedEngine

        preset = options.emulate or default_preset(inputs.device, inputs.dtype)
        run.set_effective(emulate=preset)
        with EmulatedEngine.start(
            inputs.model,
            preset=preset,
            dtype=inputs.dtype,
            device=inputs.device,
            attention=options.attention,
            seed=options.seed,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        ) as emulated:
            yield Rollout(engine=emulated, label=f"emulated {preset}", real=False)
        return
    longest = max(len(s.token_ids) for s in inputs.sequences) + options.generate
    with logged_vllm(
        options,
        inputs,
        run,
        hf_overrides=dict(overrides) if overrides else None,
        enforce_eager=options.mode == "eager",
        max_model_len=longest + 1,
        tensor_parallel_size=options.tp,
        extra=_extra(options, inputs.device),
        timeout_s=options.timeout_s,
    ) as engine:
        yield _vllm(engine)


@contextmanager
def logged_vllm(options: ModelOptions, inputs: Prompted, run: Written, **arguments: Any) -> Iterator[VllmEngine]:
    """vLLM on the model that was prepared, its log in the run; ``arguments`` are more of :meth:`VllmEngine.start`."""
    from rpadiag.engines.vllm import VllmEngine

    log = run.path / LOG_FILE
    with VllmEngine.start(
        inputs.model,
        dtype=inputs.dtype,
        device=inputs.device,
        seed=options.seed,
        log_path=log,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        **arguments,
    ) as engine:
        yield engine
    log.unlink(missing_ok=True)  # it is quoted when the engine fails, and holds paths of the machine


def _extra(options: CompareOptions | CaptureOptions, device: str) -> dict[str, Any]:
    """Further engine arguments: the user's, and graphs in pieces where compiled decode steps are to be seen on a GPU.

    vLLM's default replays a decode step as one CUDA graph, in which nothing can be seen; PIECEWISE leaves attention outside of graphs,
    where its kernel may split keys otherwise than in the graph.
    """
    extra = options.extra
    if options.mode == "compiled" and options.generate and device != "cpu":
        extra.setdefault("compilation_config", {"cudagraph_mode": "PIECEWISE"})
    return extra


def _vllm(engine: VllmEngine) -> Rollout:
    manifest = engine.manifest()
    invariant = ", batch-invariant" if manifest.get("env", {}).get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") else ""
    every = engine.facts.sites_over(manifest["tensor_parallel_size"])
    hidden = {split_site(s)[1] for s in every} - {split_site(s)[1] for s in engine.sites}
    reason = "the compiled engine calls no module at this point"
    absent = dict.fromkeys(sorted(hidden), reason)
    if manifest["head_dtype"] != manifest["dtype"]:
        absent["logits"] = f"vLLM computes logits in {manifest['head_dtype']}, the model runs in {manifest['dtype']}"
    label = f"vLLM {manifest.get('vllm_version', '')}".strip() + invariant
    return Rollout(engine=engine, label=label, real=True, absent=absent)


def visible_sites(chosen: list[str], rollout: Rollout, *, asked: bool) -> list[str]:
    """The chosen sites that this engine can show; one that was asked for by name and is hidden is an error."""
    seen = [s for s in chosen if split_site(s)[1] not in rollout.absent]
    if asked and len(seen) < len(chosen):
        hidden = next(s for s in chosen if s not in seen)
        raise CaptureError(
            f"site {hidden} cannot be seen in {rollout.label}: {rollout.absent[split_site(hidden)[1]]}",
            hint="ask for "
            + (", ".join(sorted({split_site(s)[1] for s in seen})) or "other sites, or rerun with --mode eager"),
        )
    return seen
