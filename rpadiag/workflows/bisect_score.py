"""Scores the replicates of a bisection with as few layer evaluations as it takes.

Three kinds of work are shared. Replicates and sequences of equal length are rows of one batch. Variants under the same noise share
every layer below the first one in which their switches differ: hidden states are kept where variants part and dropped when
the last of them went on, so at most one state per nesting of layer ranges is held. The reference is scored once for all variants.

What sharing saves depends on the question and is counted, not assumed: ranges of layers share on average half of the layers; a switch
of whole regions differs in layer 0 already and shares no layer, only the reference; the head's switch shares all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.design import Replicate, Variant, layers_by_region

if TYPE_CHECKING:
    import torch

    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.sections import Batch, Row
    from rpadiag.engines.switches import TrainerSwitches
    from rpadiag.engines.trainer import TrainerEngine

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
BLOCK_REPLICATES = 16
Logprobs = NDArray[np.float64]


@dataclass(kw_only=True)
class ScoringCost:
    """What scoring took so far. A layer evaluation is one decoder layer on one sequence.

    num_forwards: sequences scored under a variant and a replicate. num_layer_evaluations: those run, rows that only fill a
    batch included. num_layers_whole: those of running every forward whole. num_layers_paired: those of running
    every variant whole beside a reference of its own. wall_s: seconds.
    """

    num_forwards: int = 0
    num_layer_evaluations: int = 0
    num_layers_whole: int = 0
    num_layers_paired: int = 0
    wall_s: float = 0.0

    @property
    def saved_by_prefix(self) -> float:
        """Layer evaluations of whole forwards over those run: the gain of shared layers alone."""
        return self.num_layers_whole / self.num_layer_evaluations if self.num_layer_evaluations else 1.0

    @property
    def saved_in_all(self) -> float:
        """Layer evaluations of whole pairs (variant and its own reference) over those run."""
        return self.num_layers_paired / self.num_layer_evaluations if self.num_layer_evaluations else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON form, ratios included."""
        return {**vars(self), "saved_by_prefix": self.saved_by_prefix, "saved_in_all": self.saved_in_all}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Setting:
    """The switches of one variant: the regions aligned in each layer, and whether the head's is."""

    layers: tuple[frozenset[str], ...]
    head: bool
    switches: Mapping[str, tuple[int, ...]]


