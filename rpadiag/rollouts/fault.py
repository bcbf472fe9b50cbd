"""What every recogniser of a fault needs: the kinds of faults, and a fault as a finding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.findings import Finding

Floats = NDArray[np.float64]

KINDS = {
    "retokenised": "data",
    "shifted": "data",
    "zero-filled": "data",
    "placeholder": "data",
    "above-zero": "data",
    "double-bos": "data",
    "left-padding": "positions",
    "temperature": "definition",
    "truncated-support": "definition",
    "not-sampled-from": "definition",
    "stale-weights": "weights",
    "prefix-cache": "weights",
}

MIN_SEQUENCES = 8  # below, means of sequences say nothing


def fault(code: str, text: str, *, severity: str = "error", **numbers: Any) -> Finding:
    assert code in KINDS
    return Finding(code=code, severity=severity, text=text, numbers=numbers)


def ranks(x: Floats) -> Floats:
    """Ranks, ties sharing their mean."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)


def correlation(x: Floats, y: Floats) -> float:
    """Rank correlation; 0 where one side is constant."""
    a, b = ranks(x), ranks(y)
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else 0.0
