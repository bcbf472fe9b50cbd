"""The rollout engine's own attention inside a transformers forward.

Attention is a region that can be controlled, not aligned: no contract describes a kernel's accumulation order. Running the
rollout engine's own operator in the trainer takes attention out of a comparison, which is what full alignment needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rpadiag.engines.trainer_capture import attention_override

Attend = Callable[..., torch.Tensor]


@contextlib.contextmanager
def borrowed_attention(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Send the attention of ``model`` to ``attend(layer, q, k, v)`` while the block runs; one unpadded sequence at a time.

    attend: takes and returns [T, heads * head_dim] after RoPE, as :meth:`rpadiag.engines.vllm.VllmEngine.attention` gives it;
    mask, scale and window are the rollout engine's own. Proved by ``tests/engines/test_full_alignment.py``.
    """
    with attention_override(model, row_by_row(attend)):
        yield


def row_by_row(attend: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    """An operator on one unpadded sequence as an attention function: called for each row of the batch."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        # [B, H, T, D] and [B, KV, T, D] -> [T, heads * D] of each row
        num_tokens = query.shape[2]
        rows = []
        for row in range(len(query)):
            flat = [x[row].transpose(0, 1).reshape(num_tokens, -1) for x in (query, key, value)]
            rows.append(attend(module.layer_idx, *flat).to(query.device))
        return torch.stack(rows).view(len(query), num_tokens, query.shape[1], query.shape[3]), None

    return attention
