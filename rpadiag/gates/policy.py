"""A policy file: the gates of a project under names, in TOML.

::

    baseline = "runs/last-good"          # optional, relative to the file; --baseline on the command line comes first

    [gates.mismatch]
    gate = "k3_kl <= 1e-3"
    reason = "our runs diverged above this"   # optional, shown with the result

    [gates.no-regression]
    gate = "k3_kl <= baseline"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpadiag.errors import InputError, UsageError
from rpadiag.gates.grammar import Gate, parse_gate

KEYS = ("baseline", "gates")
GATE_KEYS = ("gate", "reason")
EXAMPLE = 'write [gates.NAME] and gate = "k3_kl <= 1e-3" under it; docs/gates.md has an example'


@dataclass(frozen=True, kw_only=True)
class Policy:
    """gates in the order of the file; baseline as a path from the working directory."""

    gates: tuple[Gate, ...]
    baseline: Path | None = None


def load_policy(path: Path) -> Policy:
    """Read a policy. Raises InputError for a file that cannot be read, UsageError for what it may not say."""
    import tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read policy {path}: {error.strerror or error}", hint="name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"policy {path} is not valid TOML", detail=str(error), hint=EXAMPLE) from error
    _only(path, "the policy", content, KEYS)
    tables = content.get("gates")
    if not isinstance(tables, dict) or not tables:
        raise UsageError(f"policy {path} has no gates", hint=EXAMPLE)
    baseline = content.get("baseline")
    if baseline is not None and not isinstance(baseline, str):
        raise UsageError(f"policy {path}: baseline is not a path", hint='write baseline = "runs/last-good"')
    return Policy(
        gates=tuple(_gate(path, name, table) for name, table in tables.items()),
        baseline=None if baseline is None else path.parent / baseline,
    )


def _gate(path: Path, name: str, table: Any) -> Gate:
    if not isinstance(table, dict) or not isinstance(table.get("gate"), str):
        raise UsageError(f"policy {path}: gates.{name} has no gate", hint='write gate = "METRIC OP VALUE" under it')
    _only(path, f"gates.{name}", table, GATE_KEYS)
    reason = table.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise UsageError(f"policy {path}: the reason of gates.{name} is no text", hint='write reason = "..."')
    try:
        return parse_gate(table["gate"], name=name, reason=reason)
    except UsageError as error:
        raise UsageError(f"policy {path}, {name}: {error.message}", detail=error.detail, hint=error.hint) from error


def _only(path: Path, what: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        raise UsageError(
            f"policy {path}: {what} has no entry {unknown[0]}",
            detail=f"known entries: {', '.join(known)}",
            hint="correct or remove it",
        )
