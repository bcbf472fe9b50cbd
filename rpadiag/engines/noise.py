"""Rounding-level noise that makes replicates of a trainer's forward: seeded, and without a mean.

========= ==========================================================================================================
kind      what is drawn from (seed, number of the sequence)
========= ==========================================================================================================
ulp       each element of the embedding output moved by -1, 0 or +1 ULP
order     where the sum over the inner dimension of every output and down projection is cut in two, as split-K kernels do
batch     an equivalent batch: other rows beside the sequence, padding to its left, positions as before
none      nothing
========= ==========================================================================================================

``ulp`` perturbs values, ``order`` and ``batch`` perturb nothing: the same sums are added in another order. So one kind confirms
another. ``batch`` makes noise only where kernels depend on their batch; on most CPUs they do not, and a bisection says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rpadiag.engines.replay import replaced
from rpadiag.errors import unknown_name

SPLIT_NAMES = ("o_proj", "down_proj")  # never merged with others, so that the matmul switch does not touch them
STAYS = 2  # a draw that moves nothing
MAX_PADDING = 15
MAX_MATES = 7


def ulp_draws(num_tokens: int, width: int, *, seed: int, number: int) -> np.ndarray:
    """int8 [num_tokens, width] in 0 .. 5, the same on every machine: see :func:`ulp_offsets`."""
    return np.random.default_rng([seed, number]).integers(0, 6, size=(num_tokens, width), dtype=np.int8)


def ulp_offsets(tensor: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """ULP offsets of each element (-1, 0, +1, each with probability 1/3) whose expected move is exactly zero.

    At a power of two the step away from zero is twice the step toward it; there the step away is half as likely (draws
    0 and 5 give none), which makes the mean zero: 2s/6 - s/3. Zeros and subnormals have equal steps already.
    """
    raw, mantissa_bits = {torch.float32: (torch.int32, 23), torch.float16: (torch.int16, 10)}.get(
        tensor.dtype, (torch.int16, 7)
    )
    bits = tensor.contiguous().view(raw).to(torch.int32) & torch.iinfo(raw).max
    power = ((bits & ((1 << mantissa_bits) - 1)) == 0) & (bits >= 2 << mantissa_bits)
    offsets = torch.div(draws.to(torch.int8), 2, rounding_mode="floor") - 1
    upwards = torch.where(tensor < 0, -offsets, offsets) > 0  # away from zero
    spared = power & upwards & ((draws == 0) | (draws == 5))
    return torch.where(spared, 0, offsets)


def move_by_ulps(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each element moved along the ordered line of its dtype; moves never leave the finite range, and values that are
    not finite stay.

    The line counts values in increasing order with +0 and -0 in one place.
    """
    integers = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
    if tensor.dtype not in integers:
        raise unknown_name("dtype", str(tensor.dtype), [str(d) for d in integers])
    raw = integers[tensor.dtype]
    largest = int(torch.tensor(torch.finfo(tensor.dtype).max, dtype=tensor.dtype).view(raw))
    bits = tensor.contiguous().view(raw).to(torch.int64)
    magnitude = bits & torch.iinfo(raw).max
    line = torch.where(bits < 0, -magnitude, magnitude) + offsets.to(torch.int64)
    line = line.clamp(-largest, largest)
    back = torch.where(line < 0, torch.iinfo(raw).min - line, line).to(raw).view(tensor.dtype)
    return torch.where((offsets == 0) | ~torch.isfinite(tensor), tensor, back)


def moved(hidden: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Embedding output ``[..., T, H]`` with each element moved by its draw, int8 of the same shape."""
    return move_by_ulps(hidden, ulp_offsets(hidden, draws))


@contextlib.contextmanager
def noisy_embedding(embedding: nn.Module, num_tokens: int, *, seed: int, number: int) -> Iterator[None]:
    """An engine's packed embedding output ``[T, H]`` moved by the draws of one sequence while the block runs.

    The sequence must be fed in one step. Rows beyond it (padding of the engine's, or a token generated after it) stay.
    """
    fed = 0

    def move(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal fed
        first, fed = fed, fed + len(output)
        if first:
            return output
        draws = np.full(tuple(output.shape), STAYS, dtype=np.int8)
        draws[:num_tokens] = ulp_draws(num_tokens, output.shape[-1], seed=seed, number=number)
        return moved(output, torch.from_numpy(draws).to(output.device))

    handle = embedding.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def split_points(num_inner: int, *, seed: int, number: int, module: int) -> int:
    """Where the inner dimension of one product is cut: in the middle half of it."""
    rng = np.random.default_rng([seed, number, module])
    return int(rng.integers(num_inner // 4, num_inner - num_inner // 4))


@contextlib.contextmanager
def split_products(model: nn.Module, rows: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Every output and down projection as the FP32 sum of two FP32 products while the block runs, rounded once.

    rows: (seed, number of the sequence) of each row of the batch; each row is cut elsewhere. Holds FP32 copies of these weights.
    """
    forwards: dict[nn.Module, Any] = {}
    linears = [m for n, m in model.named_modules() if n.endswith(SPLIT_NAMES) and isinstance(m, nn.Linear)]
    for index, module in enumerate(linears):
        cuts = [split_points(module.in_features, seed=s, number=n, module=index) for s, n in rows]
        forwards[module] = _split(module, cuts)
    with replaced(forwards):
        yield


def _split(module: nn.Linear, cuts: Sequence[int]) -> Any:
    weight = module.weight.detach().to(torch.float32)
    bias = None if module.bias is None else module.bias.detach().to(torch.float32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide, out = x.to(torch.float32), []
        for row, cut in zip(wide, cuts, strict=True):
            left = nn.functional.linear(row[:, :cut], weight[:, :cut], bias)
            out.append(left + nn.functional.linear(row[:, cut:], weight[:, cut:]))
        return torch.stack(out).to(x.dtype)

    return forward


def equivalent_batch(
    token_ids: Sequence[int], *, seed: int, number: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """A batch that holds a sequence in row 0 and other tokens beside and to the left of it.

    Returns (input_ids int64 [B, P + T], attention_mask int64 [B, P + T], position_ids int64 [B, P + T], P): P padding
    tokens on the left of every row, positions of the sequence 0 .. T-1 as when it is alone.
    """
    rng = np.random.default_rng([seed, number])
    padding, mates = int(rng.integers(1, MAX_PADDING + 1)), int(rng.integers(1, MAX_MATES + 1))
    length = len(token_ids)
    ids = np.zeros((mates + 1, padding + length), dtype=np.int64)
    ids[0, padding:] = token_ids
    ids[1:, padding:] = rng.integers(0, vocab_size, size=(mates, length))
    mask = np.ones_like(ids)
    mask[:, :padding] = 0
    positions = np.tile(np.maximum(np.arange(padding + length) - padding, 0), (mates + 1, 1))
    return ids, mask, positions, padding
