"""The options of each workflow: frozen, validated once, written into the run's manifest as given.

A value out of range or an unknown name raises ``UsageError`` here, so that the command line and library
callers get the same message. Whatever ``None`` stands for is chosen by the workflow and recorded in the
manifest as effective.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpadiag.errors import UsageError, unknown_name
from rpadiag.sites import ALIGN_NAMES, ALIGNABLE_REGIONS, check_aligned, check_patterns, check_regions
from rpadiag.workflows.sharding import check_shard

DTYPES = ("bfloat16", "float16", "float32", "auto")
ROLLOUTS = ("vllm", "emulated")
CONTROLS = ("fp32", "none")
MODES = ("eager", "compiled")
STACKS = ("trainer", "rollout")
ENGINES = ("vllm", "trainer", "emulated")
TIMEOUT_S = 600.0  # of a rollout engine without a sign of life
UNITS = ("region", "layer")
ATTRIBUTABLE_REGIONS = (*ALIGN_NAMES, "attention", "matmul", "lm_head")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
DEFAULT_CONTRACT = "fp32-output"
MAX_SEED = 2**32 - 1  # numpy takes no larger one, and vLLM seeds it


def _one_of(kind: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise unknown_name(kind, value, known)


def _at_least(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise UsageError(f"{name} must be at least {minimum}, not {value}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed must be from 0 to {MAX_SEED}, not {seed}")


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda") and not (
        device.startswith("cuda:") and device.removeprefix("cuda:").isdigit()
    ):
        raise unknown_name("device", device, ("auto", "cpu", "cuda", "cuda:N"))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What every command that runs a model needs.

    model:   a local directory, a hub id, or the alias ``smollm2-135m``.
    prompts: a .txt, .jsonl or .parquet file (see ``rpadiag.prompts``).
    dtype:   dtype of weights and activations on both stacks; ``auto`` is the checkpoint's.
    device:  ``cpu``, ``cuda`` or ``auto`` (cuda where there is one).
    max_tokens: keep the first N tokens of each prompt; None keeps all.
    revision: hub revision; None is the default branch (resolved and recorded).
    """

    model: str
    prompts: Path
    dtype: str = "bfloat16"
    device: str = "auto"
    max_tokens: int | None = None
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _check_device(self.device)
        _at_least("--max-tokens", self.max_tokens, 2)  # a sequence of one token has no logprob
        _check_seed(self.seed)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values, paths as text."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class StackOptions(ModelOptions):
    """What running one or both stacks needs: compare and capture.

    emulate:  preset that an emulated rollout follows; None is the preset of vLLM on this device.
    mode:     whether the real engine runs eager (every site is seen) or compiled (attention sites only).
    tp:       ranks that the real engine is cut over (tensor parallel), each on a device of its own.
    attention: attention implementation of the trainer.
    sites:    glob patterns over site addresses; empty is every site.
    generate: tokens that the rollout samples after each prompt and both stacks then score.
    align:    regions in which the trainer is aligned first.
    contract: preset or file that ``align`` follows; None is ``fp32-output``.
    timeout_s: the real engine is ended when it gives no sign of life for so long.
    shard: what several processes of a torchrun divide: ``prompts``, or the trainer's weights by ``fsdp`` or ``tp``.
    engine_args: ``NAME=VALUE``, further arguments of the real engine; a value that is JSON is read as such.
    """

    emulate: str | None = None
    mode: str = "eager"
    tp: int = 1
    attention: str = "sdpa"
    sites: tuple[str, ...] = ()
    generate: int = 0
    align: tuple[str, ...] = ()
    contract: str | None = None
    timeout_s: float = TIMEOUT_S
    engine_args: tuple[str, ...] = ()
    shard: str = "prompts"

    @property
    def extra(self) -> dict[str, Any]:
        """The engine arguments by name."""
        return dict(_engine_argument(text) for text in self.engine_args)

    def _check_stacks(self, rollout: str, flag: str) -> None:
        """Values in range, and together. rollout: the engine that is asked for with the option ``flag``."""
        _one_of("mode", self.mode, MODES)
        _at_least("--tp", self.tp, 1)
        _one_of("attention", self.attention, ATTENTIONS)
        _at_least("--generate", self.generate, 0)
        if self.timeout_s < 1:
            raise UsageError(f"--timeout must be at least 1 second, not {self.timeout_s:g}")
        if self.extra and rollout != "vllm":
            raise UsageError("--engine-arg is an argument of vLLM", hint="leave it out, or use the real engine")
        check_shard(self.shard, tp=self.tp)
        check_patterns(self.sites)
        check_aligned(self.align)
        if self.contract is not None and not self.align:
            raise UsageError(
                "--contract names what an aligned trainer follows, and no region is aligned",
                hint="add --align all; for the contract of an emulated rollout use --emulate",
            )
        if self.emulate is not None and rollout != "emulated":
            raise UsageError("--emulate names what an emulated rollout follows", hint=f"add {flag} emulated")
        if self.tp > 1 and rollout != "vllm":
            raise UsageError("--tp needs the real engine", hint=f"leave {flag} {rollout} out, or --tp")
        if self.tp > 1 and ":" in self.device:
            raise UsageError(
                f"--tp {self.tp} takes {self.tp} devices, --device {self.device} names one",
                hint="use --device cuda; CUDA_VISIBLE_DEVICES chooses which",
            )
        if self.mode == "compiled" and rollout != "vllm":
            raise UsageError(
                "--mode compiled needs the real engine", hint=f"use {flag} emulated --emulate vllm-compiled"
            )


