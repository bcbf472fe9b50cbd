"""Rows of ``prompts.parquet`` and ``tokens.parquet`` from one compared sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenScores, TokenSequence
    from rpadiag.prompts import Prompt


def prompt_row(prompt: Prompt, sequence: TokenSequence) -> dict[str, Any]:
    """One row of prompts.parquet."""
    return {
        "prompt": sequence.prompt,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "text": prompt.text or None,
        "token_ids": list(sequence.token_ids),
    }


def token_columns(sequence: TokenSequence, ours: TokenScores, theirs: TokenScores, tokenizer: Any) -> dict[str, Any]:
    """Columns of tokens.parquet: entry i is token i + 1 of the sequence."""
    ids = np.asarray(sequence.token_ids[1:], dtype=np.int32)
    position = np.arange(1, len(ids) + 1, dtype=np.int32)
    return {
        "prompt": np.full(len(ids), sequence.prompt, dtype=np.int32),
        "position": position,
        "token": ids,
        "text": [tokenizer.decode([int(i)]) if tokenizer is not None else None for i in ids],
        "source": np.where(position >= sequence.num_prompt_tokens, "decode", "prefill").tolist(),
        "p": ours.logprob,
        "q": theirs.logprob,
        "p_entropy": ours.entropy,
        "q_entropy": theirs.entropy,
        "p_rank": ours.rank,
        "q_rank": theirs.rank,
        "p_argmax": ours.argmax,
        "q_argmax": theirs.argmax,
    }
