"""Statistics of every site pooled over prompts; its size does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rpadiag.bits import UlpStats
from rpadiag.compare.experts import Flips
from rpadiag.sites import POINTS, REGIONS, split_site, telling_points


@dataclass(kw_only=True)
class SiteTotals:
    """Pooled statistics of one site: propagated (``total``) and fed the other stack's input (``local``).

    flips: of a router, tokens that the stacks send to different experts.
    """

    total: UlpStats | None = None
    local: UlpStats | None = None
    local_reason: str | None = None
    flips: Flips | None = None


@dataclass(kw_only=True)
class Aggregate:
    """Sites in execution order with their pooled statistics, for one precision."""

    sites: dict[str, SiteTotals] = field(default_factory=dict)

    def add(
        self,
        site: str,
        *,
        total: UlpStats | None = None,
        local: UlpStats | None = None,
        local_reason: str | None = None,
        flips: Flips | None = None,
    ) -> None:
        """Merge one sequence's statistics of a site."""
        entry = self.sites.setdefault(site, SiteTotals())
        if total is not None:
            entry.total = total if entry.total is None else entry.total + total
        if local is not None:
            entry.local = local if entry.local is None else entry.local + local
        if local_reason is not None:
            entry.local_reason = local_reason
        if flips is not None:
            entry.flips = flips if entry.flips is None else entry.flips + flips

    def merge(self, other: Aggregate) -> None:
        """Add the statistics of other sequences."""
        for site, entry in other.sites.items():
            self.add(site, total=entry.total, local=entry.local, local_reason=entry.local_reason, flips=entry.flips)

    def first_divergent(self) -> str | None:
        """First site in execution order where any element differs."""
        return next((s for s, e in self.sites.items() if e.total is not None and e.total.num_differing > 0), None)

    def local_by_point(self) -> dict[str, UlpStats]:
        """Local statistics pooled over layers, by point name."""
        return self._pooled(local=True)

    def total_by_point(self) -> dict[str, UlpStats]:
        """Propagated statistics pooled over layers, by point name."""
        return self._pooled(local=False)

    def local_by_region(self) -> dict[str, UlpStats]:
        """Local statistics pooled over layers and the telling points of each region."""
        by_point = self.local_by_point()
        out: dict[str, UlpStats] = {}
        for region in REGIONS:
            for point in telling_points(region):
                if point in by_point:
                    out[region] = out[region] + by_point[point] if region in out else by_point[point]
        return out

    def locals(self) -> Iterator[tuple[str, UlpStats]]:
        """(site, local statistics) in execution order, where measured."""
        for site, entry in self.sites.items():
            if entry.local is not None:
                yield site, entry.local

    def _pooled(self, *, local: bool) -> dict[str, UlpStats]:
        out: dict[str, UlpStats] = {}
        for site, entry in self.sites.items():
            stats = entry.local if local else entry.total
            if stats is not None:
                point = split_site(site)[1]
                out[point] = out[point] + stats if point in out else stats
        return {p: out[p] for p in POINTS if p in out}