def _engine_argument(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    if not given or not name.strip():
        raise UsageError(f"--engine-arg {text}: not NAME=VALUE", hint="--engine-arg kv_cache_dtype=fp8")
    try:
        return name.strip().replace("-", "_"), json.loads(value)
    except ValueError:
        return name.strip().replace("-", "_"), value


@dataclass(frozen=True, kw_only=True)
class CompareOptions(StackOptions):
    """``rpadiag compare``.

    run:      the directory to write.
    rollout:  ``vllm`` is the real engine, ``emulated`` a transformers forward that follows ``emulate``.
    control:  ``fp32`` runs both stacks again in FP32, where rounding vanishes and mistakes stay.
    temperature, top_p: of sampling with ``generate``; logprobs stay raw.
    """

    run: Path
    rollout: str = "vllm"
    control: str = "fp32"
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("rollout", self.rollout, ROLLOUTS)
        _one_of("control", self.control, CONTROLS)
        self._check_stacks(self.rollout, "--rollout")
        if self.temperature < 0:
            raise UsageError(f"--temperature must be at least 0, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, not {self.top_p:g}")
        if (self.temperature, self.top_p) != (1.0, 1.0) and not self.generate:
            raise UsageError("--temperature and --top-p are of sampling", hint="add --generate N")


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(StackOptions):
    """``rpadiag capture``.

    prompts: a prompt file, or a bundle whose tokens are taken.
    engine:  the stack to run: ``vllm`` or ``trainer``, or an ``emulated`` rollout.
    bundle:  the directory to write.
    resume:  go on with the bundle that an interrupted capture left.
    """

    bundle: Path
    engine: str = "vllm"
    resume: bool = False

    @property
    def rollout(self) -> str:
        """The rollout engine of the same name."""
        return self.engine

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("engine", self.engine, ENGINES)
        self._check_stacks(self.engine, "--engine")
        if self.engine == "trainer" and self.generate:
            raise UsageError(
                "--generate lets the rollout engine sample, and --engine trainer is not one",
                hint="capture the rollout first, then the trainer on its tokens: name that bundle in place of PROMPTS",
            )
        if self.engine != "trainer" and self.align:
            raise UsageError("--align aligns the trainer", hint="add --engine trainer")


@dataclass(frozen=True, kw_only=True)
class BundlesOptions:
    """``rpadiag compare`` of two bundles, with neither engine.

    trainer, rollout: what ``rpadiag capture`` or another program wrote.
    trainer_fp32, rollout_fp32: the same two stacks on the same tokens in FP32, as a control; both or neither.
    model:  whose operations local divergence is computed with; None leaves it out, and needs no torch.
    sites:  glob patterns over site addresses; empty is every site that both bundles have.
    """

    run: Path
    trainer: Path
    rollout: Path
    trainer_fp32: Path | None = None
    rollout_fp32: Path | None = None
    model: str | None = None
    sites: tuple[str, ...] = ()
    device: str = "auto"
    attention: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _check_device(self.device)
        check_patterns(self.sites)
        if (self.trainer_fp32 is None) != (self.rollout_fp32 is None):
            given = "--trainer-fp32" if self.rollout_fp32 is None else "--rollout-fp32"
            raise UsageError(f"{given} alone is no control", hint="give both --trainer-fp32 and --rollout-fp32")

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values, paths as text."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class BisectOptions(ModelOptions):
    """``rpadiag bisect``.

    run:        the directory to write.
    regions:    regions whose part of the divergence is estimated, each alone and all together.
    by:         what responsibility is assigned to: ``region``, ``layer`` (groups of layers) or ``region,layer``; ``layer:N`` makes N groups.
    contract:   preset or file that an aligned region follows; None is that of eager vLLM on this device.
    replicates: rounding replicates of each variant, or the most there may be with ``precision``.
    precision:  stop when the standard error of the strongest part is below this share of it; None makes all replicates.
    interactions: a factorial design, for main effects and two-way interactions.
    confirm:    repeat with a second kind of noise: equivalent batches, or on a CPU another order of sums.
    resume:     continue the interrupted bisection in ``run``.
    rollout:    ``vllm``: the engine under the same noise too, so that trainers are also held against it; ``none``: trainers alone.
    """

    run: Path
    regions: tuple[str, ...] = ALIGNABLE_REGIONS
    by: str = "region"
    contract: str | None = None
    replicates: int = 16
    precision: float | None = None
    interactions: bool = False
    confirm: bool = False
    resume: bool = False
    attention: str = "sdpa"
    rollout: str = "none"

    @property
    def units(self) -> tuple[tuple[str, ...], int | None]:
        """What responsibility is assigned to, and the number of layer groups where one was given."""
        units, num_groups = [], None
        for word in self.by.split(","):
            name, _, number = word.strip().partition(":")
            _one_of("unit", name, UNITS)
            if number:
                if name != "layer" or not number.isdigit() or int(number) < 1:
                    raise UsageError(
                        f"--by {self.by}: {word!r} is not a unit", hint="--by layer:6 makes 6 groups of layers"
                    )
                num_groups = int(number)
            units.append(name)
        return tuple(dict.fromkeys(units)), num_groups

    def __post_init__(self) -> None:
        super().__post_init__()
        check_regions(self.regions, known=ATTRIBUTABLE_REGIONS)
        _ = self.units  # raises for what is not a unit
        if self.precision is not None and not 0 < self.precision < 1:
            raise UsageError(f"--precision must be between 0 and 1, not {self.precision:g}", hint="--precision 0.2")
        if not self.regions:
            raise UsageError("no region to attribute to", hint=f"--regions {','.join(ALIGNABLE_REGIONS)}")
        _at_least("--replicates", self.replicates, 2)  # a variance needs two
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("rollout engine", self.rollout, ("none", "vllm"))


@dataclass(frozen=True, kw_only=True)
class FingerprintOptions:
    """``rpadiag fingerprint``: a run or bundle, or a model with prompts and the stack to look at.

    target:  a run directory, a bundle directory, or a model when ``prompts`` is given.
    stack:   which stack's kernels to look at.
    regions: regions to fingerprint.
    output:  JSON file that ``rpadiag.align`` reads; None is in the run or bundle, and nowhere for a model.
    dtype, device, mode, revision: None is what the run or bundle says, and for a model what ``compare`` takes by default.
    """

    target: str
    prompts: Path | None = None
    stack: str = "rollout"
    regions: tuple[str, ...] = ALIGNABLE_REGIONS
    output: Path | None = None
    dtype: str | None = None
    device: str | None = None
    mode: str | None = None
    max_tokens: int | None = None
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("stack", self.stack, STACKS)
        if self.mode is not None:
            _one_of("mode", self.mode, MODES)
        if self.dtype is not None:
            _one_of("dtype", self.dtype, DTYPES)
        if self.device is not None:
            _check_device(self.device)
        check_regions(self.regions, known=ALIGN_NAMES)
        if not self.regions:
            raise UsageError("no region to fingerprint", hint=f"--regions {','.join(ALIGNABLE_REGIONS)}")
        _at_least("--max-tokens", self.max_tokens, 2)
        _check_seed(self.seed)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values, paths as text."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """``rpadiag rollouts --model``: the trainer that scores recorded tokens.

    model:   a local directory, a hub id, or the alias ``smollm2-135m``: the weights of the step that was recorded.
    temperature: logits are divided by it; None is what the file records, and 1 where it records none.
    align:   regions in which the trainer is aligned first. contract: what it then follows; None is ``fp32-output``.
    """

    model: str
    dtype: str = "bfloat16"
    device: str = "auto"
    attention: str = "sdpa"
    temperature: float | None = None
    align: tuple[str, ...] = ()
    contract: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _check_device(self.device)
        _one_of("attention", self.attention, ATTENTIONS)
        check_aligned(self.align)
        if self.temperature is not None and not self.temperature > 0:
            raise UsageError(f"--temperature must be above 0, not {self.temperature:g}")
        if self.contract is not None and not self.align:
            raise UsageError(
                "--contract names what an aligned trainer follows, and no region is aligned", hint="add --align all"
            )

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}
