"""Carrying what a residual add rounded away to the norm that reads the sum.

A contract with ``sum=fp32`` or ``variance=unrounded`` normalises the sum before it was rounded. In a transformers
model the add and the norm are apart, often in two decoder layers, and only the rounded sum is handed on. The two
addends are therefore kept beside it: on the sum's storage, where every alias of the tensor finds them (FSDP and
gradient checkpointing hand on aliases) and with which they die; under torch.compile, which cannot see storages, on
a :class:`Channel` that the layers of one model share.

Values travel beside the graph, gradients in it: they flow through the rounded sum, whose gradient is that of
either addend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_rpadiag_addends"


class Channel:
    """What the aligned modules of one model hand to each other within a forward.

    wide: for both addends of a sum stands the sum itself, unrounded, as :mod:`rpadiag.regions.align_carry` leaves it; readers of one kind do not read the other.
    addends: (sum, x, residual), from what was compiled. stored: (normed, stored sum, what the norm was handed), from a norm to its layer, left only
    while a layer listens, because whoever holds it holds the whole graph. ready: (stored sum, normed, writes to the sum), from a layer that
    did both in one operation to the norm that it calls next. pending: a sum was left and nobody has read it yet; not while compiling, and not in a
    backward pass, which runs layers again and no final norm.
    """

    def __init__(self, *, wide: bool = False) -> None:
        self.wide = wide
        self.addends: tuple[Tensor, Tensor, Tensor] | None = None
        self.stored: tuple[Tensor, Tensor, Tensor] | None = None
        self.listening = False
        self.ready: tuple[Tensor, Tensor, int] | None = None
        self.pending = False

    def hand(self, stored: Tensor, normed: Tensor) -> None:
        """A layer has made ``normed`` of ``stored``, for the norm that it calls next."""
        self.ready = stored, normed, _writes(stored)
        if not torch.compiler.is_compiling():
            self.pending = not _in_backward()

    def take_ready(self, stored: Tensor) -> Tensor | None:
        """The normed tensor that a layer has made of ``stored`` already, once."""
        ready, self.ready = self.ready, None
        if ready is None or ready[0] is not stored or ready[2] != _writes(stored):
            return None
        self.pending = False
        return ready[1]

    def listen(self) -> None:
        """A layer is about to call a norm."""
        self.stored, self.listening = None, True

    def leave(self, normed: Tensor, stored: Tensor, handed: Tensor) -> None:
        """A norm that was handed ``handed`` made ``stored`` beside ``normed``."""
        if self.listening:
            self.stored = normed, stored, handed

    def take_stored(self, normed: Tensor, handed: Tensor) -> Tensor | None:
        """The sum that the norm left since :meth:`listen`, once; None where a hook gave the norm, or the layer, another tensor."""
        made, self.stored, self.listening = self.stored, None, False
        return made[1] if made is not None and made[0] is normed and _is_same(made[2], handed) else None


def attach(total: Tensor, x: Tensor, residual: Tensor, channel: Channel | None) -> None:
    """Remember that ``total`` is the rounded sum of ``x`` and ``residual``, for readers of the channel's kind. None: of any kind."""
    if channel is not None and torch.compiler.is_compiling():
        channel.addends = (total, x.detach(), residual.detach())
        return
    storage: Any = total.untyped_storage()
    setattr(
        storage,
        _ATTRIBUTE,
        (_identity(total), None if channel is None else channel.wide, x.detach(), residual.detach()),
    )
    if channel is not None:
        channel.pending = not _in_backward()


def addends_of(total: Tensor, channel: Channel) -> tuple[Tensor, Tensor] | None:
    """The addends of ``total``, or None when it is no such sum, or was written to since; what is compiled cannot tell writes."""
    kept = channel.addends
    if kept is not None and kept[0] is total:
        channel.addends = None
        return kept[1:]
    if torch.compiler.is_compiling():
        channel.addends = None
        return None
    found = getattr(total.untyped_storage(), _ATTRIBUTE, None)
    if found is None or found[0] != _identity(total) or found[1] not in (None, channel.wide):
        return None
    channel.pending = False
    return found[2], found[3]


def take_loss(x: Tensor, channel: Channel) -> bool:
    """Was a sum left for the reader of ``x``, who has found none? True once for each.

    Something between the two made another tensor: a hook, a move to another device, the end of a compiled graph. A norm that is called by
    itself has no sum either, and is no loss; one that is compiled by itself cannot be told from the final norm of compiled layers, and is.
    """
    left = torch.compiler.is_compiling() or channel.addends is not None or channel.pending
    channel.addends, channel.pending = None, False
    return left and x.dtype != torch.float32


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _identity(x: Tensor) -> tuple[Any, ...]:
    """What two tensors on one storage share if they hold the same values in the same places."""
    return x.shape, x.stride(), x.storage_offset(), _writes(x)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """One tensor, or an alias of it, such as FSDP hands on."""
    if a is b or torch.compiler.is_compiling():
        return a is b
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and _identity(a) == _identity(b)


def _writes(x: Tensor) -> int:
    """How often ``x`` was written to in place; inference tensors do not count, nor does what is compiled."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class Reroute(torch.autograd.Function):
    """The values of one tensor with the graph of another: ``apply(graph, values)``."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, values: Tensor) -> Tensor:
        """Returns ``values``."""
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient goes to ``graph`` alone."""
        return grad, None
