"""Synthetic logprobs with a known answer: saturating chaos with planted systematic parts.

As measured on real models: whatever differs between two forwards (one region, all of them, one flipped bit of the embedding) gives every
logprob a fresh chaotic offset of the same size, heavy-tailed over tokens and shared in part by the tokens of a sequence;
under it lies a small fixed difference for each part that is not aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rpadiag.attribution.design import Part, Replicate


@dataclass(frozen=True, kw_only=True)
class World:
    """A trainer that exists on paper.

    systematic: part -> rms of its systematic difference, nats. shifts: part -> mean of it, nats (the rest has mean zero).
    interactions: pairs -> rms of what only both together do. inert: parts whose switch changes nothing. chaos: rms of the chaotic
    offset, nats. shared: share of its variance that the tokens of a sequence have in common. noise_shift: what the perturbation itself
    adds to every logprob, nats (0 for an honest one). control_shift: a difference that only the self-control shows. engine: rms of what the
    rollout engine has beside the parts, nats; it has every part aligned.
    """

    parts: Sequence[Part]
    systematic: Mapping[str, float] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)
    interactions: Mapping[tuple[str, str], float] = field(default_factory=dict)
    inert: Sequence[str] = ()
    num_sequences: int = 24
    num_tokens: int = 40
    chaos: float = 0.045
    shared: float = 0.05
    noise_shift: float = 0.0
    control_shift: float = 0.0
    batch_only: Mapping[str, float] = field(default_factory=dict)
    engine: float = 0.0
    seed: int = 0

    @property
    def n(self) -> int:
        return self.num_sequences * self.num_tokens

    @property
    def sequence_ids(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_sequences), self.num_tokens)

    @cached_property
    def base(self) -> np.ndarray:
        return -np.random.default_rng([self.seed, 1]).exponential(1.9, self.n)

    @cached_property
    def scale(self) -> np.ndarray:
        """Chaotic rms of each token; its mean square is chaos^2."""
        raw = np.exp(0.5 * np.random.default_rng([self.seed, 2]).standard_normal(self.n))
        return self.chaos * raw / np.sqrt(np.mean(raw**2))

    def field_of(self, name: str, rms: float, shift: float = 0.0) -> np.ndarray:
        """The systematic difference of a part, ``[n]``, with exactly this root mean square and mean."""
        drawn = np.random.default_rng([self.seed, 3, *name.encode()]).standard_t(5, self.n)
        drawn = drawn - drawn.mean()
        spread = np.sqrt(max(rms**2 - shift**2, 0.0))
        return shift + spread * drawn / np.sqrt(np.mean(drawn**2))

    def left(self, replicate: Replicate) -> frozenset[str]:
        """Names of the parts that are not aligned."""
        if replicate.variant.stack == "rollout":
            return frozenset()
        aligned = set(replicate.variant.aligned)
        return frozenset(p.name for p in self.parts if not set(p.switches) <= aligned)

    def logprobs(self, replicate: Replicate) -> np.ndarray:
        left = self.left(replicate)
        out = self.base.copy()
        for name in left:
            rms = self.systematic.get(name, 0.0) + (
                self.batch_only.get(name, 0.0) if replicate.kind == "batch" else 0.0
            )
            out += self.field_of(name, rms, self.shifts.get(name, 0.0))
        for pair, rms in self.interactions.items():
            if set(pair) <= left:
                out += self.field_of("+".join(pair), rms)
        if replicate.kind == "ulp":
            out += self.noise_shift
        if replicate.variant.design == "self":
            out += self.control_shift
        active = "+".join(sorted(left - set(self.inert)))
        if replicate.variant.stack == "rollout" and self.engine:
            out += self.field_of("engine", self.engine)
            active = "engine"
        seed = 0 if replicate.kind == "none" else replicate.seed
        rng = np.random.default_rng([self.seed, seed, *replicate.kind.encode(), 9, *active.encode()])
        per_sequence = np.repeat(rng.standard_normal(self.num_sequences), self.num_tokens)
        own = rng.standard_normal(self.n)
        return out + self.scale * (np.sqrt(self.shared) * per_sequence + np.sqrt(1 - self.shared) * own)

    def score(self, replicates: Sequence[Replicate]) -> Iterator[tuple[Replicate, np.ndarray]]:
        """In an order of its own, as a scorer that batches does."""
        order = np.random.default_rng(len(replicates)).permutation(len(replicates))
        for i in order:
            yield replicates[i], self.logprobs(replicates[i])
