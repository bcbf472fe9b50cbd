"""Digest of a weight tensor: the proof that two stacks loaded the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """blake2b (16 bytes, hex) over dtype name, shape and bytes in row-major order, wherever the tensor lives."""
    data = tensor.detach().contiguous().cpu()
    digest = hashlib.blake2b(digest_size=16)
    digest.update(str(data.dtype).removeprefix("torch.").encode())
    digest.update(repr(tuple(data.shape)).encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weight_digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest of each named tensor."""
    return {name: tensor_digest(tensor) for name, tensor in tensors}
