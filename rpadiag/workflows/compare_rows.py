"""Rows of ``prompts.parquet`` and ``tokens.parquet`` from one compared sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.prompts import Prompt


def prompt_row(prompt: Prompt, sequence: TokenSequence) -> dict[str, Any]:
    """One row of prompts.parquet."""
    return {
        "prompt": sequence.prompt,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "text": prompt.text or None,
        "token_ids": list(sequence.token_ids),
    }


def token_columns(
    sequence: TokenSequence, ours: Any, theirs: Any, texts: Sequence[str] | None, rescored: Any = None
) -> dict[str, Any]:
    """Columns of tokens.parquet: entry i is token i + 1 of the sequence.

    ours, theirs: :class:`rpadiag.engines.base.TokenScores`, or like it with None for what was not recorded. texts: of every token.
    rescored: the rollout's scores of the same tokens as prompts.
    """
    ids = np.asarray(sequence.token_ids[1:], dtype=np.int32)
    position = np.arange(1, len(ids) + 1, dtype=np.int32)
    nothing = [None] * len(ids)
    scores = {
        f"{prefix}{suffix}": nothing if getattr(stack, name) is None else getattr(stack, name)
        for name, suffix in (("logprob", ""), ("entropy", "_entropy"), ("rank", "_rank"), ("argmax", "_argmax"))
        for prefix, stack in (("p", ours), ("q", theirs))
    }
    return {
        "prompt": np.full(len(ids), sequence.prompt, dtype=np.int32),
        "position": position,
        "token": ids,
        "text": nothing if texts is None else list(texts[1:]),
        "source": np.where(position >= sequence.num_prompt_tokens, "decode", "prefill").tolist(),
        **scores,
        "q_rescored": nothing if rescored is None else rescored.logprob,
    }
