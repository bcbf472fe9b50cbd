"""Digest of a weight tensor: the proof that two stacks loaded the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from rpadiag.errors import NotComparableError


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


def combined_digest(digests: dict[str, str]) -> str:
    """One digest of a whole model, independent of the order of its tensors."""
    joined = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()


def check_same_weights(trainer: dict[str, str], rollout: dict[str, str]) -> None:
    """Raise NotComparableError, naming tensors, unless both sides hold the same tensors with the same bits."""
    lacking = sorted(set(trainer) ^ set(rollout))
    if lacking:
        name = lacking[0]
        raise NotComparableError(
            f"weight {name} is only on the {'trainer' if name in trainer else 'rollout'} side",
            detail=f"{len(lacking)} of {len(set(trainer) | set(rollout))} tensors are on one side only",
        )
    different = [name for name in trainer if trainer[name] != rollout[name]]
    if different:
        name = different[0]
        raise NotComparableError(
            f"weight {name} differs between the stacks",
            detail=(
                f"trainer digest {trainer[name]}, rollout digest {rollout[name]}; "
                f"{len(different)} of {len(trainer)} tensors differ"
            ),
            hint="load both stacks from the same checkpoint and revision, in the same dtype",
        )
