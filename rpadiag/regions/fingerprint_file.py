"""Fingerprints of many sites put together: one contract per region where all agree, and the file that align reads.

The file is JSON: ``format``, ``regions`` (region -> contract, only where it is determined), ``layers`` (site -> fingerprint),
``undetermined`` (region -> why), ``presets`` (known implementations that agree). ``rpadiag.align(model, contract=FILE)`` follows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpadiag.contracts import Contract, RmsNormContract, contract_from_dict
from rpadiag.errors import InputError
from rpadiag.regions.fingerprint import Fingerprint
from rpadiag.regions.presets import CARRIES, PRESETS, Preset

FORMAT = "rpadiag-fingerprint/1"
FUSED_ONLY = ("sum", "variance")  # axes that a norm without a residual does not have


@dataclass(frozen=True, kw_only=True)
class RegionSummary:
    """What all sites of one region say together.

    contract: the one contract that fits every site that could tell; None with a ``reason``. disagreeing: sites whose fitting
    contracts exclude it, or that fit none.
    """

    region: str
    contract: Contract | None
    num_sites: int
    num_determined: int
    reason: str = ""
    disagreeing: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()


def level_one(contract: Contract, *, plain: bool = False) -> tuple[tuple[str, str], ...]:
    """The axes that decide rounding points, for comparisons; ``plain`` leaves out those of the residual add."""
    return tuple(
        (a.name, str(getattr(contract, a.name)))
        for a in contract.axes
        if a.level == 1 and not (plain and a.name in FUSED_ONLY)
    )


def summarise(region: str, found: Mapping[str, Fingerprint], *, plain: Sequence[str] = ()) -> RegionSummary:
    """One region over its sites. plain: sites whose norm has no residual (they speak about fewer axes)."""
    fused = {s: f for s, f in found.items() if s not in plain} or dict(found)
    votes: dict[tuple[tuple[str, str], ...], list[Contract]] = {}
    for f in fused.values():
        for match in f.matches:
            votes.setdefault(level_one(match), []).append(match)
    num_determined = sum(f.status == "determined" for f in found.values())
    base: dict[str, Any] = {"region": region, "num_sites": len(found), "num_determined": num_determined}
    if not votes:
        reasons = list(dict.fromkeys(f.text for f in found.values()))
        return RegionSummary(
            **base, contract=None, reason=reasons[0] if reasons else "no site of this region was captured",
            disagreeing=tuple(s for s, f in found.items() if f.status == "no known contract"),
        )  # fmt: skip
    most = max(len(v) for v in votes.values())
    leaders = [v[0] for v in votes.values() if len(v) == most]
    disagreeing = tuple(
        s for s, f in found.items() if not any(_agrees(m, leaders, plain=s in plain) for m in f.matches)
    )
    if len(leaders) > 1:
        first = next(f for f in fused.values() if len(f.matches) > 1)
        return RegionSummary(**base, contract=None, reason=first.text, disagreeing=disagreeing)
    if not any(
        f.status == "determined" for f in fused.values()
    ):  # every site is ambiguous or short of rows: an intersection is not evidence enough
        first = next(iter(fused.values()))
        if first.reasons or (len(first.matches) > 1 and most < 2):
            return RegionSummary(**base, contract=None, reason=first.text, disagreeing=disagreeing)
    return RegionSummary(
        **base, contract=leaders[0], disagreeing=disagreeing, presets=agreeing_presets(region, leaders[0], fused=bool(fused)),
    )  # fmt: skip


def _agrees(match: Contract, leaders: Sequence[Contract], *, plain: bool) -> bool:
    return any(level_one(match, plain=plain) == level_one(leader, plain=plain) for leader in leaders)


def agreeing_presets(region: str, contract: Contract, *, fused: bool = True) -> tuple[str, ...]:
    """Names of the presets that round at the same points in this region."""
    mine = level_one(contract, plain=not fused)
    return tuple(
        name
        for name, preset in PRESETS.items()
        if region in preset.regions and level_one(_known(preset, contract), plain=not fused) == mine
    )


def common_presets(summaries: Mapping[str, RegionSummary], carry: str | None) -> list[str]:
    """Names of the presets that agree in every region that was told.

    carry: which residual sums are rounded (:mod:`rpadiag.regions.align_carry`); it counts where the norm was told. None: not known.
    """
    told = {r: set(s.presets) for r, s in summaries.items() if s.contract is not None}
    carries = (carry,) if carry is not None and "rmsnorm" in told else CARRIES
    return [n for n, p in PRESETS.items() if told and p.carry in carries and all(n in names for names in told.values())]


def known_as(presets: Sequence[str]) -> str:
    """Words in brackets for the implementations that agree, the first few of them."""
    return f" (as {', '.join(presets[:4])})" if presets else " (no known implementation does this)"


def _known(preset: Preset, contract: Contract) -> Contract:
    """A preset's contract of the same region and, for a norm, of the same kind of weight."""
    if isinstance(contract, RmsNormContract) and contract.weight in ("1+w", "lp(1+w)"):
        return preset.rmsnorm(offset=True)
    return preset.regions[contract.region]


def with_backward(contract: Contract) -> Contract:
    """The contract with the backward axes of the first preset that rounds at the same points (align trains with it)."""
    for name in agreeing_presets(contract.region, contract):
        known = _known(PRESETS[name], contract)
        changes = {a.name: getattr(known, a.name) for a in contract.axes if a.level == "backward"}
        return contract.replace(**changes)
    return contract


def file_content(
    summaries: Mapping[str, RegionSummary], sites: Mapping[str, Fingerprint], *, source: Mapping[str, Any], carry: str | None,
) -> dict[str, Any]:  # fmt: skip
    """JSON content of a fingerprint file. carry: as in :func:`common_presets`."""
    determined = {r: s.contract for r, s in summaries.items() if s.contract is not None}
    return {
        "format": FORMAT,
        "name": "fingerprint",
        "text": f"fingerprint of {source.get('label', 'a capture')}",
        "versions": str(source.get("versions", "")),
        "source": str(source.get("label", "")),
        "evidence": "run",
        "regions": {r: with_backward(c).to_dict() for r, c in determined.items()},
        "undetermined": {r: s.reason for r, s in summaries.items() if s.contract is None},
        "presets": common_presets(summaries, carry),
        **({} if carry is None else {"carry": carry}),
        "layers": {site: f.to_dict() for site, f in sites.items()},
        "captured": dict(source),
    }


def read_fingerprint_file(path: Path) -> dict[str, Any]:
    """Content of a fingerprint file, its contracts checked. Errors: InputError for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the fingerprint file {path}", detail=str(error)) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{path} is not a fingerprint file", detail=f'it does not say "format": "{FORMAT}"')
    for region, contract in data["regions"].items():
        contract_from_dict({**contract, "region": region})
    for layer in data["layers"].values():
        Fingerprint.from_dict(layer)
    return data
