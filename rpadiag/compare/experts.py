"""Which experts a router chooses, and where the two stacks choose different ones.

A flipped choice is no rounding: the token goes through other weights, and its elements differ by as much as two experts do.
It is therefore counted, by tokens, and not mixed into distances in ULP. Both stacks' choices are made here from their router
logits by one rule, so that equal logits never count as a flip; where the logits leave the choice open (the k-th and the next
are equal) the token is counted as a tie.

Shape legend: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rpadiag.findings import Finding

if TYPE_CHECKING:
    from rpadiag.compare.aggregate import Aggregate

FLIP_COLUMNS = ("expert_flips", "expert_ties", "local_expert_flips")


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Counts over tokens, which add up.

    num_flips: tokens whose set of experts differs. num_ties: tokens whose choice the logits leave open on either stack; they
    are among the flips only where the sets differ whichever of the equal experts is taken. num_local_flips: flips of the
    trainer's router fed the rollout engine's input; None where not measured.
    """

    num_tokens: int = 0
    num_flips: int = 0
    num_ties: int = 0
    num_local_flips: int | None = None

    def __add__(self, other: Flips) -> Flips:
        local = [n for n in (self.num_local_flips, other.num_local_flips) if n is not None]
        return Flips(
            num_tokens=self.num_tokens + other.num_tokens,
            num_flips=self.num_flips + other.num_flips,
            num_ties=self.num_ties + other.num_ties,
            num_local_flips=sum(local) if local else None,
        )

    def columns(self) -> dict[str, int | None]:
        """Values of FLIP_COLUMNS."""
        return dict(zip(FLIP_COLUMNS, (self.num_flips, self.num_ties, self.num_local_flips), strict=True))


def on_line(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Logits as numbers that compare as they do: bit patterns of bfloat16 become the points of its ordered line."""
    if logits.dtype not in (np.dtype(np.uint16), np.dtype(np.int16)):
        return logits
    bits = logits.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def tied_tokens(logits: npt.NDArray[Any], experts_per_token: int) -> npt.NDArray[np.bool_]:
    """bool [T]: whether the last expert chosen and the first one left out have equal logits [T, E]."""
    sure, maybe = _chosen(logits, experts_per_token)
    tied: npt.NDArray[np.bool_] = (sure != maybe).any(-1)
    return tied


def count_flips(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], experts_per_token: int) -> Flips:
    """Flips between two stacks' router logits [T, E] (numbers, or bit patterns of bfloat16)."""
    sure_a, maybe_a = _chosen(ours, experts_per_token)
    sure_b, maybe_b = _chosen(theirs, experts_per_token)
    # no choice serves both: an expert that one stack surely takes is one that the other surely leaves
    flipped = (sure_a & ~maybe_b).any(-1) | (sure_b & ~maybe_a).any(-1)
    ties = (sure_a != maybe_a).any(-1) | (sure_b != maybe_b).any(-1)
    return Flips(num_tokens=len(ours), num_flips=int(flipped.sum()), num_ties=int(ties.sum()))


def _chosen(logits: npt.NDArray[Any], experts_per_token: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """bool [T, E] twice: experts that are chosen however ties are broken, and those that may be."""
    line = on_line(logits)
    if line.shape[1] <= experts_per_token:
        every = np.ones(line.shape, bool)
        return every, every
    order = np.sort(line, axis=-1)[:, ::-1]
    last, next_one = order[:, experts_per_token - 1, None], order[:, experts_per_token, None]
    return line > next_one, line >= last


def flip_findings(model: Aggregate, control: Aggregate | None) -> list[Finding]:
    """One sentence over all layers, if the model has experts."""
    total = _pooled(model)
    if total is None:
        return []
    layers = sum(1 for entry in model.sites.values() if entry.flips is not None)
    text = (
        f"Expert choice: the stacks send {total.num_flips:,} of {total.num_tokens:,} (token, layer) pairs to another set of experts "
        f"({100 * total.num_flips / max(total.num_tokens, 1):.2g} %, {layers} layers with experts)"
    )
    if total.num_local_flips is not None:
        text += f", {total.num_local_flips:,} of them made by the router itself when fed the same input"
    numbers: dict[str, Any] = {
        "num_flips": total.num_flips,
        "num_choices": total.num_tokens,
        "num_local_flips": total.num_local_flips,
        "num_ties": total.num_ties,
        "by_site": _by_site(model),
    }
    in_fp32 = _pooled(control) if control is not None else None
    if in_fp32 is not None:
        text += f"; in FP32 {in_fp32.num_flips:,} of {in_fp32.num_tokens:,}"
        numbers |= {"num_flips_fp32": in_fp32.num_flips, "num_choices_fp32": in_fp32.num_tokens}
    if total.num_ties:
        text += (
            f"; {total.num_ties:,} pairs have equal logits at the boundary, where each stack takes the expert it likes"
        )
    worse = total.num_flips > 0
    return [
        Finding(
            code="expert-flips",
            severity="warning" if worse else "info",
            region="experts",
            text=f"{text}.",
            numbers=numbers,
            rank=2 if worse else 8,
        )
    ]


def _pooled(aggregate: Aggregate) -> Flips | None:
    found = [entry.flips for entry in aggregate.sites.values() if entry.flips is not None]
    return sum(found[1:], found[0]) if found else None


def _by_site(aggregate: Aggregate) -> Mapping[str, int]:
    return {s: e.flips.num_flips for s, e in aggregate.sites.items() if e.flips is not None and e.flips.num_flips}
