"""Noise floors: how far each stack is from itself when only its batching changes.

A gap between the stacks means nothing below these. They are measured on the same tokens, up to a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rpadiag.compare.metrics import logprob_metrics
from rpadiag.workflows.inputs import Inputs
from rpadiag.workflows.progress import Progress
from rpadiag.workflows.rollout import Rollout
from rpadiag.workflows.scored import Scored

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence

FLOOR_TOKENS = 2048  # enough for a mean to a few per cent; a floor is a level, not a test
Logprobs = npt.NDArray[np.float32]
MIN_SEQUENCES = 2  # one sequence has nothing to be batched with


def measure_floors(inputs: Inputs, rollout: Rollout, scored: Scored, progress: Progress) -> list[dict[str, Any]]:
    """Rows of metrics.json's ``floors``: each stack alone against in a batch, and the rollout's decoding against its prefill."""
    sequences, trainer_scores, rollout_scores = scored.sequences, scored.trainer, scored.rollout
    used = within_budget(sequences, FLOOR_TOKENS)
    out: list[dict[str, Any]] = []
    with progress.stage("noise floors", total=3) as bar:
        if len(used) >= MIN_SEQUENCES:
            padded = inputs.trainer.forward_padded([sequences[i].token_ids for i in used])
            alone = [trainer_scores[i].logprob for i in used]
            text = "alone against in a padded batch"
            out.append(_floor("trainer_padded", "trainer", text, alone, [s.logprob for s in padded]))
        bar.advance()
        prompted = [i for i in used if sequences[i].num_prompt_tokens > 1]
        if len(prompted) >= MIN_SEQUENCES:
            prompts = [_prompt_only(sequences[i]) for i in prompted]
            together = rollout.engine.score(prompts, sites=(), bundle_dir=None, together=True)
            heads = [rollout_scores[i].logprob[: sequences[i].num_prompt_tokens - 1] for i in prompted]
            batched = [r.scores.logprob for r in together]
            out.append(_floor("rollout_batched", "rollout", "alone against in a batch", heads, batched))
        bar.advance()
        generated = [i for i in range(len(sequences)) if len(sequences[i].token_ids) > sequences[i].num_prompt_tokens]
        for name, text, others in (
            ("rollout_decode_batched", "sampled in a batch against decoded alone", scored.decoded),
            ("rollout_rescored", "sampled against rescored as a prompt", scored.rescored),
        ):
            if generated and others:
                starts = [sequences[i].num_prompt_tokens - 1 for i in generated]
                pairs = (
                    [s[i].logprob[n:] for i, n in zip(generated, starts, strict=True)] for s in (rollout_scores, others)
                )
                out.append(_floor(name, "rollout", text, *pairs))
        bar.advance()
    return out


def within_budget(sequences: Sequence[TokenSequence], budget: int) -> list[int]:
    """Indices of the first sequences whose tokens fit the budget; at least the first two are kept."""
    used: list[int] = []
    total = 0
    for index, sequence in enumerate(sequences):
        total += len(sequence.token_ids)
        if total > budget and len(used) >= MIN_SEQUENCES:
            break
        used.append(index)
    return used


def _prompt_only(sequence: TokenSequence) -> TokenSequence:
    from rpadiag.engines.base import TokenSequence

    ids = sequence.token_ids[: sequence.num_prompt_tokens]
    return TokenSequence(prompt=sequence.prompt, token_ids=ids, num_prompt_tokens=len(ids))


def _floor(name: str, stack: str, text: str, a: Sequence[Logprobs], b: Sequence[Logprobs]) -> dict[str, Any]:
    one, two = np.concatenate(a), np.concatenate(b)
    ids = np.concatenate([np.full(len(x), i) for i, x in enumerate(a)])
    metrics = logprob_metrics(one, two, sequence_ids=ids)
    keys = ("mean_abs_d", "max_abs_d", "k3_kl", "exact_share", "num_tokens")
    return {"name": name, "stack": stack, "text": text, **{k: metrics[k] for k in keys}}
