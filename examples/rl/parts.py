"""Systematic and chaotic part of the mismatch of a round's tokens: replicates of both stacks.

A replicate moves every element of the embedding matrix by a random -1, 0 or +1 ULP, the same in trainer and engine, and scores the same
tokens in both; ``d`` is trainer minus engine. What survives averaging over replicates is systematic (rpadiag/attribution/estimate.py).
``rpadiag bisect`` moves the embedding's output, token by token, which needs a hook; a moved matrix needs none, so it works on compiled vLLM
and through CUDA graphs, and equal tokens of a replicate share a draw. The engine scores in prefill, where it sampled in decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from engine import prompt_logprobs, vllm_model

from rpadiag.attribution.estimate import estimate
from rpadiag.attribution.resample import Sequences
from rpadiag.engines.digests import tensor_digest
from rpadiag.engines.noise import moved, ulp_draws
from rpadiag.engines.vllm_weights import live_digests

EMBEDDING = "model.embed_tokens.weight"


def mismatch_parts(
    trainer: Any, batch: dict[str, torch.Tensor], *, num_replicates: int, num_sequences: int, seed: int
) -> dict[str, float]:
    """Columns of the table of steps. batch: what GRPOTrainer generated; prompts without padding. Weights are left as they were."""
    rows = slice(0, num_sequences)
    mask = batch["completion_mask"][rows].bool()
    prompt, completion = batch["prompt_ids"][rows], batch["completion_ids"][rows]
    sequences = [p.tolist() + c[m].tolist() for p, c, m in zip(prompt, completion, mask, strict=True)]
    num_prompt = prompt.shape[1]
    ids = torch.cat([prompt, completion], dim=1)
    attention = torch.cat([batch["prompt_mask"][rows], batch["completion_mask"][rows]], dim=1)
    ours, theirs = [], []
    for number in range(num_replicates):
        with _moved_embedding(trainer, seed=seed, number=number):
            with torch.no_grad():
                scored = trainer._get_per_token_logps_and_entropies(
                    trainer.model,
                    ids,
                    attention,
                    completion.shape[1],
                    batch_size=trainer.args.per_device_train_batch_size,
                )[0]
            ours.append(scored[mask].double().cpu().numpy())
            engine = prompt_logprobs(trainer.vllm_generation.llm, sequences)
            theirs.append(np.concatenate([np.asarray(row[num_prompt - 1 :]) for row in engine]))
    p, q = np.stack(ours), np.stack(theirs)
    finite = np.isfinite(p).all(axis=0) & np.isfinite(q).all(axis=0)
    labels = np.repeat(np.arange(len(sequences)), mask.sum(dim=1).cpu().numpy())[finite]
    if len(labels) < 2:
        return {}
    found = estimate(p[:, finite], q[:, finite], Sequences(labels))
    return {
        "systematic_sq": found.systematic_sq.value,
        "systematic_sq_se": found.systematic_sq.se,
        "mean_shift": found.mean_shift.value,
        "mean_shift_se": found.mean_shift.se,
        "chaotic_sq": float(found.sums["noise_sq"].sum() / found.sums["tokens"].sum()),
        "prefill_k3_kl": found.k3_kl.value,
    }


@contextmanager
def _moved_embedding(trainer: Any, *, seed: int, number: int) -> Iterator[None]:
    """Both stacks' embedding matrix moved by the same draws, by ULPs of the engine's dtype, while the block runs."""
    weight = trainer.model.get_input_embeddings().weight
    engine = vllm_model(trainer.vllm_generation.llm)
    before = weight.data.clone()
    stored = before.to(next(engine.parameters()).dtype)
    draws = torch.from_numpy(ulp_draws(*stored.shape, seed=seed, number=number)).to(stored.device)
    other = moved(stored, draws)
    try:
        weight.data.copy_(other)
        engine.load_weights([(EMBEDDING, other)])
        yield
    finally:
        weight.data.copy_(before)
        engine.load_weights([(EMBEDDING, stored)])


def weights_equal(trainer: Any) -> bool:
    """Whether every weight that can be read back from vLLM has the bits of the trainer's, rounded to vLLM's dtype."""
    engine = vllm_model(trainer.vllm_generation.llm)
    dtype = next(engine.parameters()).dtype
    ours = {name: p.data for name, p in trainer.model.named_parameters()}
    theirs = live_digests(engine, known=set(ours))
    return bool(theirs) and all(tensor_digest(ours[name].to(dtype)) == digest for name, digest in theirs.items())


def sequence_labels(mask: torch.Tensor) -> Sequence[int]:
    """Row number of each true element, in the order of ``tensor[mask]``."""
    return mask.nonzero()[:, 0].tolist()
