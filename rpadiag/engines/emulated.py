"""An emulated rollout stack: a transformers forward with the rounding contracts of a vLLM build.

For machines without vLLM, and for questions about builds that are not at hand. It shares vLLM's contracts in the
regions that ``align`` knows and nothing else: matrix products, attention and packing are the trainer's own, so its
distance from the trainer is what those regions make, and its manifest says ``emulated``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from rpadiag.engines.base import ModelFacts, TokenScores, TokenSequence, check_scoring
from rpadiag.engines.bundle_writer import BundleWriter
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import RolloutResult
from rpadiag.errors import UsageError
from rpadiag.regions.align import Alignment, align


class EmulatedEngine:
    """A rollout engine without a rollout engine. Use as a context manager, or call :meth:`close`."""

    def __init__(self, trainer: TrainerEngine, *, preset: str, seed: int, load: dict[str, Any]) -> None:
        self._trainer = trainer
        self._preset = preset
        self._seed = seed
        self._load = load
        self._alignment: Alignment = align(trainer.model, contract=preset)

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        preset: str = "vllm-cpu",
        dtype: str = "bfloat16",
        device: str = "cpu",
        attention: str = "sdpa",
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a second copy of the model and align it. Errors: those of TrainerEngine.load and of ``align``."""
        load: dict[str, Any] = {
            "model": model,
            "device": device,
            "attention": attention,
            "revision": revision,
            "trust_remote_code": trust_remote_code,
        }
        return cls(TrainerEngine.load(**load, dtype=dtype), preset=preset, seed=seed, load=load)

    def reload(self, *, dtype: str) -> None:
        """Load the same model in another dtype under the same preset."""
        self.close()
        self._trainer = TrainerEngine.load(**self._load, dtype=dtype)
        self._alignment = align(self._trainer.model, contract=self._preset)

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model that is loaded."""
        return self._trainer.facts

    def manifest(self) -> dict[str, Any]:
        """What this emulation is made of, as JSON."""
        return {
            **self._trainer.manifest(),
            "engine": "emulated",
            "stack": "rollout",
            "emulated": True,
            "preset": self._preset,
            "alignment": self._alignment.to_dict(),
            "seed": self._seed,
            "not_emulated": ["matmul", "attention", "lm_head", "batching"],
        }

    def weight_digests(self) -> dict[str, str]:
        """Digest per checkpoint tensor, as the trainer's."""
        return self._trainer.weight_digests()

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
        """As :meth:`rpadiag.engines.vllm.VllmEngine.score`; generated tokens are scored in one forward, not as sampled.

        decode: makes no difference, for that reason.
        together: a right-padded batch, which cannot capture sites.
        """
        if together and (sites or num_generate):
            raise UsageError("an emulated batch captures no sites and generates no tokens", hint="score one by one")
        check_scoring(
            self.facts, sequences, sites=sites, num_generate=num_generate, max_tokens=self.facts.max_positions
        )
        if together:
            return self._score_together(sequences, bundle_dir, on_finished)
        results = []
        with self._bundle(bundle_dir) as writer:
            for index, given in enumerate(sequences):
                seeded = (self._seed if seed is None else seed) + index
                sequence = self._extended(given, num_generate, temperature, top_p, seeded) if num_generate else given
                if writer is not None:
                    writer.begin(index)
                scores = self._trainer.forward(
                    sequence.token_ids,
                    sites=sites if writer is not None else (),
                    on_site=writer.append if writer else None,
                )
                results.append(_result(sequence, scores))
                self._finish(index, results[-1], writer, on_finished)
        return results

    def close(self) -> None:
        """Undo the alignment."""
        self._alignment.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _bundle(self, directory: str | Path | None) -> Iterator[BundleWriter | None]:
        if directory is None:
            yield None
            return
        with BundleWriter(directory, self.manifest()) as writer:
            yield writer

    def _finish(
        self,
        index: int,
        result: RolloutResult,
        writer: BundleWriter | None,
        on_finished: Callable[[int], None] | None,
    ) -> None:
        if writer is not None:
            writer.end(
                index,
                token_ids=result.sequence.token_ids,
                num_prompt_tokens=result.sequence.num_prompt_tokens,
                prompt=result.sequence.prompt,
                positions=result.positions,
                scores=result.scores,
            )
        if on_finished is not None:
            on_finished(index)

    def _score_together(
        self,
        sequences: Sequence[TokenSequence],
        bundle_dir: str | Path | None,
        on_finished: Callable[[int], None] | None,
    ) -> list[RolloutResult]:
        scored = self._trainer.forward_padded([s.token_ids for s in sequences]) if sequences else []
        results = [_result(sequence, scores) for sequence, scores in zip(sequences, scored, strict=True)]
        with self._bundle(bundle_dir) as writer:
            for index, result in enumerate(results):
                if writer is not None:
                    writer.begin(index)
                self._finish(index, result, writer, on_finished)
        return results

    def _extended(
        self, given: TokenSequence, num_generate: int, temperature: float, top_p: float, seed: int
    ) -> TokenSequence:
        """The sequence with ``num_generate`` sampled tokens (the most likely ones at temperature 0)."""
        ids = list(given.token_ids)
        generator = torch.Generator().manual_seed(seed)
        cache: Any = None
        feed = ids
        with torch.no_grad():
            for _ in range(num_generate):
                fed = torch.tensor([feed], device=self._trainer.device)
                out = self._trainer.model(input_ids=fed, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits = out.logits[0, -1].float().cpu()
                if temperature == 0:
                    token = int(logits.argmax())
                else:
                    chances = _nucleus(torch.softmax(logits / temperature, -1), top_p)
                    token = int(torch.multinomial(chances, 1, generator=generator))
                ids.append(token)
                feed = [token]
        return TokenSequence(prompt=given.prompt, token_ids=tuple(ids), num_prompt_tokens=len(given.token_ids))


def _nucleus(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [V] with those outside the smallest set that holds ``top_p`` set to 0; not normalised."""
    if top_p >= 1.0:
        return chances
    ordered, order = chances.sort(descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return chances.masked_fill(outside[order.argsort()], 0.0)


def _result(sequence: TokenSequence, scores: TokenScores) -> RolloutResult:
    positions = scores.positions
    if positions is None:
        positions = np.arange(len(sequence.token_ids), dtype=np.int64)
    return RolloutResult(sequence=sequence, scores=scores, positions=positions)
