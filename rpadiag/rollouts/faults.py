"""Data that look like a numerics mismatch and are something else: each fault recognised by its own sign, and named.

Rounding moves single tokens by a few hundredths of a nat in both directions, wherever they stand. What follows looks for
what rounding cannot do. First come faults of the data, after which no number means anything; then definitions of the
log-probability; then the weights and the prefix cache. A fault of an earlier kind hides the later ones, because a shifted column imitates them all.
Every limit is a named constant; docs/rollouts.md says what each sign is and what it was measured on.
"""

from __future__ import annotations

from dataclasses import replace

from rpadiag.findings import Finding
from rpadiag.rollouts import faults_data as data
from rpadiag.rollouts import faults_definition as definition
from rpadiag.rollouts import faults_weights as weights
from rpadiag.rollouts.observed import Observed


def recognise(seen: Observed) -> list[Finding]:
    """The faults found, earliest kind first; severity ``error`` where the numbers beside them must not be used as rounding."""
    found = [*data.lengths(seen), *data.ids(seen), *data.placeholder(seen), *data.above_zero(seen)]
    if any(f.code == "above-zero" for f in found):
        return [replace(f, rank=i) for i, f in enumerate(found)]
    found += [*data.shifted(seen)] or [*data.tails(seen)] or [*data.zero_filled(seen)]
    found = found or [*data.padding(seen)]
    if not found:
        found = [*definition.definitions(seen)]
    if not any(f.severity == "error" for f in found):
        found += [*weights.stale(seen), *weights.prefix_cache(seen)]
    found += [*data.doubled_start(seen), *data.positions(seen)]
    return [replace(f, rank=i) for i, f in enumerate(found)]
