"""Sequences that drift as wholes, and sequences that a prefix cache served: other weights, not rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rpadiag.findings import Finding
from rpadiag.rollouts.fault import MIN_SEQUENCES, Floats, correlation, fault
from rpadiag.rollouts.observed import EARLY, Observed

DRIFT = 8.0  # variance of sequence means over what independent tokens would give
DRIFT_NATS = 0.02  # root mean square of sequence means, nats
STALE_RATIO = 1.5  # mean |d| of the stalest tokens over the freshest
CACHE_RATIO = 3.0


def stale(seen: Observed) -> Iterator[Finding]:
    rows = seen.columns()
    own = rows["abs_d"] / rows["n"] if len(rows["n"]) else rows["n"]
    if "version" in rows and "step" in rows and len(own) >= MIN_SEQUENCES:
        behind = rows["step"] - rows["version"]
        known = np.isfinite(behind)
        ages = np.unique(behind[known])
        if len(ages) >= 2:
            means = [
                float(rows["abs_d"][known & (behind == a)].sum() / rows["n"][known & (behind == a)].sum()) for a in ages
            ]
            if means[-1] >= STALE_RATIO * means[0] and correlation(behind[known], own[known]) > 0.3:
                yield fault(
                    "stale-weights",
                    f"Stale weights: mean |d| grows with the age of the weights that sampled, from {means[0]:.3g} nats at {ages[0]:g} steps behind to {means[-1]:.3g} at "
                    f"{ages[-1]:g} ({int(known.sum()):,} sequences). That part is learning, not rounding.",
                    ages=ages.tolist(), mean_abs_d=means,
                )  # fmt: skip
                return
    if len(own) < MIN_SEQUENCES:
        return
    n, total = rows["n"], rows["d"]
    mean = float(total.sum() / n.sum())
    variance = float(rows["sq_d"].sum() / n.sum()) - mean**2
    spread = float(np.sum((total - mean * n) ** 2) / n.sum())
    over = spread / max(variance, 1e-300)
    drift = math.sqrt(float(np.average((total / n) ** 2, weights=n)))
    if over >= DRIFT and drift >= DRIFT_NATS:
        yield fault(
            "stale-weights",
            f"Weights or contexts differ: whole sequences drift, their mean d varies {over:.0f} times as much as independent tokens would make it (root mean square {drift:.3g} "
            f"nats, {len(n):,} sequences). Rounding does not do that; stale weights, an adapter on one side, or other prompts do.",
            overdispersion=over, drift=drift,
        )  # fmt: skip


def prefix_cache(seen: Observed) -> Iterator[Finding]:
    rows = seen.columns()
    if len(rows["n"]) < MIN_SEQUENCES:
        return
    own = rows["abs_d"] / rows["n"]
    if "cached" in rows:
        yield from _cached(own, rows["cached"] > 0, "that took prompt tokens from the cache", "that took none")
        return
    first_seen: set[bytes] = set()
    again = np.zeros(seen.num_sequences, bool)
    for i, digest in enumerate(seen.prompts):
        again[i] = digest in first_seen
        first_seen.add(digest)
    which = again[rows["sequence"].astype(np.int64)]
    yield from _cached(own, which, "whose prompt came before", "that are the first of their prompt")
    if seen.early_n[EARLY] >= 100 and seen.early_n[0] >= MIN_SEQUENCES:
        start = seen.early_abs[0] / seen.early_n[0]
        rest = seen.early_abs[8:].sum() / seen.early_n[8:].sum()
        if start >= 2 * CACHE_RATIO * rest and start > 0.1:
            yield fault(
                "prefix-cache",
                f"Prefix cache: the first scored token of a sequence is {start / rest:.0f} times as far apart as later ones ({start:.3g} against {rest:.3g} nats). What comes "
                "before it was computed another way: from a cache of other weights, or in another chunk.",
                severity="warning", first=start, rest=rest,
            )  # fmt: skip


def _cached(own: Floats, which: NDArray[np.bool_], those: str, others: str) -> Iterator[Finding]:
    if which.sum() < MIN_SEQUENCES or (~which).sum() < MIN_SEQUENCES:
        return
    a, b = own[which], own[~which]
    ratio = float(np.median(a)) / max(float(np.median(b)), 1e-12)
    if ratio >= CACHE_RATIO and np.median(a) > 0.05 and np.quantile(a, 0.25) > np.quantile(b, 0.75):
        yield fault(
            "prefix-cache",
            f"Prefix cache: sequences {those} are {ratio:.1f} times as far apart as those {others} (median of mean |d| {np.median(a):.3g} against {np.median(b):.3g} nats; "
            f"{len(a)} and {len(b)} sequences). The cache holds keys and values of other weights or another precision: clear it at every weight sync.",
            ratio=ratio,
        )  # fmt: skip
