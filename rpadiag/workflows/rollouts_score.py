"""Trainer log-probabilities for recorded rollouts that have none: the trainer engine on the recorded token ids.

One unpadded sequence a forward, as ``rpadiag compare`` runs it, a batch of records at a time: memory does not grow with
the file. Shape legend: M scored tokens of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.errors import InputError
from rpadiag.findings import Finding
from rpadiag.workflows.alignment import align_trainer
from rpadiag.workflows.inputs import resolve_device
from rpadiag.workflows.options import ScoringOptions
from rpadiag.workflows.progress import Progress, Stage
from rpadiag.workflows.smollm2 import check_model_named, resolve_model

if TYPE_CHECKING:
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.rollouts.batch import Batch
    from rpadiag.runs import RunWriter

SAME_TRAINER = 0.25  # nats, mean |recorded - scored|: rounding makes less, other weights or another temperature more


@dataclass(kw_only=True)
class Scorer:
    """A loaded trainer. ``own_abs``, ``num_own``: sum of \\|recorded - scored\\| over tokens whose trainer logprob was recorded too."""

    trainer: TrainerEngine
    options: ScoringOptions
    own_abs: float = 0.0
    num_own: int = 0
    num_first: int = 0
    temperatures: set[float] = field(default_factory=set)
    _texts: dict[int, str] = field(default_factory=dict)

    def score(self, batch: Batch, stage: Stage | None = None) -> tuple[Batch, dict[str, Any]]:
        """(the batch with the trainer's p, further columns of its tokens for tokens.parquet).

        A token that is the first of its sequence has no log-probability in either stack; it is left out and counted in ``num_first``.
        Raises InputError for a sequence that the model cannot take, by its number.
        """
        own = batch.p
        batch = self._without_first(batch)
        num_tokens = len(batch.row)
        p = np.full(num_tokens, np.nan, np.float32)
        entropy, rank, argmax = np.empty_like(p), np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int32)
        temperatures = self._temperatures(batch)
        bounds = np.searchsorted(batch.row, np.arange(batch.num_sequences + 1))  # rows come in order
        for i in range(batch.num_sequences):
            here = slice(int(bounds[i]), int(bounds[i + 1]))
            if stage is not None:
                stage.advance()
            if here.start == here.stop:
                continue
            ids = batch.ids[batch.starts[i] : batch.starts[i + 1]].tolist()
            self._check(batch.first + i, ids)
            scores = self.trainer.forward(ids, temperature=float(temperatures[i]))
            at = batch.position[here] - 1
            p[here], entropy[here] = scores.logprob[at], scores.entropy[at]
            rank[here], argmax[here] = scores.rank[at], scores.argmax[at]
        if own is not None:
            assert batch.p is not None
            apart = np.abs(batch.p.astype(np.float64) - p)
            known = np.isfinite(apart)
            self.own_abs += float(apart[known].sum())
            self.num_own += int(known.sum())
        columns: dict[str, Any] = {"p_entropy": entropy, "p_rank": rank, "p_argmax": argmax}
        if self._tokenizer is not None:
            columns["text"] = [self._text(int(t)) for t in batch.token]
        return dataclasses.replace(batch, p=p), columns

    def prompt_text(self, batch: Batch, i: int) -> str | None:
        """The decoded prompt of sequence i of a batch; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(batch.prompt_ids(i).tolist()))

    def findings(self, faults: Sequence[Finding]) -> list[Finding]:
        """What scoring has to say beside the numbers; ``faults``: what was recognised in them."""
        return [f for f in (self._recorded(), self._first_tokens(), self._temperature(faults)) if f is not None]

    def _recorded(self) -> Finding | None:
        """What the file's own trainer log-probabilities say about the model that scored."""
        if not self.num_own:
            return None
        mean = self.own_abs / self.num_own
        far = mean > SAME_TRAINER
        tail = (
            "That is more than rounding: other weights, another temperature, or a column that is not what it says."
            if far
            else "That is what two forwards of the same weights differ by."
        )
        return Finding(
            code="recorded-trainer",
            severity="warning" if far else "info",
            text=f"The file's own trainer log-probabilities are {mean:.3g} nats (mean |d|, n = {self.num_own:,}) from those of {self.options.model}, which are used here. {tail}",
            numbers={"mean_abs_d": mean, "num_tokens": self.num_own},
            rank=20,
        )

    def _first_tokens(self) -> Finding | None:
        if not self.num_first:
            return None
        return Finding(
            code="first-token",
            severity="notice",
            text=f"{self.num_first:,} tokens are the first of their sequence and left out: nothing comes before them, so no model scores them.",
            numbers={"num_tokens": self.num_first},
            rank=45,
        )

    def _temperature(self, faults: Sequence[Finding]) -> Finding | None:
        """The temperature to score at, where the numbers say that it was another one."""
        solved = next((float(f.numbers["ratio"]) for f in faults if f.code == "temperature"), None)
        if solved is None or len(self.temperatures) != 1:
            return None
        (used,) = self.temperatures
        return Finding(
            code="scored-temperature",
            severity="notice",
            text=f"The tokens were scored at temperature {used:g}; --temperature {used / solved:.2f} would fit what the rollout recorded.",
            numbers={"scored": used, "solved": used / solved},
            rank=3,
        )

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return self.trainer.tokenizer
        except InputError:
            return None

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]

    def _without_first(self, batch: Batch) -> Batch:
        keep = batch.position > 0
        self.num_first += int(np.count_nonzero(~keep))
        if keep.all():
            return batch
        names = ("row", "position", "token", "q")
        kept = {n: getattr(batch, n)[keep] for n in names}
        return dataclasses.replace(batch, p=None if batch.p is None else batch.p[keep], **kept)

    def _temperatures(self, batch: Batch) -> np.ndarray:
        """Of each sequence: what was asked for, or what the file says; 0 (greedy) and none are scored at 1, as vLLM does."""
        if self.options.temperature is not None:
            found = np.full(batch.num_sequences, self.options.temperature)
        else:
            found = np.array(batch.scalars.get("temperature", np.ones(batch.num_sequences)), np.float64)
            found[~np.isfinite(found) | (found == 0)] = 1.0
        if (found < 0).any():
            i = int(np.flatnonzero(found < 0)[0])
            raise InputError(
                f"sequence {batch.first + i} was sampled at temperature {found[i]:g}, which is none",
                hint="correct the column, or give --temperature T",
            )
        self.temperatures.update(np.unique(found).tolist())
        return found

    def _check(self, number: int, ids: list[int]) -> None:
        facts = self.trainer.facts
        if len(ids) > facts.max_positions:
            raise InputError(
                f"sequence {number} has {len(ids)} tokens, {self.options.model} takes {facts.max_positions}",
                hint="score with the model that sampled them",
            )
        outside = [t for t in ids if not 0 <= t < facts.vocab_size]
        if outside:
            raise InputError(
                f"sequence {number} has token id {outside[0]}, the vocabulary of {self.options.model} has {facts.vocab_size}",
                detail="the tokens are of another model, or padding without a mask",
                hint="score with the model that sampled them, and keep the attention mask in the file",
            )


