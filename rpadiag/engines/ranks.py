"""The processes that torchrun starts: who this one is, and how they talk.

Rank 0 leads: it runs the command, writes the run and says what the others do next. Commands go over a gloo group that may wait as
long as the leader needs (an engine may take minutes to start); data goes over the default group, where a rank that gives no answer is
an error after ``timeout_s``. A rank that ends closes its connections, so the others see it at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rpadiag.errors import EngineError, RpadiagError, UsageError

if TYPE_CHECKING:
    import torch

IDLE = timedelta(days=1)
# What torchrun sets, and a process of another program must not inherit.
VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


def num_ranks() -> int:
    """Processes that torchrun has started together; 1 without it. Asks the environment alone."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def this_rank() -> int:
    """Number of this process among them."""
    return int(os.environ.get("RANK", "0")) if num_ranks() > 1 else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """This process among ``size``; ``device`` is its own, and ``commands`` the group that commands go over."""

    rank: int
    size: int
    device: str
    commands: Any

    def tell(self, command: dict[str, Any] | None) -> None:
        """Rank 0: send a command to every other rank; None ends them, and ``fail`` with the error it names."""
        import torch.distributed as dist

        with answering():
            dist.broadcast_object_list([command], src=0, group=self.commands)

    def hear(self) -> dict[str, Any] | None:
        """Every other rank: the next command."""
        import torch.distributed as dist

        box: list[Any] = [None]
        with answering():
            dist.broadcast_object_list(box, src=0, group=self.commands)
        command: dict[str, Any] | None = box[0]
        return command

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value in the order of ranks, on every rank; for plain values, called on all ranks at once."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with answering():
            dist.all_gather_object(values, value, group=self.commands)
        return values

    def beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Each rank's [T, w] side by side in the order of ranks, [T, size * w]; called on all ranks at once."""
        import torch
        import torch.distributed as dist

        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with answering():
            dist.all_gather(parts, mine)
        return torch.cat(parts, dim=1)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """What a collective raises when another rank has ended or is silent becomes an EngineError."""
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        lost = isinstance(error, dist.DistError) or any(w in said for w in ("gloo", "connection closed", "timed out"))
        if not lost:
            raise
        raise EngineError(
            f"rank {this_rank()} lost the others: one of {num_ranks()} ranks has ended, or gave no answer in time",
            detail=str(error).splitlines()[0],
            hint="the first error above names the cause; a larger --timeout waits longer",
        ) from error


@contextlib.contextmanager
def joined(device: str, *, timeout_s: float) -> Iterator[Ranks]:
    """This process joined to those that torchrun has started with it. device: ``cpu`` or ``cuda``; each rank takes its own."""
    import torch
    import torch.distributed as dist

    size, rank, local = num_ranks(), this_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    if device.startswith("cuda"):
        if ":" in device:
            raise UsageError(f"{size} ranks take a device each, --device {device} names one", hint="use --device cuda")
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {rank} has no GPU: this host has {torch.cuda.device_count()}",
                hint=f"torchrun --nproc-per-node {torch.cuda.device_count()}",
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    with answering():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        commands = dist.new_group(backend="gloo", timeout=IDLE)
    try:
        yield Ranks(rank=rank, size=size, device=device, commands=commands)
    finally:
        dist.destroy_process_group()


def lead(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """Rank 0's ``work``, after which the others are told to end, and what it failed with: they leave with the same exit code."""
    ending: dict[str, Any] | None = None
    try:
        return work()
    except BaseException as error:
        known = error if isinstance(error, RpadiagError) else EngineError(f"ended by {type(error).__name__}")
        ending = {"do": "fail", "error": known.to_plain()}
        raise
    finally:
        with contextlib.suppress(EngineError):
            ranks.tell(ending)
