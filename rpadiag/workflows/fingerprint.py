"""``rpadiag fingerprint``: which contract each region of each layer follows, on a run, a bundle or a model with prompts.

A run keeps its tokens and no activations: they are captured again, with the model that its manifest names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError
from rpadiag.findings import Finding
from rpadiag.runs.manifest import dump_json
from rpadiag.runs.reader import FINGERPRINT
from rpadiag.runs.writer import write_atomically
from rpadiag.workflows.fingerprint_source import open_source
from rpadiag.workflows.options import FingerprintOptions
from rpadiag.workflows.progress import SILENT, Progress

if TYPE_CHECKING:
    from rpadiag.regions.fingerprint_file import RegionSummary
    from rpadiag.workflows.fingerprint_sites import SiteFingerprints


@dataclass(frozen=True, kw_only=True)
class FingerprintResult:
    """findings: one per region, then the exceptions. content: what the file holds. path: where, if one was written."""

    findings: tuple[Finding, ...]
    content: Mapping[str, Any]
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.content,
            "findings": [f.to_dict() for f in self.findings],
            "path": str(self.path) if self.path else None,
        }


def run_fingerprint(options: FingerprintOptions, progress: Progress = SILENT) -> FingerprintResult:
    """Fingerprint what the options name; write the file to ``output``, or into the run or bundle directory."""
    from rpadiag.regions.fingerprint_file import file_content, summarise
    from rpadiag.workflows.fingerprint_blocks import block_findings, can_tell, fingerprint_blocks
    from rpadiag.workflows.fingerprint_sites import Captured, captured_from, fingerprint_sites, weights_of

    _check_writable(options.output)
    with open_source(options, progress) as source:
        captured: Captured = captured_from(
            (source.bundle.capture(i), len(s.token_ids)) for i, s in enumerate(source.bundle.sequences)
        )
        facts = source.trainer.facts
        weights = weights_of(source.trainer.model, facts)
        with progress.stage("fingerprint layers", facts.num_layers) as stage:
            found = fingerprint_sites(captured, weights, facts, options.regions, stage.advance)
        unseen, blocks = [r for r in options.regions if r not in found.found], None
        if unseen and can_tell(source.trainer, source.bundle):
            with progress.stage("fingerprint whole layers"):
                blocks = fingerprint_blocks(source.trainer, source.bundle)
    told = {*options.regions, "qk_norm"}  # which is told where rope cannot be told without it, asked for or not
    summaries = {r: summarise(r, group, plain=found.plain) for r, group in found.found.items() if r in told}
    findings = list(_findings(summaries, found, source.label))
    if blocks is not None:
        findings = [*block_findings(blocks, unseen, source.label), *(f for f in findings if f.region not in unseen)]
        summaries |= {r: blocks.summary(r) for r in unseen}
    carry = _stored_sums(summaries) if blocks is None else blocks.carry
    content = file_content(summaries, found.sites, source=source.facts, carry=carry)
    if blocks is not None:
        content |= {"blocks": blocks.to_dict()}
    target = options.output or source.directory
    path = None
    if target is not None:
        path = target / FINGERPRINT if target.is_dir() else target
        try:
            write_atomically(path, dump_json(content))
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror or error}",
                hint="free some space, or write elsewhere with --output",
            ) from error
    return FingerprintResult(findings=tuple(findings), content=content, path=path)


def _stored_sums(summaries: Mapping[str, RegionSummary]) -> str | None:
    """The carry of operations that were seen one by one: each norm that follows from its stored input says that the sum was stored."""
    norm = summaries.get("rmsnorm")
    return "lp" if norm is not None and norm.contract is not None and not norm.disagreeing else None


def _check_writable(output: Path | None) -> None:
    """A place that cannot be written is an error before the work."""
    if output is not None and not os.access(output if output.is_dir() else output.parent, os.W_OK):
        raise InputError(
            f"cannot write {output}", hint="name a file in a directory that exists and that you can write to"
        )


def _findings(summaries: Mapping[str, RegionSummary], found: SiteFingerprints, label: str) -> Iterator[Finding]:
    """One sentence per region, then the sites that do not follow it, the implementations that agree, what was not seen."""
    from rpadiag.regions.fingerprint_file import common_presets, known_as

    for rank, (region, s) in enumerate(summaries.items()):
        numbers = {"num_sites": s.num_sites, "num_determined": s.num_determined, "num_disagreeing": len(s.disagreeing)}
        if s.contract is not None:
            fitting = s.num_sites - len(s.disagreeing)
            example = next(f for f in found.found[region].values() if f.matches)
            text = (
                f"{region} of {label}: {s.contract.name(example.dtype)}{known_as(s.presets)}; {fitting} of {s.num_sites} sites agree, "
                f"{s.num_determined} determine it alone"
            )
            rare = [f.level_two for f in found.found[region].values() if f.level_two is not None]
            if rare:
                worst = max(rare, key=lambda two: two.num_differing)
                numbers["num_sites_with_rare_mismatches"] = len(rare)
                text += (
                    f"; {len(rare)} sites have rare mismatches, at most {worst.num_differing} elements ({worst.cause})"
                )
            yield Finding(code="contract", severity="info", text=text, region=region, numbers=numbers, rank=rank)
        else:
            none_fits = any(f.status == "no known contract" for f in found.found[region].values())
            code = "no-known-contract" if none_fits else "not-determined"
            yield Finding(
                code=code, severity="warning", text=f"{region} of {label}: {s.reason}", region=region, numbers=numbers, rank=rank
            )  # fmt: skip
        for site in s.disagreeing[:3] if s.contract is not None else ():
            text = f"{site} does not follow it: {found.found[region][site].text}"
            yield Finding(
                code="site-disagrees", severity="warning", text=text, region=region, site=site, rank=10 + rank
            )
    told = [r for r, s in summaries.items() if s.contract is not None]
    together = common_presets(summaries, _stored_sums(summaries))
    if together and len(told) > 1:
        text = f"{', '.join(told)} of {label} together: as {', '.join(together)}"
        yield Finding(code="presets", severity="info", text=text, numbers={"presets": together}, rank=9)
    for region, reason in found.missing.items():
        yield Finding(
            code="not-captured", severity="notice", text=f"{region} of {label}: {reason}", region=region, rank=20
        )
