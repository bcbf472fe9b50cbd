"""The rollout engine as one more stack of a bisection: real vLLM under the trainer's noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.design import Replicate, Score
from rpadiag.errors import InputError
from rpadiag.runs import RunWriter
from rpadiag.runs.manifest import differing_tensors
from rpadiag.workflows.inputs import Inputs
from rpadiag.workflows.options import BisectOptions
from rpadiag.workflows.rollout import logged_vllm

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.vllm import VllmEngine


class BothStacks:
    """Scores replicates of the trainer with ``trainer`` and those of the rollout with vLLM, sequence by sequence.

    vLLM scores each sequence alone, so that nothing but the noise tells one replicate from another.
    """

    def __init__(
        self,
        trainer: Score,
        engine: VllmEngine,
        sequences: Sequence[TokenSequence],
        on_forward: Callable[[int], None],
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self._sequences, self._on_forward = tuple(sequences), on_forward

    def __call__(self, replicates: Sequence[Replicate]) -> Iterator[tuple[Replicate, NDArray[np.float64]]]:
        """Logprobs [num_tokens] of every replicate, float64, nats."""
        ours = [r for r in replicates if r.variant.stack == "trainer"]
        if ours:
            yield from self._trainer(ours)
        for replicate in replicates:
            if replicate.variant.stack == "rollout":
                seed = None if replicate.kind == "none" else replicate.seed
                scored = self._engine.replicate(self._sequences, seed=seed)
                self._on_forward(len(self._sequences))
                yield replicate, np.concatenate([np.asarray(x, dtype=np.float64) for x in scored])


@contextmanager
def replicated_rollout(
    options: BisectOptions, inputs: Inputs, run: RunWriter, *, weights: Mapping[str, str]
) -> Iterator[VllmEngine]:
    """vLLM in eager mode. weights: the trainer's digests; raises InputError where the engine's differ."""
    longest = max(len(s.token_ids) for s in inputs.sequences)
    with logged_vllm(options, inputs, run, max_model_len=longest + 1) as engine:
        theirs = engine.weight_digests()
        run.set_weights("rollout", theirs)
        run.set_manifest(rollout={**engine.manifest(), "model": options.model})
        differing = differing_tensors(weights, theirs)
        if differing:
            raise InputError(
                f"the two stacks hold different weights: {differing[0]} and {len(differing) - 1} more",
                hint="rpadiag compare says which, and why",
            )
        yield engine
