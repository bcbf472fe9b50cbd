"""Tensor parallelism: every rank of vLLM captures its shard in its own process, and the shards become one bundle.

A worker's :class:`ShardExtension` is called by name through vLLM's own executor, with plain values. Each rank appends to a
bundle of its own, ``rank-R`` inside the target; when a sequence has ended on all ranks, :func:`merge_sequence` lays the
shards side by side: column-parallel points (q, k, v, gate, up and what follows up to the row-parallel product) along the
width in the order of ranks, and so are the partial products that an all-reduce sums; replicated ones once. A replicated point whose ranks disagree is named in the bundle's ``meta``.
Run with vLLM 0.32.0 (CPU, two workers).
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpadiag.engines.base import ModelFacts, TokenSequence
from rpadiag.engines.bundle import BundleCapture, BundleWriter, SequenceWriter
from rpadiag.engines.bundle_writer import raw_name
from rpadiag.engines.families import Family
from rpadiag.engines.vllm_capture import CaptureExtension, Recorder
from rpadiag.engines.vllm_points import describe, full_widths
from rpadiag.errors import CaptureError, NotComparableError, RpadiagError, UsageError, from_plain
from rpadiag.runs.manifest import differing_tensors
from rpadiag.sites import split_site

Plain = list[str | None]  # an error as RpadiagError.to_plain gives it
_delivered: dict[str, str] = {}  # of this worker process: digests of what vLLM's loader handed to the model


def rank_directory(directory: Path, rank: int) -> Path:
    """Where a rank captures before its shards are merged."""
    return directory / f"rank-{rank}"


class ShardExtension(CaptureExtension):
    """Mixed into each worker; every method takes and returns plain values, since the caller is another process."""

    rank: int

    def rpadiag_describe(self) -> dict[str, Any]:
        """See :func:`rpadiag.engines.vllm_points.describe`."""
        return describe(self.model_runner)

    def rpadiag_check(self, name: str) -> Plain | None:
        """The error of an incomplete checkpoint, if it is one."""
        from rpadiag.engines.vllm_weights import check_complete

        return _caught(lambda: check_complete(self.model_runner.get_model(), _delivered, name=name))

    def rpadiag_digests(self) -> dict[str, str]:
        """Digest per checkpoint tensor as the loader delivered it, before this rank cut its shard from it."""
        return dict(_delivered)

    def rpadiag_open(self, directory: str, sites: list[str]) -> Plain | None:
        """Attach a recorder that writes to this rank's directory."""

        def attach() -> None:
            bundle = BundleWriter(rank_directory(Path(directory), self.rank), {"rank": self.rank})
            self._rpadiag = Recorder(self.model_runner, bundle, sites)
            self._rpadiag.attach()

        return _caught(attach)

    def rpadiag_begin(
        self, index: int, token_ids: list[int], num_generate: int, given: list[int] | None
    ) -> Plain | None:
        """Expect a sequence."""
        return _caught(lambda: self._rpadiag.begin(index, token_ids, num_generate, given))

    def rpadiag_end(self, index: int, num_rows: int) -> dict[str, Any]:
        """Close a sequence: positions, entropy and argmax as lists, or the first error of this rank."""
        recorder = self._rpadiag
        found: dict[str, Any] = {}

        def end() -> None:
            if recorder.error is not None:
                raise recorder.error
            positions, entropy, argmax, _ = recorder.end(index)
            recorder.bundle.end(index, token_ids=[0] * num_rows, num_prompt_tokens=num_rows)
            found.update(positions=positions.tolist(), entropy=entropy.tolist(), argmax=argmax.tolist())

        return {"error": _caught(end), **found}

    def rpadiag_error(self) -> Plain | None:
        """The first error of this rank's hooks."""
        return self._rpadiag.error.to_plain() if self._rpadiag.error is not None else None

    def rpadiag_fired(self) -> list[str]:
        """Sites that this rank has seen."""
        return sorted(self._rpadiag.fired)

    def rpadiag_close(self) -> None:
        """Take the recorder back."""
        self._rpadiag.detach()
        self._rpadiag.bundle.abandon()


def _caught(action: Any) -> Plain | None:
    """Run ``action``; an RpadiagError comes back as plain strings, since a raised one would end the worker."""
    try:
        action()
    except RpadiagError as error:
        return error.to_plain()
    return None


def raise_first(answers: Sequence[Plain | None]) -> None:
    """Raise the first rank's error in this process."""
    for rank, answer in enumerate(answers):
        if answer is not None:
            raise from_plain(answer, place=f"rank {rank}: ")


class ManyWorkers:
    """The workers of a tensor-parallel engine, asked through its executor; as :class:`rpadiag.engines.vllm_workers.OneWorker`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def model(self) -> torch.nn.Module:
        """Not here: raises UsageError."""
        raise UsageError("vLLM's attention cannot be lent by a sharded engine", hint="start it with --tp 1")

    def describe(self) -> dict[str, Any]:
        """Of rank 0; all ranks run the same."""
        described: dict[str, Any] = self._engine.collective_rpc("rpadiag_describe")[0]
        return described

    def check_complete(self, name: str) -> None:
        """InputError unless every rank's loader delivered every tensor."""
        raise_first(self._engine.collective_rpc("rpadiag_check", args=(name,)))

    def weight_digests(self) -> dict[str, str]:
        """Digest per checkpoint tensor as rank 0's loader delivered it; a rank that was handed others is an error."""
        first, *others = self._engine.collective_rpc("rpadiag_digests")
        for rank, digests in enumerate(others, start=1):
            if differing := differing_tensors(first, digests):
                raise NotComparableError(f"rank {rank} of vLLM loaded another {differing[0]} than rank 0")
        return dict(first)

    def recorder(
        self, bundle: BundleWriter, sites: Sequence[str], family: Family, facts: ModelFacts
    ) -> ShardedRecorder:
        """A recorder over all ranks, not yet attached."""
        return ShardedRecorder(self._engine, bundle, sites, family, facts)


