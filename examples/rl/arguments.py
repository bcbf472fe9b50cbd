"""What train.py and sweep.py refuse before they start anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

LARGEST_SEED = 2**31 - 1  # of the table's column
CONTRACT = "the JSON file of `rpadiag fingerprint`, or a preset's name"


def check_seed(seed: int) -> None:
    if not 0 <= seed <= LARGEST_SEED:
        raise SystemExit(f"error: seed cannot be {seed}\nhint: a whole number from 0 to {LARGEST_SEED}")


def check_limits(*, seconds: float | None, stop_after: int | None) -> None:
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise SystemExit(f"error: --seconds cannot be {seconds}\nhint: give a number of seconds above 0")
    if stop_after is not None and stop_after < 1:
        raise SystemExit(f"error: --stop-after cannot be {stop_after}\nhint: give a number of rounds, at least 1")


def check_contract(given: str | None) -> None:
    """Raises SystemExit for a --contract that is neither a preset nor a file of contracts."""
    if given is None:
        return
    from rpadiag.errors import RpadiagError
    from rpadiag.regions.presets import find_preset, load_preset

    try:
        found = load_preset(Path(given)) if given.endswith(".json") else find_preset(given)
    except RpadiagError as error:
        raise SystemExit(said_by(error, hint=f"give {CONTRACT}")) from None
    missing = [region for region in ("rope", "swiglu", "rmsnorm") if region not in found.regions]
    if missing:
        raise SystemExit(
            f"error: contract {given} says nothing about {', '.join(missing)}\nhint: give {CONTRACT}, with all regions"
        )


def said_by(error: Any, *, hint: str) -> str:
    """The lines of an RpadiagError, with ``hint`` where it has none."""
    lines = [f"error: {error.message}"] + ([error.detail] if error.detail else [])
    return "\n".join([*lines, f"hint: {error.hint or hint}"])
