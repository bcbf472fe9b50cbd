"""What an attribution will ask for, in which order, and what has been answered so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.design import (
    ROLLOUT,
    Forward,
    Part,
    Replicate,
    Variant,
    check_num_replicates,
    factorial_points,
    replicates_of,
    variants_of,
)
from rpadiag.errors import UsageError

ROUND = 4  # replicates of every variant between two looks of the stopping rule, unless the scorer makes more at a time
CONFIRMED_DESIGNS = ("reference", "each", "all")

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The forwards of an attribution. What ``--resume`` continues is the same plan.

    num_replicates: of every variant; with ``precision`` the most that there may be. precision: stop when the standard error of the
    strongest part is below this share of it; None makes all replicates. round_size: replicates between two looks. interactions: a factorial
    design beside one-at-a-time.
    confirm: the second kind of noise, ``confirm_kind``, for the reference, every part alone and all together. rollout: the rollout
    engine under the same noise too.
    """

    parts: tuple[Part, ...]
    num_replicates: int
    seed: int = 0
    precision: float | None = None
    interactions: bool = False
    confirm: bool = False
    round_size: int = ROUND
    confirm_kind: str = "batch"
    rollout: bool = False

    def __post_init__(self) -> None:
        check_num_replicates(self.num_replicates)
        if self.precision is not None and not 0 < self.precision < 1:
            raise UsageError(f"--precision must be between 0 and 1, not {self.precision:g}", hint="--precision 0.2")

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        found = variants_of(self.parts, interactions=self.interactions)
        return (*found, ROLLOUT) if self.rollout else tuple(found)

    def named(self, design: str, name: str | None = None) -> Variant:
        """The variant of a design; ``only`` of a single part is the reference."""
        if design == "only" and len(self.parts) == 1:
            design, name = "reference", None
        return next(v for v in self.variants if v.design == design and name in (None, v.name))

    @cached_property
    def points(self) -> dict[tuple[bool, ...], Variant]:
        """Points of the factorial design (True where a part is not aligned) and the variants that are them."""
        if not self.interactions:
            return {}
        by_aligned = {v.aligned: v for v in reversed(self.variants) if v.design not in ("self", "rollout")}
        out = {}
        for left in factorial_points(len(self.parts)):
            aligned = tuple(s for p, x in zip(self.parts, left, strict=True) if not x for s in p.switches)
            out[left] = by_aligned[aligned]
        return out

    @cached_property
    def rounds(self) -> tuple[range, ...]:
        """Replicate numbers between two looks; a single round without ``precision``. The last one may be shorter, never a single replicate first."""
        if self.precision is None:
            return (range(self.num_replicates),)
        starts = range(0, self.num_replicates, self.round_size)
        return tuple(range(s, min(s + self.round_size, self.num_replicates)) for s in starts)

    def unperturbed(self) -> list[Replicate]:
        """The reference, the trainer as it is and the rollout engine without noise, to check that noise shifts no mean."""
        chosen = [self.named("reference"), self.named("all"), *([ROLLOUT] if self.rollout else [])]
        return list(replicates_of(chosen, (0,), seed=0, kind="none"))

    def of_round(self, numbers: range) -> list[Replicate]:
        """The forwards of one round; the first has the unperturbed ones too."""
        first = self.unperturbed() if numbers.start == 0 else []
        return first + list(replicates_of(self.variants, numbers, seed=self.seed))

    def confirmations(self, num_replicates: int) -> list[Replicate]:
        """The forwards under the second kind of noise, as many of each as the first kind took."""
        if not self.confirm:
            return []
        chosen = [v for v in self.variants if v.design in CONFIRMED_DESIGNS]
        return list(replicates_of(chosen, range(num_replicates), seed=self.seed, kind=self.confirm_kind))

    def replicates(self) -> Iterator[Replicate]:
        """Every replicate that may be asked for, the same forward possibly under several names."""
        for numbers in self.rounds:
            yield from self.of_round(numbers)
        yield from self.confirmations(self.num_replicates)

    @cached_property
    def num_forwards(self) -> int:
        """The most forwards there will be, each once."""
        return len({r.forward for r in self.replicates()})


class Collected:
    """Logprobs by the forward they came from, ``[N]`` each; the same forward asked for under two names is made once."""

    def __init__(self, done: Iterable[tuple[Replicate, Floats]] = ()) -> None:
        self._logprobs: dict[Forward, Floats] = {}
        for replicate, logprobs in done:
            self.add(replicate, logprobs)

    def __len__(self) -> int:
        return len(self._logprobs)

    def add(self, replicate: Replicate, logprobs: Floats) -> None:
        self._logprobs[replicate.forward] = np.asarray(logprobs, dtype=np.float64)

    def missing(self, replicates: Iterable[Replicate]) -> list[Replicate]:
        """Those not answered yet, one per forward, in order."""
        first: dict[Forward, Replicate] = {}
        for replicate in replicates:
            if replicate.forward not in self._logprobs:
                first.setdefault(replicate.forward, replicate)
        return list(first.values())

    def logprobs(self, replicate: Replicate) -> Floats:
        return self._logprobs[replicate.forward]

    def stack(self, variant: Variant, num: int, *, seed: int, kind: str = "ulp") -> Floats:
        """Replicates 0 to ``num`` - 1 of a variant, ``[K, N]``."""
        return np.stack([self.logprobs(r) for r in replicates_of((variant,), range(num), seed=seed, kind=kind)])

    def finite_tokens(self) -> NDArray[np.bool_]:
        """Tokens whose logprob is finite in every forward, ``[N]``."""
        out: NDArray[np.bool_] = np.logical_and.reduce([np.isfinite(x) for x in self._logprobs.values()])
        return out
