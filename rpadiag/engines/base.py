"""What every engine speaks: facts of a model, token sequences, per-token scores, captures.

Shape legend: T tokens of one sequence, W width of a site, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from rpadiag.errors import InputError, UsageError, unknown_name
from rpadiag.sites import LAYER_POINTS, REDUCED, inputs_of, sites_of, with_reductions

if TYPE_CHECKING:
    import torch


DENSE_MLP_POINTS = ("gate", "up", "act", "geglu", "down")
EXPERT_POINTS = ("router", "expert_out")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a checkpoint's configuration says, the same for both stacks.

    family: one of the families of :mod:`rpadiag.engines.families`.
    qk_norm: whether queries and keys are normalised per head before RoPE.
    max_positions: largest sequence length in tokens.
    sites: every site of the model in execution order; absent: points that no layer has, with the reason.
    sliding_windows: attention window in tokens of each layer, None where a layer sees the whole prefix.
    expert_layers: layers with experts in place of a dense MLP; num_experts, experts_per_token: of each of them.
    """

    family: str
    architecture: str
    num_layers: int
    qk_norm: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    tied_head: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    expert_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """Every site of this model in execution order."""
        every = {p.name for p in LAYER_POINTS} - set(self.absent) - set(REDUCED)
        sparse, dense = every - set(DENSE_MLP_POINTS), every - set(EXPERT_POINTS)
        return tuple(sites_of([sparse if n in self.expert_layers else dense for n in range(self.num_layers)]))

    def sites_over(self, num_ranks: int) -> tuple[str, ...]:
        """Every site of an engine that cuts the model over so many ranks: those of the model, and the all-reduces."""
        return tuple(with_reductions(self.sites)) if num_ranks > 1 else self.sites

    def reads(self, site: str) -> tuple[str, ...]:
        """Sites that the operation behind a site reads."""
        if site not in self._read:
            self._read[site] = inputs_of(site, self.sites, num_layers=self.num_layers)
        return self._read[site]

    @cached_property
    def _read(self) -> dict[str, tuple[str, ...]]:
        """What :meth:`reads` has found: it is asked for every site of every sequence."""
        return {}

    @property
    def absent_reasons(self) -> dict[str, str]:
        """Why a point is absent, from the whole model or from some of its layers."""
        reasons = dict(self.absent) | dict.fromkeys(REDUCED, "the rollout engine runs on one rank and reduces nothing")
        some = f"experts in place of a dense MLP in {_numbers(self.expert_layers)}"
        dense = [n for n in range(self.num_layers) if n not in self.expert_layers]
        if self.expert_layers:
            reasons |= dict.fromkeys((p for p in DENSE_MLP_POINTS if p not in reasons), some)
            if dense:
                reasons |= dict.fromkeys(EXPERT_POINTS, f"a dense MLP and no experts in {_numbers(dense)}")
        return reasons


def _numbers(layers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    return f"layer {shown}" if len(layers) == 1 else f"layers {shown}"


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """Token ids of one sequence: the prompt's, then generated ones, if any.

    prompt: index of the prompt in the prompt file.
    """

    prompt: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens <= len(self.token_ids):
            raise InputError(
                f"prompt {self.prompt} has {len(self.token_ids)} tokens, {self.num_prompt_tokens} of them its prompt",
                hint="a sequence needs at least one prompt token",
            )


def check_scoring(
    facts: ModelFacts, sequences: Sequence[TokenSequence], *, sites: Sequence[str], num_generate: int, max_tokens: int
) -> None:
    """What every rollout engine refuses to score: unknown sites, ids outside the vocabulary, more tokens than it takes.

    max_tokens: longest sequence of this engine, generated tokens included. Raises UsageError or InputError.
    """
    for site in sites:
        if site not in facts.sites:
            raise unknown_name("site", site, facts.sites)
    if num_generate < 0:
        raise UsageError(f"cannot generate {num_generate} tokens")
    longest = max((len(s.token_ids) for s in sequences), default=0) + num_generate
    for sequence in sequences:
        length = len(sequence.token_ids) + num_generate
        if length > max_tokens:
            raise InputError(
                f"prompt {sequence.prompt} has {length} tokens, the engine takes {max_tokens}",
                detail=f"{num_generate} of them to generate; the model takes {facts.max_positions}",
                hint=f"shorten it, or start the engine with max_model_len={longest + 1}"
                if longest <= facts.max_positions
                else "shorten it: --max-tokens cuts prompts",
            )
        outside = [t for t in sequence.token_ids if not 0 <= t < facts.vocab_size]
        if outside:
            raise InputError(
                f"prompt {sequence.prompt} has token id {outside[0]}, the vocabulary has {facts.vocab_size}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """How a model scores tokens 1 .. T-1 of a sequence, each given the tokens before it.

    logprob: float32 [T-1], nats, natural logarithm of the raw (temperature 1) probability of the token.
    entropy: float32 [T-1], nats, of the distribution the token was drawn from.
    rank:    int32 [T-1], number of tokens at least as likely, itself included (vLLM's definition): 1 is the single most
        likely token, and a tie counts against the token: two that share the maximum both have rank 2.
    argmax:  int32 [T-1], the most likely token id.
    positions: int64 [T], the positions that rotary embeddings were computed for, None if not observed.
    """

    logprob: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    argmax: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.logprob)


class Capture(Protocol):
    """The intermediates of one sequence, one site at a time."""

    @property
    def sites(self) -> Sequence[str]:
        """Sites present, in execution order."""
        ...

    @property
    def positions(self) -> npt.NDArray[np.int64] | None:
        """int64 [T]: position of each token as the engine used it; None where it was not observed."""
        ...

    def read(self, site: str) -> torch.Tensor:
        """Tensor [T, W] of a site on the CPU in the captured dtype; an absent site raises CaptureError."""
        ...
