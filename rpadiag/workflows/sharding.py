"""What the processes of one ``torchrun`` divide among them: prompts, or the weights of the trainer.

``prompts``: every process has both stacks and a share of the prompts; rank 0 joins what they found. ``fsdp`` and ``tp``: rank 0 runs the
command, and the trainer's weights are cut over all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rpadiag.errors import EngineError, InputError, UsageError, from_plain, unknown_name
from rpadiag.workflows.progress import SILENT

if TYPE_CHECKING:
    from rpadiag.compare.pairing import Pairing
    from rpadiag.engines.ranks import Ranks
    from rpadiag.runs import RunWriter
    from rpadiag.workflows.inputs import Inputs
    from rpadiag.workflows.options import CaptureOptions, CompareOptions
    from rpadiag.workflows.scored import Scored

SHARDS = ("prompts", "fsdp", "tp")
PARTS = "ranks"  # inside the run's scratch directory
Answer = TypeVar("Answer")
_current: list[Ranks] = []  # a process belongs to one group of ranks, as in torch.distributed


def launched() -> int:
    """Processes that torchrun started together; 1 without it. Asks the environment alone, and imports no torch."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def check_shard(shard: str, *, tp: int) -> None:
    """UsageError for a sharding that is not known, or that nothing here can do."""
    if shard not in SHARDS:
        raise unknown_name("sharding", shard, SHARDS)
    size = launched()
    if shard != "prompts" and size == 1:
        raise UsageError(
            f"--shard {shard} cuts the trainer over several processes, and this is one",
            hint="torchrun --nproc-per-node 2 -m rpadiag ...",
        )
    if shard == "prompts" and size > 1 and tp > 1:
        raise UsageError(
            f"each of {size} processes would start vLLM over {tp} devices",
            hint="give --tp to one process, or --shard fsdp or tp, where rank 0 alone starts vLLM",
        )


def under_ranks(
    options: CompareOptions | CaptureOptions, work: Callable[[Any], Answer], *, splits_prompts: bool
) -> Answer | None:
    """``work(options)`` in this process, or as its part in a torchrun; None where another process has the answer.

    splits_prompts: whether ``work`` divides prompts over ranks by itself.
    """
    if launched() == 1:
        return work(options)
    from rpadiag.engines.ranks import joined, lead
    from rpadiag.workflows.inputs import resolve_device

    if options.shard == "prompts" and not splits_prompts:
        raise UsageError(
            f"torchrun started {launched()} processes, and this command does not divide prompts over them",
            hint="start one process, or cut the trainer over them with --shard fsdp or --shard tp",
        )
    if options.shard == "prompts":
        _check_divides(options.prompts)
    with joined(resolve_device(options.device), timeout_s=options.timeout_s) as ranks:
        _current.append(ranks)
        try:
            if options.shard == "prompts":
                with beside_rank_0(ranks):
                    found = work(replace(options, device=ranks.device))
                return None if ranks.rank else found
            if ranks.rank:
                from rpadiag.engines.sharded import follow

                follow(ranks)
                return None
            return lead(ranks, lambda: work(options))
        finally:
            _current.clear()


def _check_divides(prompts: Path) -> None:
    """UsageError where there are more processes than prompts: asked of the file, on every rank, before anything is loaded."""
    from rpadiag.prompts import check_prompt_file

    num = check_prompt_file(prompts)
    if num < launched():
        raise UsageError(
            f"{num} prompt{'s' if num > 1 else ''} cannot be divided over {launched()} processes",
            hint=f"torchrun --nproc-per-node {num}",
        )


@contextlib.contextmanager
def beside_rank_0(ranks: Ranks) -> Iterator[None]:
    """What another rank meets when rank 0 has ended and taken its directory away, which the parts lie in, says so."""
    try:
        yield
    except (InputError, FileNotFoundError) as error:
        missing = error.__cause__ if isinstance(error, InputError) else error
        part = isinstance(missing, FileNotFoundError) and f"scratch/{PARTS}/rank-" in str(missing.filename)
        if not ranks.rank or not part:
            raise
        raise EngineError(
            f"rank {ranks.rank} lost rank 0, which has ended and taken the run away",
            hint="rank 0's error names the cause",
        ) from error


def ranks_now() -> Ranks | None:
    """The ranks that this process has joined, if any."""
    return _current[0] if _current else None


# -- prompts over ranks ----------------------------------------------------------------------------


def splitting(options: CompareOptions) -> Ranks | None:
    """The ranks that prompts are divided over; None where one process has them all."""
    return ranks_now() if options.shard == "prompts" else None


def path_of_part(run: Path, rank: int) -> Path:
    """Where a rank writes: the run itself for the first, a run of its own inside it for the others."""
    return run / "scratch" / PARTS / f"rank-{rank:05d}" if rank else run


def begin_together(ranks: Ranks, begin: Callable[[], Answer]) -> Answer:
    """``begin()`` on rank 0, then on the others. Its error on one rank is raised on all, so that none waits for another."""
    from rpadiag.errors import RpadiagError

    found: Answer | None = None
    for turn in (ranks.rank == 0, ranks.rank != 0):
        failed: RpadiagError | None = None
        if turn:
            try:
                found = begin()
            except RpadiagError as error:
                failed = error
        for rank, plain in enumerate(ranks.gather(None if failed is None else failed.to_plain())):
            if plain is not None:
                raise from_plain(plain, place=f"rank {rank}: " if rank else "")
    assert found is not None
    return found


def share_of(inputs: Inputs, ranks: Ranks) -> Inputs:
    """This rank's prompts: a run of neighbours, so that the parts in order are the prompts in order."""
    total = len(inputs.sequences)
    start, stop = (total * n // ranks.size for n in (ranks.rank, ranks.rank + 1))
    return replace(inputs, prompts=inputs.prompts[start:stop], sequences=inputs.sequences[start:stop])


def collect(ranks: Ranks, scored: Scored, pairing: Pairing) -> None:
    """Make ``scored`` and the pooled statistics of ``pairing`` those of all ranks, in the order of prompts, on every rank."""
    from rpadiag.compare.aggregate import Aggregate
    from rpadiag.compare.reductions import Reductions

    gathered = ranks.gather((scored, pairing.aggregate, pairing.reductions))
    for name in (f.name for f in dataclasses.fields(scored)):
        setattr(scored, name, [item for part, _, _ in gathered for item in getattr(part, name)])
    pairing.aggregate, pairing.reductions = Aggregate(), Reductions()
    for _, aggregate, reductions in gathered:
        pairing.aggregate.merge(aggregate)
        pairing.reductions.merge(reductions)


def begin_late(run: RunWriter, ranks: Ranks, options: CompareOptions) -> RunWriter:
    """Rank 0: a last part for what it adds after the prompts of all ranks, so that rows are in the order of one process alone."""
    from rpadiag.runs import create_run

    return create_run(path_of_part(run.path, ranks.size), command="compare", options=options.to_dict())


def join_parts(run: RunWriter, ranks: Ranks) -> None:
    """Rank 0: wait until the others have closed their parts, and take them over."""
    from rpadiag.runs.parts import join

    ranks.gather("closed")
    paths = [path_of_part(run.path, rank) for rank in range(1, ranks.size + 1)]
    join(run, [path for path in paths if path.exists()])


def progress_of(ranks: Ranks | None, progress: Any) -> Any:
    """Rank 0's progress is shown; what the others do goes on beside it."""
    return SILENT if ranks is not None and ranks.rank else progress
