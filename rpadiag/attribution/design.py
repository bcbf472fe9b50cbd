"""Which forwards an attribution needs: variants of the trainer, and the noise seed of each replicate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rpadiag.errors import UsageError

MIN_REPLICATES = 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One trainer to score.

    design:  ``reference`` (every region aligned), ``each`` (every region but one), ``only`` (one region alone),
             ``all`` (none aligned: the trainer as it is), ``self`` (the reference again, other seeds).
    region:  the region left out or aligned alone; ``all`` and ``self`` carry their design's name.
    aligned: the regions that are aligned.
    """

    design: str
    region: str
    aligned: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Replicate:
    """One forward to make: a variant under one noise seed."""

    variant: Variant
    index: int
    seed: int


def variants(regions: Sequence[str]) -> list[Variant]:
    """The reference first, then every variant it is held against."""
    every = tuple(regions)
    out = [Variant(design="reference", region="reference", aligned=every)]
    out += [Variant(design="each", region=r, aligned=tuple(x for x in every if x != r)) for r in every]
    if len(every) > 1:
        out += [Variant(design="only", region=r, aligned=(r,)) for r in every]
    out.append(Variant(design="all", region="all", aligned=()))
    out.append(Variant(design="self", region="self", aligned=every))
    return out


def replicates(regions: Sequence[str], *, num_replicates: int, seed: int) -> Iterator[Replicate]:
    """Every forward of an attribution, variant by variant so that each trainer is aligned once.

    Replicate k of every variant uses the same noise, so that a variant that changes nothing gives exactly
    zero; only the self-control draws other noise, which is what makes it a control.
    """
    if num_replicates < MIN_REPLICATES:
        raise UsageError(
            f"--replicates must be at least {MIN_REPLICATES}, got {num_replicates}",
            detail="the systematic part is separated from chaos by the spread over replicates",
            hint="8 shows strong effects; 32 is what published figures use",
        )
    for variant in variants(regions):
        offset = 1_000_003 if variant.design == "self" else 0
        for k in range(num_replicates):
            yield Replicate(variant=variant, index=k, seed=seed + offset + k)