def check_scoring_model(options: ScoringOptions, progress: Progress) -> None:
    """What can be known of the model without loading it: called before a run directory is made."""

    check_model_named(options.model, revision=options.revision, progress=progress)


@contextmanager
def start_scoring(options: ScoringOptions, run: RunWriter | None, progress: Progress) -> Iterator[Scorer]:
    """The trainer, loaded, aligned where that is asked for, and recorded in the run with the digests of its weights."""
    from rpadiag.engines.trainer import TrainerEngine

    device = resolve_device(options.device)
    with progress.stage("load trainer"):
        trainer = TrainerEngine.load(
            resolve_model(options.model, progress),
            dtype=options.dtype,
            device=device,
            attention=options.attention,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    with ExitStack() as stack:
        aligned = None
        if options.align:
            aligned = align_trainer(trainer, options.align, options.contract, stack.enter_context)
        if run is not None:
            run.set_effective(device=device, dtype=str(trainer.dtype).removeprefix("torch."))
            if aligned is not None:
                run.set_effective(align=aligned["regions"], contract=aligned["contract"])
            run.set_manifest(trainer={**trainer.manifest(), "model": options.model, "aligned": aligned})
            run.set_weights("trainer", trainer.weight_digests())
        yield Scorer(trainer=trainer, options=options)
