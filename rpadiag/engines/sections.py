"""Forwards of a trainer in sections: from the hidden states that enter one decoder layer to those that enter another.

The model's own forward runs each time; layers before the section hand the given states on, and the layer after it hands
them out. So masks, rotary tables and whatever patched the model are those of a whole forward, and so are the bits.
Shape legend: B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rpadiag.engines import noise
from rpadiag.engines.replay import replaced
from rpadiag.engines.scoring import token_logprobs
from rpadiag.engines.trainer import TrainerEngine

HEAD_TOKENS = (256, 2048)  # tokens per block of logits, on a CPU and on a GPU: 100 MB at a vocabulary of 49,152 in BF16


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A sequence in a batch that is scored, behind ``padding`` tokens. key: whatever names it for the caller."""

    token_ids: Sequence[int]
    key: Any
    padding: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows of equal length on the model's device; the first ``len(rows)`` of them are scored, the others only fill the batch.

    attention_mask and position_ids: None for unpadded rows.
    draws: int8 [B, T, H], embedding noise as :func:`noise.ulp_draws` gives it. splits: (seed, number) of each row, where
    products are split.
    """

    input_ids: torch.Tensor
    rows: Sequence[Row]
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    draws: torch.Tensor | None = None
    splits: Sequence[tuple[int, int]] | None = None

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[0])


class _Entered(Exception):
    """Carries the hidden states out of a forward: control flow, not an error."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("section ended")
        self.hidden = hidden


class Sections:
    """Sections of one trainer's decoder."""

    def __init__(self, trainer: TrainerEngine) -> None:
        embed = trainer.family.trainer["embed"].module
        self._model = trainer.model
        self._embed = trainer.model.get_submodule(embed)
        self._decoder: Any = trainer.model.get_submodule(embed.rpartition(".")[0])
        self.num_layers = trainer.facts.num_layers
        layers: Any = self._decoder.layers
        shapes = [tuple((n, p.shape) for n, p in layer.named_parameters()) for layer in layers]
        # So many layers from the first on have one of every shape.
        self.num_distinct = 1 + max(map(shapes.index, shapes))

    def embedded(self, batch: Batch) -> torch.Tensor:
        """The embedding module's output [B, T, H], moved by the batch's draws: the state that enters layer 0."""
        with torch.no_grad():
            hidden: torch.Tensor = self._embed(batch.input_ids)
            return hidden if batch.draws is None else noise.moved(hidden, batch.draws)

    def run(self, batch: Batch, start: int, stop: int, state: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, H] that enter layer ``stop`` from those that enter layer ``start``.

        With ``stop`` = number of layers: the final norm's output. A returned tensor may carry the addends of a residual sum
        (:mod:`rpadiag.regions.addends`): hand on the object itself, not a copy.
        """
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        if start == 0:
            forwards[self._embed] = _answer(state)  # a scale that the decoder applies to it comes after
        for number, layer in enumerate(self._decoder.layers):
            if number < start:
                forwards[layer] = _answer(state) if number == start - 1 else _same
            elif number == stop:
                forwards[layer] = _leave
        arguments = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            with torch.no_grad(), replaced(forwards):
                decoded = self._decoder(input_ids=batch.input_ids, use_cache=False, **given)
                hidden: torch.Tensor = decoded.last_hidden_state
            return hidden
        except _Entered as entered:
            return entered.hidden

    def logprobs(self, batch: Batch, normed: torch.Tensor) -> list[torch.Tensor]:
        """float32 [T-1] of each of ``batch.rows`` from the final norm's output [B, T, H], a block of rows at a time."""
        out: list[torch.Tensor] = []
        padding = batch.rows[0].padding
        size = max(1, HEAD_TOKENS[normed.device.type == "cuda"] // normed.shape[1])
        with torch.no_grad():
            for start in range(0, len(batch.rows), size):
                logits = self._logits(
                    batch.input_ids[start : start + size, padding:], normed[start : start + size, padding:]
                )
                rows = batch.rows[start : start + size]
                scored = [
                    token_logprobs(one, row.token_ids)[:, 0] for one, row in zip(logits[: len(rows)], rows, strict=True)
                ]
                out += torch.stack(scored).cpu()
        return out

    def _logits(self, input_ids: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """[B, T, V] as the model makes them of the final norm's output, with whatever it does behind the head."""
        with replaced({self._decoder: _answer(_DecoderOutput(normed))}):
            logits: torch.Tensor = self._model(input_ids=input_ids, use_cache=False).logits
        return logits


class _DecoderOutput:
    """What a decoder returns, with the final norm's output alone."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None


def moved_embedding(draws: torch.Tensor) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    """A forward hook that moves the embedding output [B, T, H] by the draws of :func:`noise.ulp_draws`, int8 [B, T, H]."""
    return lambda _module, _args, output: noise.moved(output, draws)


def _answer(state: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: state


def _same(hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return hidden


def _leave(hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
    raise _Entered(hidden)
