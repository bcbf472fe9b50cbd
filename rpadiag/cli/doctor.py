"""``rpadiag doctor``: what is installed, what works with it, and the install line for what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpadiag.cli import options as shared
from rpadiag.cli.output import NOT_MEASURED, print_json, print_table, say

if TYPE_CHECKING:
    from rpadiag.workflows.doctor import Diagnosis


def doctor(output_format: shared.Format = "table") -> None:
    """Show versions, devices, engines found, observable sites, and the install line for what is missing.

    Leaves with 0 also when things are missing: it tells, it does not judge.
    """
    shared.check_format(output_format)
    from rpadiag.workflows.doctor import diagnose

    found = diagnose()
    if output_format == "json":
        print_json(found.to_dict())
    else:
        _show(found)


def _show(found: Diagnosis) -> None:
    say(f"rpadiag {found.version}, Python {found.python}", style="bold")
    for device in found.devices:
        say(f"  {device}")
    rows = [("yes" if a.usable else "no", a.name, a.reason) for a in found.abilities]
    print_table("What works here", ("works", "what", "why"), rows, left=3)
    print_table(
        "Packages",
        ("package", "version", "needed for"),
        [(p.name, p.version or NOT_MEASURED, p.needed_for) for p in found.packages],
        left=3,
    )
    say()
    say("Sites observable", style="bold")
    for stack, points in found.sites.items():
        say(f"  {stack}: {', '.join(points)}")
    if not found.sites:
        say("  none: no engine is installed")
    say(f"  model architectures: {', '.join(found.families) or 'none'}")
    missing = [a for a in found.abilities if a.install]
    if missing:
        say()
        say("Missing", style="bold")
        for ability in missing:
            say(f"  {ability.name}: {ability.install}")
