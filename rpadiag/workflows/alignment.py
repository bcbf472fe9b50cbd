"""Aligning the trainer of a run, and what the run's manifest says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rpadiag.workflows.options import DEFAULT_CONTRACT

if TYPE_CHECKING:
    from rpadiag.engines.trainer import TrainerEngine


def align_trainer(
    trainer: TrainerEngine, regions: Sequence[str], contract: str | None, enter: Callable[[Any], Any]
) -> dict[str, Any]:
    """Align ``trainer`` on every rank that holds a part of it, until the stack of ``enter`` ends; returns the manifest's entry.

    regions: as :func:`rpadiag.align` takes them; the entry has those that it came to. contract: DEFAULT_CONTRACT by default.
    """
    from rpadiag.engines.sharded import aligned

    contract = contract or DEFAULT_CONTRACT
    contracts = enter(aligned(trainer, regions, contract)).to_dict()
    return {"regions": list(contracts["regions"]), "contract": contract, "contracts": contracts}
