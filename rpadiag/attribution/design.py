"""Which forwards an attribution needs: what can be switched, variants of the trainer, and the noise of each replicate.

The words, from small to large. A *switch* is one region, in all layers or in a range of them, that can be aligned or left as it is.
A *part* is what responsibility is assigned to: one switch or several that are switched together. A *variant* is a trainer with
some parts aligned. A *replicate* is one forward of a variant under one noise draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpadiag.errors import UsageError, unknown_name

MIN_REPLICATES = 2
DESIGNS = ("reference", "each", "only", "all", "self", "factorial", "rollout")
KINDS = ("ulp", "batch", "order", "none")
CONFIRMING = {"batch": "equivalent batches", "order": "sums added in another order"}  # kinds that confirm the first
BY = ("region", "layer")
HEAD_REGIONS = ("lm_head",)  # outside the decoder layers: never split by layer
NUM_LAYER_GROUPS = {("layer",): 6, ("region", "layer"): 3}
MAX_FACTORS = 8
SELF_OFFSET = 1_000_003  # added to the seed of the self-control, whose noise must be another one
CONFIRM_OFFSET = 2_000_003


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One thing that can be aligned or left. layers: half-open range of decoder layers; None is all of them."""

    region: str
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """What responsibility is assigned to: switches that are aligned or left together, under one name."""

    name: str
    switches: tuple[Switch, ...]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One trainer to score, or the rollout engine.

    design:  ``reference`` (every part aligned), ``each`` (every part but one), ``only`` (one part alone), ``all`` (none
             aligned: the trainer as it is), ``self`` (the reference again, other noise), ``factorial`` (another combination),
             ``rollout`` (the rollout engine under the same noise).
    name:    the part left out or aligned alone; ``reference``, ``all``, ``self`` and ``rollout`` carry their design's name,
             ``factorial`` the parts that are not aligned, joined by ``+``.
    aligned: the switches that are aligned.
    stack:   ``trainer`` or ``rollout``: whose forward it is.
    """

    design: str
    name: str
    aligned: tuple[Switch, ...]
    stack: str = "trainer"


ROLLOUT = Variant(design="rollout", name="rollout", aligned=(), stack="rollout")
Forward = tuple[str, tuple[Switch, ...], str, int]


@dataclass(frozen=True, kw_only=True)
class Replicate:
    """One forward to make: a variant under one noise draw.

    kind: ``ulp`` moves the embedding output by a random -1, 0 or +1 ULP per element; ``batch`` scores each sequence in an
    equivalent batch (other rows, other padding) drawn with ``seed``; ``order`` cuts the sums of some matrix products in two; ``none`` is the forward as it is, whatever the seed.
    The noise depends on ``(kind, seed)`` and the number of the sequence alone, never on the variant.
    """

    variant: Variant
    index: int
    seed: int
    kind: str = "ulp"

    @property
    def forward(self) -> Forward:
        """What decides the logprobs: replicates that agree in it are one forward, made once."""
        return self.variant.stack, self.variant.aligned, self.kind, 0 if self.kind == "none" else self.seed


# Replicates in; (replicate, logprobs [num_tokens] float64 in nats) out, in any order, each as soon as it is done, so that a
# scorer may reorder, batch and share work and every answer can be written as it comes. The logprobs of a replicate must not
# depend on what else is asked for in the same call: an interrupted attribution asks for the rest alone and must get equal bits.
Score = Callable[[Sequence[Replicate]], Iterator[tuple[Replicate, NDArray[np.float64]]]]


def layers_by_region(aligned: Iterable[Switch], num_layers: int) -> dict[str, tuple[int, ...]]:
    """The layers in which each region is aligned, ascending; ranges of one region are united. Regions left out are absent."""
    found: dict[str, set[int]] = {}
    for switch in aligned:
        found.setdefault(switch.region, set()).update(range(*(switch.layers or (0, num_layers))))
    return {region: tuple(sorted(layers)) for region, layers in found.items()}


def parts_of(
    regions: Sequence[str], *, by: Sequence[str] = ("region",), num_layers: int = 0, num_groups: int | None = None
) -> tuple[Part, ...]:
    """The parts of an attribution.

    by: ``("region",)``, ``("layer",)`` (all regions of a group of layers together) or ``("region", "layer")`` (each region in each
    group). num_groups: groups of layers, as equal as possible; None is 6, or 3 together with regions, or one per layer where there are fewer.
    """
    for word in by:
        if word not in BY:
            raise unknown_name("unit", word, BY)
    every = tuple(dict.fromkeys(regions))
    if "layer" not in by:
        return tuple(Part(name=r, switches=(Switch(region=r),)) for r in every)
    body, head = [r for r in every if r not in HEAD_REGIONS], [r for r in every if r in HEAD_REGIONS]
    wanted = num_groups or NUM_LAYER_GROUPS[("region", "layer") if "region" in by else ("layer",)]
    ranges = layer_groups(num_layers, min(wanted, num_layers)) if body else []
    if "region" in by:
        split = [
            Part(name=f"{r} {_range_name(g)}", switches=(Switch(region=r, layers=g),)) for r in body for g in ranges
        ]
    else:
        split = [Part(name=_range_name(g), switches=tuple(Switch(region=r, layers=g) for r in body)) for g in ranges]
    return (*split, *(Part(name=r, switches=(Switch(region=r),)) for r in head))


def layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """Half-open ranges that cover the layers in order, sizes differing by at most one."""
    if not 1 <= num_groups <= num_layers:
        raise UsageError(f"{num_layers} layers cannot be cut into {num_groups} groups")
    edges = [round(i * num_layers / num_groups) for i in range(num_groups + 1)]
    return list(itertools.pairwise(edges))


def _range_name(layers: tuple[int, int]) -> str:
    first, last = layers[0], layers[1] - 1
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def variants_of(parts: Sequence[Part], *, interactions: bool = False) -> list[Variant]:
    """The reference first, then every variant it is held against; with ``interactions`` also the points of the factorial design."""
    out = [_variant("reference", "reference", parts, ())]
    out += [_variant("each", p.name, parts, (p,)) for p in parts]
    if len(parts) > 1:
        out += [_variant("only", p.name, parts, [x for x in parts if x is not p]) for p in parts]
    out.append(_variant("all", "all", parts, parts))
    out.append(_variant("self", "self", parts, ()))
    if interactions:
        have = {v.aligned for v in out}
        for left in factorial_points(len(parts)):
            chosen = [p for p, x in zip(parts, left, strict=True) if x]
            point = _variant("factorial", "+".join(p.name for p in chosen), parts, chosen)
            if point.aligned not in have:
                out.append(point)
    return out


def _variant(design: str, name: str, parts: Sequence[Part], left: Sequence[Part]) -> Variant:
    """The variant in which every part but those of ``left`` is aligned."""
    names = {p.name for p in left}
    return Variant(design=design, name=name, aligned=tuple(s for p in parts if p.name not in names for s in p.switches))


# Generators of two-level fractional factorials of resolution V or higher, which leave main effects and two-way interactions clear
# of one another: {number of factors: {added factor: factors whose product it is}} (Box, Hunter and Hunter 1961, table of 2^(k-p) designs).
_GENERATORS: Mapping[int, Mapping[int, tuple[int, ...]]] = {
    5: {4: (0, 1, 2, 3)},
    6: {5: (0, 1, 2, 3, 4)},
    7: {6: (0, 1, 2, 3, 4, 5)},
    8: {6: (0, 1, 2, 3), 7: (0, 1, 4, 5)},
}


def factorial_points(num_factors: int) -> list[tuple[bool, ...]]:
    """Combinations to score, True where a part is left unaligned: all of them up to four parts, a resolution V fraction up to eight."""
    if not 2 <= num_factors <= MAX_FACTORS:
        raise UsageError(
            f"--interactions needs 2 to {MAX_FACTORS} parts, got {num_factors}",
            detail=f"a design that keeps two-way interactions apart has {2 ** min(num_factors, MAX_FACTORS - 2)} points or more",
            hint="name fewer regions with --regions, or ask --by region",
        )
    added = _GENERATORS.get(num_factors, {})
    base = [i for i in range(num_factors) if i not in added]
    points = []
    for signs in itertools.product((-1, 1), repeat=len(base)):
        sign = dict(zip(base, signs, strict=True))
        for factor, words in added.items():
            sign[factor] = int(np.prod([sign[w] for w in words]))
        points.append(tuple(sign[i] > 0 for i in range(num_factors)))
    return points


def replicates_of(
    variants: Sequence[Variant], indices: Iterable[int], *, seed: int, kind: str = "ulp"
) -> Iterator[Replicate]:
    """The forwards of some replicate numbers, variant by variant.

    Replicate k of every variant uses the same noise, so that a variant that changes nothing gives exactly
    zero; only the self-control draws other noise, which is what makes it a control.
    """
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    numbers = tuple(indices)
    for variant in variants:
        offset = SELF_OFFSET if variant.design == "self" else 0
        offset += CONFIRM_OFFSET if kind in CONFIRMING else 0
        for k in numbers:
            yield Replicate(variant=variant, index=k, seed=seed + offset + k, kind=kind)


def check_num_replicates(num_replicates: int) -> int:
    """A number of replicates from which a variance can be estimated."""
    if num_replicates < MIN_REPLICATES:
        raise UsageError(
            f"--replicates must be at least {MIN_REPLICATES}, got {num_replicates}",
            detail="the systematic part is separated from chaos by the spread over replicates",
            hint="8 shows strong effects; 32 is what published figures use",
        )
    return num_replicates
