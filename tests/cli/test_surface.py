"""The command line's surface, frozen: every command, argument and option, with its default.

After a deliberate change: ``RPADIAG_WRITE_GOLDEN=1 pytest tests/cli/test_surface.py``, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer

from rpadiag.cli.app import app

GOLDEN = Path(__file__).parent.parent / "golden" / "cli_surface.json"


def surface() -> dict[str, list[str]]:
    root: Any = typer.main.get_command(app)
    commands = {"rpadiag": root} | {f"rpadiag {name}": command for name, command in root.commands.items()}
    return {name: [parameter(p) for p in command.params] for name, command in sorted(commands.items())}


def parameter(p: Any) -> str:
    """One line: kind, names, values, and either ``required`` or the default."""
    names = ", ".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else ""
    values = "flag" if getattr(p, "is_flag", False) else p.metavar
    repeatable = " repeatable" if p.multiple or p.nargs == -1 else ""
    default = "required" if p.required else f"default {None if callable(p.default) else p.default}"
    return " ".join(f"{p.param_type_name} {names} {values}{repeatable}, {default}".split())


def test_every_command_and_option_is_as_frozen() -> None:
    found = json.dumps(surface(), indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("RPADIAG_WRITE_GOLDEN"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")


def test_every_command_is_named_like_its_file() -> None:
    root: Any = typer.main.get_command(app)
    folder = Path(__file__).parents[2] / "rpadiag" / "cli"
    assert set(root.commands) <= {path.stem for path in folder.glob("*.py")}


def test_every_option_has_a_help_text() -> None:
    root: Any = typer.main.get_command(app)
    silent = [f"{name} {p.opts}" for name, c in root.commands.items() for p in c.params if not p.help]
    assert silent == []
