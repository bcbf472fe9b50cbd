"""From logits to token scores, a block of rows at a time.

The arithmetic is the one trainers and vLLM share: logits to float32, log-softmax in float32, pick the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rpadiag.engines.base import TokenScores

BLOCK_ROWS = 256  # 50 MB of float32 at a vocabulary of 49,152, 156 MB at 152,064


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [T-1, 1]: log-probability of token t+1 given logits row t, from logits [T, V]."""
    targets = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)[1:, None]
    rows = targets.shape[0]
    out = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    for start in range(0, rows, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, rows))
        logprobs = torch.log_softmax(logits[block].float(), dim=-1)
        out[block] = logprobs.gather(1, targets[block])
    return out


def score_logits(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    *,
    positions: npt.NDArray[np.int64] | None = None,
    temperature: float = 1.0,
) -> TokenScores:
    """Scores of tokens 1 .. T-1 from logits [T, V] of any float dtype; row T-1 is not read.

    temperature: float32 logits are divided by it, as samplers and trainers do before their log-softmax.
    """
    targets = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)[1:, None]
    rows = targets.shape[0]
    columns: list[list[torch.Tensor]] = [[], [], [], []]
    for start in range(0, rows, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, rows))
        scaled = logits[block].float()
        logprobs = torch.log_softmax(scaled if temperature == 1 else scaled / temperature, dim=-1)
        chosen = logprobs.gather(1, targets[block])
        # masked_fill: exp(-inf) * -inf would be NaN where a vocabulary is padded with -inf
        entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
        rank = (logprobs >= chosen).sum(-1)
        for column, values in zip(columns, (chosen[:, 0], entropy, rank, logprobs.argmax(-1)), strict=True):
            column.append(values.cpu())
    joined = [np.concatenate([part.numpy() for part in column]) if column else np.empty(0) for column in columns]
    return TokenScores(
        logprob=joined[0].astype(np.float32),
        entropy=joined[1].astype(np.float32),
        rank=joined[2].astype(np.int32),
        argmax=joined[3].astype(np.int32),
        positions=positions,
    )
