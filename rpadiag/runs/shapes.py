"""What readers of a run take for granted of its JSON files, checked when a file is read.

An address names entries by their keys; ``*`` stands for every entry of an object or list. Entries that are absent are left to
their readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpadiag.errors import InputError

DAMAGED = "the run is damaged; make it again"
WORDS: dict[str, tuple[type, ...]] = {
    "an object": (dict,),
    "an object or null": (dict, type(None)),
    "a list": (list,),
    "a list or null": (list, type(None)),
    "a number": (int, float, type(None)),
    "a whole number": (int,),
    "a number or a list": (int, float, list, type(None)),
    "text": (str,),
    "text or null": (str, type(None)),
}

# Facts of a stack are not among them: those of a foreign bundle are what its writer made them.
MANIFEST: Mapping[str, Sequence[str]] = {
    "an object": ("tables", "weights.*"),
    "an object or null": (
        "options", "options.given", "options.effective", "packages", "devices", "devices.cpu", "git", "tokens", "weights", "trainer", "rollout",
        "sites", "sites.absent", "control", "rollouts",
    ),
    "a list or null": ("devices.gpus", "devices.cpu.isa"),
    "text or null": ("trainer.preset", "rollout.preset"),
    "a number": ("tables.*", "tokens.num_sequences", "wall_s"),
    "text": ("command", "weights.*.digest"),
}  # fmt: skip
FINDINGS: Mapping[str, Sequence[str]] = {
    "an object": ("findings.*",),
    "an object or null": ("verdict", "findings.*.numbers"),
    "a list": ("findings",),
    "a list or null": ("verdict.evidence",),
    "a whole number": ("findings.*.rank",),
    "text": ("verdict.kind", "verdict.sentence", "findings.*.code", "findings.*.severity", "findings.*.text"),
    "text or null": ("verdict.site", "findings.*.site", "findings.*.region"),
}
METRICS: Mapping[str, Sequence[str]] = {
    "an object": ("logprob.*", "logprob.*.*.*", "floors.*", "attribution.confirmation.*"),
    "an object or null": ("logprob", "attribution", "attribution.additivity", "rollouts"),
    "a list or null": ("floors", "attribution.confirmation", "rollouts.faults"),
    "a number": ("floors.*.mean_abs_d", "floors.*.max_abs_d", "floors.*.k3_kl", "floors.*.exact_share", "floors.*.num_tokens"),
    "a number or a list": ("logprob.*.*",),  # the lists are of sequences
    "text": ("floors.*.name", "floors.*.stack"),
    "text or null": ("floors.*.text",),
}  # fmt: skip
FINGERPRINT: Mapping[str, Sequence[str]] = {
    "an object": ("regions.*",),
    "an object or null": ("captured", "regions", "undetermined"),
}


def check_shape(path: Path, data: Mapping[str, Any], shape: Mapping[str, Sequence[str]]) -> None:
    """Raise InputError, naming file and entry, for an entry of another kind than ``shape`` says."""
    for word, addresses in shape.items():
        for address in addresses:
            for value in _at(data, address.split(".")):
                if not isinstance(value, WORDS[word]) or (
                    word.startswith(("a number", "a whole number")) and isinstance(value, bool)
                ):
                    raise InputError(
                        f"{path} is not what rpadiag wrote",
                        detail=f"its {address} is {type(value).__name__}, not {word}",
                        hint=DAMAGED,
                    )


def _at(value: Any, names: Sequence[str]) -> Iterator[Any]:
    if not names:
        yield value
        return
    name, rest = names[0], names[1:]
    if name == "*":
        found = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    else:
        found = [value[name]] if isinstance(value, dict) and name in value else []
    for item in found:
        yield from _at(item, rest)