class ShardedRecorder:
    """The engine process's side: what :class:`rpadiag.engines.vllm_capture.Recorder` is to one worker, to all of them."""

    def __init__(
        self, engine: Any, bundle: BundleWriter, sites: Sequence[str], family: Family, facts: ModelFacts
    ) -> None:
        self._engine = engine
        self.bundle = bundle
        self.sites = tuple(sites)
        self._num_ranks = int(engine.vllm_config.parallel_config.world_size)
        self._widths = full_widths(family, facts, self._num_ranks)
        self._unequal: set[str] = set()
        self._open: dict[int, tuple[SequenceWriter, int]] = {}
        self._own_error: RpadiagError | None = None

    @property
    def error(self) -> RpadiagError | None:
        """The first error: of this process, else of a rank."""
        if self._own_error is None:
            try:
                raise_first(self._call("rpadiag_error"))
            except RpadiagError as error:
                self._own_error = error
        return self._own_error

    @error.setter
    def error(self, value: RpadiagError) -> None:
        self._own_error = value

    def attach(self) -> None:
        raise_first(self._call("rpadiag_open", str(self.bundle.directory), list(self.sites)))

    def begin(self, index: int, token_ids: list[int], num_generate: int, given: list[int] | None = None) -> None:
        self._open[index] = (self.bundle.begin(index), len(token_ids) + num_generate)
        raise_first(self._call("rpadiag_begin", index, list(token_ids), num_generate, given))

    def end(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
        """(positions [T], entropy [T-1], argmax [T-1], writer) with every rank's shards in the writer's file."""
        writer, num_rows = self._open.pop(index)
        answers = self._call("rpadiag_end", index, num_rows)
        raise_first([a["error"] for a in answers])
        first = answers[0]
        shards = [rank_directory(self.bundle.directory, r) for r in range(self._num_ranks)]
        self._unequal |= merge_sequence(shards, index, num_rows, writer, self._widths)
        self.bundle.meta["ranks_unequal"] = sorted(self._unequal)
        return (
            np.array(first["positions"], np.int64),
            np.array(first["entropy"], np.float32),
            np.array(first["argmax"], np.int32),
            writer,
        )

    def check_fired(self) -> None:
        """CaptureError unless every requested site fired on every rank."""
        for rank, fired in enumerate(self._call("rpadiag_fired")):
            silent = [s for s in self.sites if s not in fired and s not in ("logprob", "logits")]
            if silent:
                raise CaptureError(f"site {silent[0]} was requested but never fired on rank {rank} of engine vllm")

    def detach(self) -> None:
        """Take the hooks back and delete what the ranks wrote."""
        self._call("rpadiag_close")
        for rank in range(self._num_ranks):
            shutil.rmtree(rank_directory(self.bundle.directory, rank), ignore_errors=True)

    def _call(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = self._engine.collective_rpc(method, args=args)
        return answers


def merge_sequence(
    shards: Sequence[Path], index: int, num_rows: int, writer: SequenceWriter, widths: Mapping[str, int]
) -> set[str]:
    """Append the sites of sequence ``index`` to ``writer``, shards joined; returns replicated sites whose ranks differ.

    widths: full width of each point. Where heads are fewer than ranks a shard is held by several neighbours; the first counts.
    """
    rows = TokenSequence(prompt=index, token_ids=(0,) * num_rows, num_prompt_tokens=num_rows)
    captures = [BundleCapture(directory / raw_name(index), rows) for directory in shards]
    unequal: set[str] = set()
    for site in captures[0].sites:
        tensors = [c.read(site) for c in captures if site in c.sites]
        full, have = widths[split_site(site)[1]], sum(t.shape[1] for t in tensors)
        if tensors[0].shape[1] == full:
            if any(not torch.equal(_bits(tensors[0]), _bits(t)) for t in tensors[1:]):
                unequal.add(site)
            joined = tensors[0]
        elif have % full == 0:
            joined = torch.cat(tensors[:: have // full], dim=1)
        else:
            shown = ", ".join(str(t.shape[1]) for t in tensors)
            raise CaptureError(f"shards of {site} have widths {shown}, which do not make {full}")
        writer.append(site, joined)
    return unequal


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _digest_deliveries() -> None:
    """Note the digest of each tensor that vLLM's loader delivers in this process."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from rpadiag.engines.vllm_weights import noted

    DefaultModelLoader.get_all_weights = noted(DefaultModelLoader.get_all_weights, _delivered)


if multiprocessing.current_process().name != "MainProcess":
    _digest_deliveries()  # a worker imports this module before it loads weights, and offers no later point
