"""What the engine process asks of vLLM's worker, where it is one and lives in the same process.

:mod:`rpadiag.engines.vllm_shards` has the same questions for several workers in processes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rpadiag.engines.base import ModelFacts
    from rpadiag.engines.bundle_writer import BundleWriter
    from rpadiag.engines.families import Family
    from rpadiag.engines.vllm_capture import Recorder
    from rpadiag.engines.vllm_shards import ManyWorkers


class OneWorker:
    """The worker of an engine without parallelism. delivered: digest of each tensor that its loader handed over."""

    def __init__(self, engine: Any, delivered: Mapping[str, str]) -> None:
        self._engine = engine
        self._delivered = dict(delivered)

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        worker = getattr(self._engine.model_executor, "driver_worker", self._engine.model_executor)
        return getattr(worker, "worker", worker).model_runner

    def model(self) -> torch.nn.Module:
        """The live model."""
        model: torch.nn.Module = self.runner.get_model()
        return model

    def describe(self) -> dict[str, Any]:
        """``model_runner``, ``model_class`` and ``compiled`` (whether modules are not called)."""
        from rpadiag.engines.vllm_points import describe

        return describe(self.runner)

    def check_complete(self, name: str) -> None:
        """InputError unless the checkpoint delivered every tensor."""
        from rpadiag.engines.vllm_weights import check_complete

        check_complete(self.model(), self._delivered, name=name)

    def weight_digests(self) -> dict[str, str]:
        """Digest per checkpoint tensor: of the live parameter where vLLM kept it, else of what was loaded into it."""
        from rpadiag.engines.vllm_weights import live_digests

        return {**self._delivered, **live_digests(self.model(), known=self._delivered)}

    def recorder(self, bundle: BundleWriter, sites: Sequence[str], _family: Family, _facts: ModelFacts) -> Recorder:
        """A recorder on the worker's model, not yet attached."""
        recorder: Recorder = self._engine.collective_rpc("rpadiag_recorder", args=(bundle, list(sites)))[0]
        return recorder


def workers_of(engine: Any, delivered: Mapping[str, str]) -> OneWorker | ManyWorkers:
    """The workers of a started engine."""
    if engine.vllm_config.parallel_config.world_size == 1:
        return OneWorker(engine, delivered)
    from rpadiag.engines.vllm_shards import ManyWorkers

    return ManyWorkers(engine)
