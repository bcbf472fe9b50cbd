"""What a comparison has scored: a few numbers per token of every sequence, on both stacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence


@dataclass(kw_only=True)
class Scored:
    """Scores of every sequence on both stacks, as :class:`rpadiag.engines.base.TokenScores`; a few numbers per token.

    Of sampled tokens ``rollout`` has what they were sampled with, ``decoded`` the same decoded alone, ``rescored`` as prompts.
    """

    sequences: list[TokenSequence]
    trainer: list[Any]
    rollout: list[Any]
    decoded: list[Any] = field(default_factory=list)
    rescored: list[Any] = field(default_factory=list)

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """p, q, sequence index and decode flag of every scored token."""
        p = np.concatenate([s.logprob for s in self.trainer])
        q = np.concatenate([s.logprob for s in self.rollout])
        ids = np.concatenate([np.full(len(s.logprob), i) for i, s in enumerate(self.trainer)])
        decode = np.concatenate([np.arange(1, len(t.token_ids)) >= t.num_prompt_tokens for t in self.sequences])
        return p, q, ids, decode

    def argmaxes(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Most likely token of the trainer and of the rollout, for every scored token; None where one is not known."""
        ours, theirs = ([s.argmax for s in stack] for stack in (self.trainer, self.rollout))
        if any(a is None for a in (*ours, *theirs)):
            return None, None
        return np.concatenate(ours), np.concatenate(theirs)
