"""What the shell offers for the value of an option: names of regions, contracts and sites; nothing is imported for it but names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from rpadiag.sites import ALIGN_NAMES, ALL, LAYER_POINTS

VARIABLE = "_RPADIAG_COMPLETE"  # set by the shell function that `rpadiag --install-completion` installs
OUTSIDE_LAYERS = ("embed", "final_norm", "logits", "logprob")

Complete = Callable[[str], list[str]]


def asked() -> bool:
    """Whether a shell wants completions of the line it has, not the command to run."""
    return VARIABLE in os.environ


def one_of(names: Iterable[str]) -> Complete:
    """Completion over fixed names."""
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def comma_separated(names: Iterable[str]) -> Complete:
    """Completion of the last name of a list such as ``rope,swiglu``; none twice, and ``all`` alone."""
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        named = (*before.split(","), "all") if comma else ()
        return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in named]

    return complete


regions = comma_separated((ALL, *ALIGN_NAMES))


def contracts(incomplete: str) -> list[str]:
    """Names of presets, and the JSON files and directories that a path may go on with."""
    from rpadiag.regions.presets import PRESETS

    directory, _, start = incomplete.rpartition("/")
    try:
        inside = sorted(os.scandir(directory or ("/" if incomplete.startswith("/") else ".")), key=lambda e: e.name)
    except OSError:
        inside = []
    prefix = incomplete[: len(incomplete) - len(start)]
    files = [
        f"{prefix}{e.name}{'/' if e.is_dir() else ''}"
        for e in inside
        if e.name.startswith(start)
        and (start or not e.name.startswith("."))
        and (e.is_dir() or e.name.endswith(".json"))
    ]
    return [name for name in PRESETS if name.startswith(incomplete)] + (files if incomplete else [])


def sites(incomplete: str) -> list[str]:
    """Points of a layer, alone (every layer) or after ``layers.N.``, and the sites outside the layers."""
    points = tuple(p.name for p in LAYER_POINTS)
    layer, _, start = incomplete.rpartition(".")
    if layer.startswith("layers."):
        return [f"{layer}.{p}" for p in points if p.startswith(start)]
    return [name for name in (*points, *OUTSIDE_LAYERS, "layers.0.", "layers.*.") if name.startswith(incomplete)]