class PrefixScorer:
    """A :data:`rpadiag.attribution.design.Score` over a trainer. Make one per bisection; :attr:`cost` counts.

    Kernels for products on slow CPUs (``fp32_products``) are the caller's to enter, before this is made. fill: score every batch at
    its full number of rows, so that a logprob cannot depend on what else is asked for where kernels depend on the batch; None finds out
    whether they do. on_forward: called with the number of sequences just scored.
    """

    def __init__(
        self,
        trainer: TrainerEngine,
        sequences: Sequence[TokenSequence],
        switches: TrainerSwitches,
        *,
        fill: bool | None = None,
        batch_tokens: int | None = None,
        block_replicates: int | None = None,
        on_forward: Callable[[int], None] | None = None,
    ) -> None:
        from rpadiag.engines.sections import Sections

        device = "cuda" if trainer.device.type == "cuda" else "cpu"
        self._trainer = trainer
        self._sequences = tuple(sequences)
        self._switches = switches
        self._sections = Sections(trainer)
        self._budget = batch_tokens or BATCH_TOKENS[device]
        self._block = block_replicates or BLOCK_REPLICATES
        self._on_forward = on_forward or _ignore
        self._settings: dict[Variant, _Setting] = {}
        self.cost = ScoringCost()
        self.fill = (device == "cuda" or self.batching_changes_bits()) if fill is None else fill

    def __call__(self, replicates: Sequence[Replicate]) -> Iterator[tuple[Replicate, Logprobs]]:
        """Logprobs [num_tokens] of every replicate, sequence after sequence, float64, nats; a block of replicates at a time."""
        for block in _blocks(replicates, self._block):
            started = time.perf_counter()
            found: dict[Replicate, dict[int, np.ndarray]] = {r: {} for asked in block.values() for r in asked}
            one = next(iter(block.values()))
            by_seed = {asked[0].seed: asked for asked in block.values()}
            settings = [self._setting(r.variant) for r in one]
            for batch in self._batches(self._slots(block), one[0].kind):
                for number, scored in self._walk(batch, settings):
                    for row, logprob in zip(batch.rows, scored, strict=True):
                        seed, sequence = row.key
                        found[by_seed[seed][number]][sequence] = logprob.numpy()
                self._count(batch, one)
            self.cost.wall_s += time.perf_counter() - started
            for replicate, parts in found.items():
                whole = np.concatenate([parts[i] for i in range(len(self._sequences))])
                yield replicate, whole.astype(np.float64)

    def _slots(self, block: Mapping[int, Sequence[Replicate]]) -> list[int]:
        """The seeds of a block's rows. Filled, each replicate has the place that its index gives it, whoever else is there."""
        if not self.fill:
            return [asked[0].seed for asked in block.values()]
        seeds = [next(iter(block.values()))[0].seed] * self._block
        for index, asked in block.items():
            seeds[index % self._block] = asked[0].seed
        return seeds

    def batching_changes_bits(self) -> bool:
        """Whether the trainer computes its longest or shortest sequence otherwise beside copies than alone.

        Kernels choose by shape: the layers up to one of every shape are run, and the head, and every element is looked at.
        """
        by_length = sorted(range(len(self._sequences)), key=lambda i: len(self._sequences[i].token_ids))
        for number in {by_length[0], by_length[-1]}:
            ids = self._sequences[number].token_ids
            rows = min(self._block, max(1, self._budget // len(ids)))
            seen = []
            for copies in sorted({1, 2, rows}):
                batch = self._plain_batch([(0, number)] * copies)
                embedded = self._sections.embedded(batch)
                hidden = self._sections.run(batch, 0, self._sections.num_distinct, embedded)
                seen.append((hidden[0], self._sections.logprobs(batch, hidden)[0]))
            if any(not bool((x == y).all()) for pair in seen for x, y in zip(pair, seen[0], strict=True)):
                return True
        return False

    # --- batches -------------------------------------------------------------------------------------------------------

    def _batches(self, seeds: Sequence[int], kind: str) -> Iterator[Batch]:
        """Batches that hold every sequence under every seed."""
        if kind == "batch":
            for seed in dict.fromkeys(seeds):
                for number in range(len(self._sequences)):
                    yield self._mixed_batch(seed, number)
            return
        lengths = sorted({len(s.token_ids) for s in self._sequences})
        for length in lengths:
            alike = [i for i, s in enumerate(self._sequences) if len(s.token_ids) == length]
            rows = [(seed, number) for seed in seeds for number in alike]
            size = max(1, self._budget // length)
            for start in range(0, len(rows), size):
                yield self._plain_batch(rows[start : start + size], kind=kind)

    def _plain_batch(self, rows: Sequence[tuple[int, int]], *, kind: str = "none") -> Batch:
        import torch

        from rpadiag.engines import noise
        from rpadiag.engines.sections import Batch

        device = self._trainer.device
        ids = torch.tensor([self._sequences[number].token_ids for _, number in rows], dtype=torch.int64)
        draws: torch.Tensor | None = None
        if kind == "ulp":
            width, length = self._trainer.facts.hidden_size, ids.shape[1]
            drawn = [noise.ulp_draws(length, width, seed=seed, number=number) for seed, number in rows]
            draws = torch.from_numpy(np.stack(drawn)).to(device)
        return Batch(
            input_ids=ids.to(device),
            rows=[self._row(seed, number) for seed, number in rows],
            draws=draws,
            splits=list(rows) if kind == "order" else None,
        )

    def _mixed_batch(self, seed: int, number: int) -> Batch:
        import torch

        from rpadiag.engines.noise import equivalent_batch
        from rpadiag.engines.sections import Batch

        vocabulary = self._trainer.facts.vocab_size
        token_ids = self._sequences[number].token_ids
        *tensors, padding = equivalent_batch(token_ids, seed=seed, number=number, vocab_size=vocabulary)
        ids, mask, positions = (torch.from_numpy(x).to(self._trainer.device) for x in tensors)
        row = self._row(seed, number, padding=padding)
        return Batch(input_ids=ids, attention_mask=mask, position_ids=positions, rows=[row])

    def _row(self, seed: int, number: int, *, padding: int = 0) -> Row:
        from rpadiag.engines.sections import Row

        return Row(token_ids=self._sequences[number].token_ids, key=(seed, number), padding=padding)

    # --- shared layers -------------------------------------------------------------------------------------------------

    def _setting(self, variant: Variant) -> _Setting:
        if variant not in self._settings:
            num_layers = self._sections.num_layers
            switches = layers_by_region(variant.aligned, num_layers)
            head = bool(switches.get("lm_head"))
            inside = {region: numbers for region, numbers in switches.items() if region != "lm_head"}
            layers = tuple(frozenset(r for r, n in inside.items() if layer in n) for layer in range(num_layers))
            self._settings[variant] = _Setting(layers=layers, head=head, switches=inside)
        return self._settings[variant]

    def _walk(self, batch: Batch, settings: Sequence[_Setting]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(number of the setting, logprobs of each row), every layer run once for all settings that agree up to it."""
        with self._noise(batch):
            pending: list[tuple[list[int], int, Any]] = [
                (list(range(len(settings))), 0, self._sections.embedded(batch))
            ]
            while pending:
                here, start, state = pending.pop()
                stop = _agree_until(here, settings, start)
                state = self._section(batch, here, settings, start, stop, state)
                if stop == self._sections.num_layers:
                    yield from self._heads(batch, here, settings, state)
                    continue
                groups: dict[frozenset[str], list[int]] = {}
                for number in here:
                    groups.setdefault(settings[number].layers[stop], []).append(number)
                # The largest group last in, first out would keep the others' state longest: small ones are run first.
                pending += [(group, stop, state) for group in sorted(groups.values(), key=len, reverse=True)]

    def _section(
        self, batch: Batch, here: Sequence[int], settings: Sequence[_Setting], start: int, stop: int, state: Any
    ) -> Any:
        """The state that enters layer ``stop``, with the addends of its residual sum where any setting's norm there reads them."""
        reads = [n for n in here if stop < self._sections.num_layers and "rmsnorm" in settings[n].layers[stop]]
        chosen = settings[(reads or here)[0]]
        self.cost.num_layer_evaluations += batch.num_rows * (stop - start)
        with self._switches.aligned(chosen.switches):
            return self._sections.run(batch, start, stop, state)

    def _heads(
        self, batch: Batch, here: Sequence[int], settings: Sequence[_Setting], normed: Any
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for head in (False, True):
            group = [n for n in here if settings[n].head == head]
            if group:
                with self._switches.aligned({"lm_head": None} if head else {}):
                    scored = self._sections.logprobs(batch, normed)
                for number in group:
                    yield number, scored

    def _noise(self, batch: Batch) -> AbstractContextManager[None]:
        from rpadiag.engines.noise import split_products

        return split_products(self._trainer.model, batch.splits) if batch.splits is not None else nullcontext()

    def _count(self, batch: Batch, asked: Sequence[Replicate]) -> None:
        rows, layers = len({row.key for row in batch.rows}), self._sections.num_layers
        references = sum(r.variant.design == "reference" for r in asked)
        self.cost.num_forwards += rows * len(asked)
        self.cost.num_layers_whole += rows * layers * len(asked)
        self.cost.num_layers_paired += rows * layers * 2 * (len(asked) - references)
        self._on_forward(rows * len(asked))


def _agree_until(here: Sequence[int], settings: Sequence[_Setting], start: int) -> int:
    """The first layer from ``start`` on in which the settings do not all agree; the number of layers where they do."""
    first = settings[here[0]].layers
    for layer in range(start, len(first)):
        if any(settings[n].layers[layer] != first[layer] for n in here):
            return layer
    return len(first)


def _blocks(replicates: Sequence[Replicate], size: int) -> Iterator[dict[int, list[Replicate]]]:
    """Index -> replicates under its noise, for indices that belong to one block of ``size`` and ask for the same variants."""
    by_draw: dict[tuple[str, int, int], list[Replicate]] = {}
    for replicate in replicates:
        by_draw.setdefault((replicate.kind, replicate.seed, replicate.index), []).append(replicate)
    alike: dict[tuple[str, int, tuple[Variant, ...]], dict[int, list[Replicate]]] = {}
    for (kind, seed, index), asked in by_draw.items():
        key = (kind, index // size, tuple(r.variant for r in asked))
        if index in alike.setdefault(key, {}):
            raise ValueError(f"replicate {index} of kind {kind} is asked for under two seeds, one of them {seed}")
        alike[key][index] = asked
    yield from alike.values()


def _ignore(_num: int) -> None:
    """Default ``on_forward``."""
