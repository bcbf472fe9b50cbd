"""Main effects and two-way interactions from a two-level factorial design, with standard errors.

With x_i = +1 where part i is not aligned and -1 where it is, the contrast of part i over the P points of the design is
``2/P sum(x_i logp)``: what leaving the part unaligned changes, averaged over all states of the others. That of a pair is
``2/P sum(x_i x_j logp)``: half of the difference that the state of j makes to the effect of i. Every contrast is taken within a
replicate, so K replicates give K independent draws of it, and its systematic part is estimated as everywhere else.

A full factorial of P points estimates a main effect with 4/P of a forward's noise variance, where one-at-a-time has 2.
Fractions are of resolution V: a contrast is clear of all others of at most two parts, and contaminated only by interactions of three and more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.estimate import unbiased_square
from rpadiag.attribution.resample import Measured, Sequences, holm, jackknife

NEGLIGIBLE = 1e-12  # nats

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """parts: one name for a main effect, two for an interaction. systematic_sq: unbiased E[contrast^2], nats^2. shift: its mean, nats.

    p_adjusted: Holm over all contrasts of the same number of parts. sums: the unbiased square summed over each sequence, ``[G]``.
    """

    parts: tuple[str, ...]
    systematic_sq: Measured
    shift: Measured
    p_adjusted: float
    num_points: int
    sums: Floats = field(repr=False, compare=False)


def contrasts(names: Sequence[str], points: Mapping[tuple[bool, ...], Floats], sequences: Sequences) -> list[Contrast]:
    """Main effects in order of ``names``, then pairs. points: (True where a part is not aligned) -> logprobs ``[K, N]``."""
    out: list[Contrast] = []
    for size in (1, 2):
        found = {
            chosen: _contrast(chosen, points, sequences) for chosen in itertools.combinations(range(len(names)), size)
        }
        adjusted = holm([square.p_above for square, _, _ in found.values()])
        out += [
            Contrast(
                parts=tuple(names[i] for i in chosen),
                systematic_sq=square,
                shift=shift,
                p_adjusted=p,
                num_points=len(points),
                sums=sums,
            )
            for (chosen, (square, shift, sums)), p in zip(found.items(), adjusted, strict=True)
        ]
    return out


def _contrast(
    chosen: Sequence[int], points: Mapping[tuple[bool, ...], Floats], sequences: Sequences
) -> tuple[Measured, Measured, Floats]:
    draws: Floats = np.zeros_like(next(iter(points.values())))
    for state, logprobs in points.items():
        sign = np.prod([1 if state[i] else -1 for i in chosen])
        draws += 2 * sign / len(points) * logprobs
    draws[np.abs(draws) < NEGLIGIBLE] = 0.0  # what is left of float64 sums that cancel
    rows = [sequences.sums(unbiased_square(draws)), sequences.sums(draws.mean(axis=0)), sequences.counts]
    square, shift = jackknife(lambda s: s[:2] / s[2], np.stack(rows))
    return square, shift, rows[0]
