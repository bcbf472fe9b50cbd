"""Captured rows between a running engine and a sequence's file.

Rows on a CPU are written at once. Rows on a GPU are copied on the device, which costs a forward little, and leave it when the forward
is over: through pinned memory on a stream of their own, one buffer being written while the next is filled. Where the device has no
room for more, what is held leaves at once, and the forward waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rpadiag.engines.bundle_writer import SequenceWriter

BUFFER_BYTES = 64 << 20
NUM_BUFFERS = 3
SHARE_OF_FREE = 0.5  # of the device memory that is free when capture begins; the trainer may live on the same device


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """Rows [t, W] of a key, contiguous, from row ``row`` of a sequence on."""

    writer: SequenceWriter
    key: str
    rows: torch.Tensor
    row: int


class Spool:
    """limit_bytes: device memory that may be held; 0 writes every row at once. hold_cpu: hold rows of a CPU, too (for tests)."""

    def __init__(self, *, limit_bytes: int, hold_cpu: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes = 0  # held at one time
        self._hold_cpu = hold_cpu
        self._held: list[_Held] = []
        self._num_bytes = 0

    @classmethod
    def for_device(cls, device: torch.device) -> Spool:
        """A spool that holds up to half of what is free on a GPU now, and nothing on a CPU."""
        if device.type != "cuda":
            return cls(limit_bytes=0)
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(limit_bytes=int((free + unused) * SHARE_OF_FREE))

    def append(self, writer: SequenceWriter, key: str, rows: torch.Tensor, *, row: int) -> None:
        """Take rows [t, W], which may be overwritten once this returns."""
        rows = rows.detach().reshape(rows.shape[0], -1)
        size = rows.numel() * rows.element_size()
        if not (rows.is_cuda or self._hold_cpu) or size > self.limit_bytes:
            writer.append(key, rows, row=row)
            return
        if self._num_bytes + size > self.limit_bytes:
            self.flush()
        try:
            kept = rows.clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            self.flush()
            torch.cuda.empty_cache()
            writer.append(key, rows, row=row)
            return
        self._held.append(_Held(writer=writer, key=key, rows=kept, row=row))
        self._num_bytes += size
        self.most_bytes = max(self.most_bytes, self._num_bytes)

    def flush(self) -> None:
        """Write everything that is held. Raises what writing raises."""
        if not self._held:
            return
        held, self._held, self._num_bytes = self._held, [], 0
        with ThreadPoolExecutor(max_workers=1) as disk:
            pending: deque[Future[None]] = deque()
            for number, piece in enumerate(_pieces(held)):
                if len(pending) == NUM_BUFFERS:
                    pending.popleft().result()  # its buffer is free, and its rows have left the device
                staged, copied = self._stage(piece.rows, number % NUM_BUFFERS)
                pending.append(disk.submit(_write, piece, staged, copied))
            while pending:
                pending.popleft().result()

    def drop(self) -> None:
        """Forget what is held: the capture has failed."""
        self._held, self._num_bytes = [], 0

    def _stage(self, rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Rows in host memory, and the event after which they are there."""
        if not rows.is_cuda:
            return rows, None
        size = rows.numel() * rows.element_size()
        if size > BUFFER_BYTES:  # a single row wider than a buffer
            return rows.cpu(), None
        stream = _stream(rows.device)
        staged = _pinned(number, BUFFER_BYTES)[:size].view(rows.dtype).view(rows.shape)
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(stream):
            staged.copy_(rows, non_blocking=True)
            copied.record(stream)
        return staged, copied


@cache
def _pinned(_number: int, num_bytes: int) -> torch.Tensor:
    """A buffer of this process: pinning takes tens of milliseconds, and every capture would pay for it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _write(piece: _Held, staged: torch.Tensor, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    piece.writer.append(piece.key, staged, row=piece.row)


def _pieces(held: list[_Held]) -> Iterator[_Held]:
    """The rows of each key of each sequence joined where they follow one another, and cut to the size of a buffer.

    ``held`` is emptied on the way, so that a key's memory is free once it is written.
    """
    grouped: dict[tuple[int, str], list[_Held]] = {}
    for piece in held:
        grouped.setdefault((id(piece.writer), piece.key), []).append(piece)
    held.clear()
    for name in list(grouped):
        run: list[_Held] = []
        for piece in sorted(grouped.pop(name), key=lambda p: p.row):
            if run and piece.row != run[-1].row + run[-1].rows.shape[0]:
                yield from _cut(run)
                run = []
            run.append(piece)
        yield from _cut(run)


def _cut(run: list[_Held]) -> Iterator[_Held]:
    first = run[0]
    joined = first.rows if len(run) == 1 else torch.cat([p.rows for p in run])
    most = max(1, BUFFER_BYTES // max(1, joined.shape[1] * joined.element_size()))
    for start in range(0, joined.shape[0], most):
        yield _Held(writer=first.writer, key=first.key, rows=joined[start : start + most], row=first.row + start)
