"""The trainer stack: a transformers causal language model, one unpadded sequence per forward, or rows of equal length."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from rpadiag.engines import checkpoint, digests, replay, scoring, stacked
from rpadiag.engines.base import ModelFacts, TokenScores
from rpadiag.engines.config_facts import config_facts
from rpadiag.engines.families import Family, family_for
from rpadiag.engines.noise import move_by_ulps
from rpadiag.engines.trainer_capture import OnSite, SiteReader
from rpadiag.errors import EngineError, InputError, UsageError


class TrainerEngine:
    """A transformers model with its site map. Make one with :meth:`load`, or around a model with :meth:`wrap`.

    The model is a plain ``nn.Module`` in evaluation mode that anyone may patch (``rpadiag.align`` does); the
    engine keeps no state of a forward and leaves no hook behind.
    """

    def __init__(self, model: nn.Module, family: Family, *, name: str, settings: dict[str, Any]) -> None:
        self.model = model
        self.family = family
        self.facts: ModelFacts = family.facts(model.config)
        self.name = name
        self._settings = settings

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        attention: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a directory or hub id, weights as stored and cast to ``dtype``. Safetensors only.

        attention: transformers' name of an implementation; ``auto`` is sdpa, or eager for a model that caps attention scores.
        Raises InputError for a checkpoint that is missing, half there, pickled, not finite or of an
        unsupported architecture, EngineError for a device that cannot be used.
        """
        name = os.fspath(model)
        if checkpoint.is_path(name):
            checkpoint.check_directory(Path(name))
        config = checkpoint.load_config(name, revision=revision, trust_remote_code=trust_remote_code)
        family = family_for(config.architectures)
        family.facts(config)
        attention = _attention(attention, config)
        loaded, unused = checkpoint.load_model(
            name,
            config,
            dtype=checkpoint.resolve_dtype(dtype, config),
            attention=attention,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        checkpoint.check_finite(loaded)
        try:
            loaded.to(device)
        except (RuntimeError, AssertionError) as error:
            raise EngineError(
                f"the trainer cannot use device {device!r}",
                detail=str(error).splitlines()[0],
                hint="rpadiag doctor lists the devices here; --device cpu always works",
            ) from error
        return cls(
            loaded,
            family,
            name=name,
            settings={
                "dtype": dtype,
                "device": device,
                "attention": attention,
                "revision": revision,
                "trust_remote_code": trust_remote_code,
                "unused_weights": list(unused),
            },
        )

    @classmethod
    def wrap(cls, model: nn.Module, *, name: str = "model") -> Self:
        """An engine around a transformers model that is already in memory (set to evaluation mode)."""
        config: Any = model.config
        family = family_for(config.architectures or [type(model).__name__])
        model.eval()
        return cls(model, family, name=name, settings={"wrapped": True})

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.model.parameters()).dtype

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded on first use."""
        return checkpoint.load_tokenizer(
            self.name,
            revision=self._settings.get("revision"),
            trust_remote_code=self._settings.get("trust_remote_code", False),
        )

    def manifest(self) -> dict[str, Any]:
        """Everything that decides this engine's bits, as JSON."""
        import transformers

        config: Any = self.model.config
        return {
            "stack": "trainer",
            "engine": "transformers",
            "model": self.name,
            "family": self.facts.family,
            "architecture": self.facts.architecture,
            "commit": getattr(config, "_commit_hash", None),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
            "attention": config._attn_implementation,
            "config": config_facts(config),
            "given": dict(self._settings),
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "numerics": {
                "num_threads": torch.get_num_threads(),
                "float32_matmul_precision": torch.get_float32_matmul_precision(),
                "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
                "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
                "onednn": torch.backends.mkldnn.is_available(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            },
        }

    def weight_digests(self) -> dict[str, str]:
        """Digest of every checkpoint tensor, as the model holds it; a tied head is listed once, as the embedding."""
        return digests.weight_digests(stacked.checkpoint_tensors(self.model.named_parameters()))

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        sites: Sequence[str] = (),
        on_site: OnSite | None = None,
        positions: Sequence[int] | None = None,
        temperature: float = 1.0,
    ) -> TokenScores:
        """Score one sequence; ``on_site(site, tensor [T, W])`` is called for each requested site on the way.

        temperature: the scores are of logits divided by it; the site ``logits`` is not divided. A tensor is valid during its
        call only. ``logprob`` is [T-1, 1]: row t is token t+1. Raises CaptureError for
        a site that never fired; whatever the forward or ``on_site`` raises, hooks and registry are as before.
        """
        reader = SiteReader(self.model, self.family, self.facts, sites, on_site or _ignore)
        with reader.attached():
            logits = self._logits([token_ids], positions=positions)[0]
        seen = None if reader.positions is None else reader.positions.numpy()
        scores = scoring.score_logits(logits, token_ids, positions=seen, temperature=temperature)
        if "logprob" in sites and on_site is not None:
            on_site("logprob", torch.from_numpy(scores.logprob)[:, None])
        return scores

    def visit_batch(self, sequences: Sequence[Sequence[int]], *, sites: Sequence[str], on_site: OnSite) -> None:
        """Run sequences of equal length as one batch for what they make at sites: ``on_site(site, tensor [B * T, W])``, row after row.

        Nothing is scored, and the head runs for the site ``logits`` only. Errors are those of :meth:`forward`.
        """
        for ids in sequences:
            self._check_tokens(ids)
        embed = self.family.trainer["embed"].module
        called = self.model if "logits" in sites else self.model.get_submodule(embed.rpartition(".")[0])
        given = torch.as_tensor([list(ids) for ids in sequences], dtype=torch.int64, device=self.device)
        reader = SiteReader(self.model, self.family, self.facts, sites, on_site)
        with reader.attached(), torch.no_grad(), _evaluation(self.model):
            called(input_ids=given, use_cache=False)

    def forward_padded(self, sequences: Sequence[Sequence[int]]) -> list[TokenScores]:
        """Score several sequences in one right-padded batch: the trainer against itself, as a noise floor."""
        logits = self._logits(sequences)
        return [scoring.score_logits(row[: len(ids)], ids) for row, ids in zip(logits, sequences, strict=True)]

    def forward_with_embedding_offset(self, token_ids: Sequence[int], ulp_offsets: torch.Tensor) -> TokenScores:
        """Score one sequence with each element of the embedding output moved by so many ULP.

        ulp_offsets: int8 [T, hidden], on the ordered line of the dtype (+1 is the next larger value).
        """
        expected = (len(token_ids), self.facts.hidden_size)
        if tuple(ulp_offsets.shape) != expected:
            raise InputError(f"embedding offsets have shape {tuple(ulp_offsets.shape)}, the embedding {expected}")

        def move(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return move_by_ulps(output, ulp_offsets.to(output.device)[None])

        handle = self.model.get_submodule(self.family.trainer["embed"].module).register_forward_hook(move)
        try:
            return scoring.score_logits(self._logits([token_ids])[0], token_ids)
        finally:
            handle.remove()

    def replay(
        self,
        site: str,
        inputs: Sequence[torch.Tensor],
        *,
        positions: Sequence[int] | torch.Tensor | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The trainer's own operation behind ``site``, fed ``inputs`` (each [T, W]): :func:`replay.replay`."""
        return replay.replay(
            self.model, self.family, self.facts, site, inputs, positions=positions, token_ids=token_ids
        )

    def reads(self, site: str) -> tuple[str, ...]:
        """The sites whose tensors :meth:`replay` of ``site`` takes, in order, as the model is patched now."""
        return replay.reads_of(self.model, self.family, self.facts, site)

    def _logits(self, sequences: Sequence[Sequence[int]], *, positions: Sequence[int] | None = None) -> torch.Tensor:
        """[B, T, V] of a right-padded batch; a single sequence is neither padded nor masked."""
        for ids in sequences:
            self._check_tokens(ids)
        longest = max(len(ids) for ids in sequences)
        padded = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, ids in enumerate(sequences):
            padded[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
            mask[row, : len(ids)] = 1
        arguments: dict[str, Any] = {"input_ids": padded.to(self.device), "use_cache": False}
        if len(sequences) > 1:
            arguments["attention_mask"] = mask.to(self.device)
        if positions is not None:
            arguments["position_ids"] = torch.as_tensor(positions, dtype=torch.int64, device=self.device)[None]
        with torch.no_grad(), _evaluation(self.model):
            logits: torch.Tensor = self.model(**arguments).logits
        return logits

    def _check_tokens(self, ids: Sequence[int]) -> None:
        if len(ids) < 2:
            raise InputError(f"a sequence of {len(ids)} tokens has nothing to score", hint="give at least 2 tokens")
        if len(ids) > self.facts.max_positions:
            raise InputError(f"{len(ids)} tokens are past the model's length of {self.facts.max_positions}")
        for token in ids:
            if not 0 <= token < self.facts.vocab_size:
                raise InputError(f"token id {token} is outside the vocabulary of {self.facts.vocab_size}")


def _attention(attention: str, config: Any) -> str:
    """The implementation that ``auto`` stands for; one that would leave out a part of the model is a UsageError."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if attention == "auto":
        return "eager" if cap else "sdpa"
    if attention == "sdpa" and cap:
        raise UsageError(
            f"transformers' sdpa attention ignores attn_logit_softcapping={cap:g}, so it computes another function",
            detail="vLLM caps the attention scores; a trainer on sdpa trains a model that nobody samples from",
            hint="use --attention eager or flash_attention_2",
        )
    return attention


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while the block runs; a model left in training mode by its owner goes back to it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _ignore(_site: str, _tensor: torch.Tensor) -> None:
    """Default ``on_site``."""
