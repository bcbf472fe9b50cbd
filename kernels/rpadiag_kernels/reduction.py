"""The order in which the kernels add, written in PyTorch. Shape legend: T tokens, H columns, P partials.

Float addition is not associative, so a sum is defined only with its order. The kernels' order depends on shape and
dtype alone, never on the device or on timing. ``tests/kernels/test_gpu_bits.py`` proves that these functions give
the kernels' bits; on the CPU the ops use PyTorch's own order, and the two differ by a few ULP of float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 32
ELEMENTS_PER_THREAD = 16
MAX_WARPS = 16
MIN_TILE = 1024
PAIRED_COLUMNS = 4096  # a forward over rows of this length takes two at once: 1 % faster there, slower elsewhere
MIN_PROGRAMS = 132  # of a kernel that reduces over tokens: fixed, so that bits do not depend on the GPU
WARPS_IN_FLIGHT = 8 * MIN_PROGRAMS
MIN_COLUMNS, MAX_COLUMNS = 1, 16384
STAGE_TWO_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a program covers rows of H columns: ``rows`` x ``columns`` (a power of two >= H), ``warps``."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, num_columns: int, *, forward: bool = False) -> Tile:
        columns = 1 << max(0, (num_columns - 1).bit_length())
        rows = 2 if forward and num_columns == PAIRED_COLUMNS else max(1, MIN_TILE // columns)
        warps = min(MAX_WARPS, max(1, rows * columns // (LANES * ELEMENTS_PER_THREAD)))
        return cls(rows=rows, columns=columns, warps=warps)

    def vector(self, num_columns: int, itemsize: int) -> int:
        """Neighbouring elements of one thread: 16 bytes of the loaded dtype, fewer in a tile too small for that; one
        when H is not a multiple of 16."""
        if num_columns % 16:
            return 1
        return min(16 // itemsize, self.rows * self.columns // (LANES * self.warps), self.columns)


def row_sum(x: Tensor, *, itemsize: int, forward: bool = False) -> Tensor:
    """Sum over the last axis of float32 ``x`` [T, H] in the kernels' order -> [T, 1].

    ``itemsize``: bytes of the dtype the kernel loads; ``forward``: in the tile of a forward. Columns are padded with
    zeros to a power of two. A thread adds its elements one after another (its vector, then the next repetition); lanes
    of a warp add in a butterfly 16, 8, 4, 2, 1; warps then do the same.
    """
    tile = Tile.of(x.shape[-1], forward=forward)
    vector = tile.vector(x.shape[-1], itemsize)
    lanes = min(LANES, tile.columns // vector)
    warps = min(tile.warps, tile.columns // (vector * lanes))
    padded = torch.nn.functional.pad(x, (0, tile.columns - x.shape[-1]))
    parts = padded.reshape(x.shape[0], -1, warps, lanes, vector)
    threads = torch.zeros_like(parts[:, 0, :, :, 0])
    first = True
    for rep in range(parts.shape[1]):
        for k in range(vector):
            threads = parts[:, rep, :, :, k] if first else threads + parts[:, rep, :, :, k]
            first = False
    return _halve(_halve(threads)).reshape(-1, 1)


def _halve(x: Tensor) -> Tensor:
    """Sum over the last axis (a power of two) by adding the upper half to the lower until one is left."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x.squeeze(-1)


def column_sum(terms: Tensor) -> Tensor:
    """Sum over tokens of float32 ``terms`` [T, H] in the kernels' order -> [H].

    Token t goes to partial t mod P; each partial adds its tokens in ascending order, then the partials are added.
    """
    num_tokens, num_columns = terms.shape
    partials = num_partials(num_columns)
    per_partial = -(-num_tokens // partials)
    padded = torch.nn.functional.pad(terms, (0, 0, 0, per_partial * partials - num_tokens))
    total = terms.new_zeros(partials, num_columns)
    for chunk in padded.reshape(per_partial, partials, num_columns):
        total = total + chunk
    return partial_sum(total)


def num_programs(num_columns: int) -> int:
    """Programs of a kernel that reduces over tokens: 132 wide ones, more where a row needs fewer warps."""
    return max(MIN_PROGRAMS, WARPS_IN_FLIGHT // Tile.of(num_columns).warps)


def num_partials(num_columns: int) -> int:
    """Partials of a sum over tokens: programs times rows of a tile."""
    return num_programs(num_columns) * Tile.of(num_columns).rows


def partial_sum(partials: Tensor) -> Tensor:
    """Second stage: 32 running sums over partials [P, H], padded with zeros, then added by halves -> [H]."""
    partials = torch.nn.functional.pad(partials, (0, 0, 0, -partials.shape[0] % STAGE_TWO_ROWS))
    total = torch.zeros_like(partials[:STAGE_TWO_ROWS])
    for chunk in partials.reshape(-1, STAGE_TWO_ROWS, partials.shape[1]):
        total = total + chunk
    return _halve(total.T.contiguous())
