"""What compare, bisect and fingerprint do first: resolve the model, load the trainer, read the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError
from rpadiag.workflows.options import ModelOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.smollm2 import check_model_named, resolve_model

if TYPE_CHECKING:
    from rpadiag.engines.base import ModelFacts, TokenSequence
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """A model by its directory or hub id, and the prompts as token sequences of it."""

    model: str
    device: str
    dtype: str
    prompts: Sequence[Prompt]
    sequences: tuple[TokenSequence, ...]


@dataclass(frozen=True, kw_only=True)
class Inputs(Prompted):
    """A loaded trainer and the prompts as token sequences."""

    trainer: TrainerEngine

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, None where it has none (prompts were given as token ids)."""
        try:
            return self.trainer.tokenizer
        except InputError:
            return None

    def texts(self, sequence: TokenSequence) -> list[str] | None:
        """The text of each token of a sequence; None without a tokenizer."""
        return token_texts(self.tokenizer, sequence.token_ids)

    @property
    def facts(self) -> ModelFacts:
        return self.trainer.facts


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str] | None:
    """The text of each token; None without a tokenizer."""
    return None if tokenizer is None else [tokenizer.decode([int(i)]) for i in token_ids]


def resolve_device(device: str) -> str:
    """``auto`` is cuda where there is one; anything else is taken as given."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_model(options: ModelOptions, progress: Progress = SILENT) -> None:
    """What can be known of the model argument without loading it: called before a run directory is made."""
    check_model_named(options.model, revision=options.revision, progress=progress)


def load_trainer(options: ModelOptions, *, model: str, device: str, dtype: str, attention: str) -> TrainerEngine:
    """The trainer engine of these options, in ``dtype``: cut over ranks where they say so."""
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.workflows.sharding import ranks_now

    ranks, shard = ranks_now(), getattr(options, "shard", "prompts")
    if ranks is not None and shard != "prompts":
        from rpadiag.engines.sharded import ShardedTrainer

        return ShardedTrainer.over(
            ranks, shard, model, dtype=dtype, attention=attention, revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    return TrainerEngine.load(
        model,
        dtype=dtype,
        device=device,
        attention=attention,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def load_inputs(options: ModelOptions, progress: Progress, *, attention: str = "auto", num_generate: int = 0) -> Inputs:
    """Load the trainer and read the prompts; every user mistake in them is an error before the long work."""
    model = resolve_model(options.model, progress)
    device = resolve_device(options.device)
    with progress.stage("load trainer"):
        trainer = load_trainer(options, model=model, device=device, dtype=options.dtype, attention=attention)
    prompts, sequences = read_prompts(options, trainer.facts, lambda: trainer.tokenizer, num_generate=num_generate)
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    return Inputs(model=model, device=device, dtype=dtype, trainer=trainer, prompts=prompts, sequences=sequences)


def read_prompts(
    options: ModelOptions, facts: ModelFacts, tokenizer: Callable[[], Any], *, num_generate: int
) -> tuple[list[Prompt], tuple[TokenSequence, ...]]:
    """The prompts of a file, and their tokens for a model with these facts. tokenizer: called only where text is given."""
    from rpadiag.engines.base import TokenSequence
    from rpadiag.prompts import load_prompts

    prompts = load_prompts(
        Path(options.prompts),
        tokenizer,
        max_tokens=options.max_tokens,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        reserve=num_generate,
        min_tokens=1 if num_generate else 2,
    )
    return prompts, tuple(
        TokenSequence(prompt=p.index, token_ids=tuple(p.token_ids), num_prompt_tokens=len(p.token_ids)) for p in prompts
    )
