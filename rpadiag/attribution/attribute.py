"""Runs an attribution: asks a scorer for every replicate and turns the answers into rows and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.design import (
    Score,
    Variant,
    check_num_replicates,
    parts_of,
    replicates_of,
    variants_of,
)
from rpadiag.attribution.estimate import Estimate, estimate, is_saturated, self_control_holds
from rpadiag.findings import Finding


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Estimates by variant; ``ranked`` is False when the self-control failed and nothing may be ranked."""

    estimates: Mapping[Variant, Estimate]
    local_differing: Mapping[str, float]
    ranked: bool
    saturated: bool

    def by_design(self, design: str) -> dict[str, Estimate]:
        """Region -> estimate of one design."""
        return {v.name: e for v, e in self.estimates.items() if v.design == design}

    def gain_of_aligning(self, region: str) -> tuple[float, float]:
        """Systematic part that aligning this region alone removes from the trainer as it is, and its error, nats^2.

        The error adds the two estimates' in quadrature, which is an upper bound: they share their noise.
        """
        everything = self.by_design("all")["all"]
        only = self.by_design("only").get(region)
        if only is None:
            return everything.systematic_sq, everything.systematic_sq_se
        error = float(np.hypot(everything.systematic_sq_se, only.systematic_sq_se))
        return everything.systematic_sq - only.systematic_sq, error

    def rows(self) -> list[dict[str, object]]:
        """Rows of ``attribution.parquet``, most systematic first within a design."""
        out = []
        for variant, e in sorted(self.estimates.items(), key=lambda item: -item[1].systematic_sq):
            out.append(
                {
                    "region": variant.name,
                    "design": variant.design,
                    "systematic_sq": e.systematic_sq,
                    "systematic_sq_se": e.systematic_sq_se,
                    "systematic_rms": e.systematic_rms,
                    "chaotic_rms": e.chaotic_rms,
                    "mean_abs_d": e.mean_abs_d,
                    "local_differing": self.local_differing.get(variant.name),
                    "num_replicates": e.num_replicates,
                    "num_tokens": e.num_tokens,
                    "detectable": e.detectable,
                }
            )
        return out


def attribute(
    score: Score,
    regions: Sequence[str],
    sequence_ids: NDArray[np.int64],
    *,
    num_replicates: int,
    seed: int = 0,
    local_differing: Mapping[str, float] | None = None,
) -> Attribution:
    """Score every replicate and estimate each variant against the reference.

    sequence_ids: sequence of each token, ``[num_tokens]``.
    """
    every = variants_of(parts_of(regions))
    scored: dict[Variant, dict[int, NDArray[np.float64]]] = {v: {} for v in every}
    numbers = range(check_num_replicates(num_replicates))
    for replicate, logprobs in score(list(replicates_of(every, numbers, seed=seed))):
        scored[replicate.variant][replicate.index] = np.asarray(logprobs, dtype=np.float64)
    stacked = {v: np.stack([rows[k] for k in numbers]) for v, rows in scored.items()}
    reference = next(rows for v, rows in stacked.items() if v.design == "reference")
    estimates = {v: estimate(rows, reference, sequence_ids) for v, rows in stacked.items() if v.design != "reference"}
    each = {v.name: e for v, e in estimates.items() if v.design == "each"}
    control = next(e for v, e in estimates.items() if v.design == "self")
    everything = next(e for v, e in estimates.items() if v.design == "all")
    return Attribution(
        estimates=estimates,
        local_differing=dict(local_differing or {}),
        ranked=self_control_holds(control),
        saturated=is_saturated(each, everything),
    )


def findings(result: Attribution) -> list[Finding]:
    """The attribution in plain words, most important first."""
    control = result.by_design("self")["self"]
    everything = result.by_design("all")["all"]
    each = sorted(result.by_design("each").items(), key=lambda item: -item[1].systematic_sq)
    out = [_control_finding(control, ranked=result.ranked)]
    if result.ranked:
        out += [_region_finding(region, e, result, rank=n) for n, (region, e) in enumerate(each)]
        out.append(_total_finding(everything, [e for _, e in each]))
    if result.saturated:
        shown = ", ".join(f"{region} {e.mean_abs_d:.3f}" for region, e in each)
        out.append(
            Finding(
                code="gap-saturated",
                severity="notice",
                text=f"The end-to-end gap is saturated: one region left unaligned moves logprobs by {shown} nats, all together by "
                f"{everything.mean_abs_d:.3f}. Mean |d| cannot rank regions; the systematic part can.",
                numbers={"mean_abs_d_all": everything.mean_abs_d},
                rank=20,
            )
        )
    return sorted(out, key=lambda f: f.rank)


def _control_finding(control: Estimate, *, ranked: bool) -> Finding:
    figures = f"{control.systematic_sq:.1e} ± {control.systematic_sq_se:.1e} nats² (n = {control.num_tokens})"
    if ranked:
        text = f"Self-control holds: the aligned forward against itself gives {figures}."
    elif not np.isfinite(control.systematic_sq_se):
        text = (
            f"No standard error: {control.num_tokens} tokens make {control.num_clusters} cluster. "
            "Regions are not ranked; use more prompts or longer ones."
        )
    else:
        text = (
            f"Self-control failed: the aligned forward against itself gives {figures}, not zero. "
            "Regions are not ranked; use more replicates or more tokens."
        )
    return Finding(
        code="self-control",
        severity="info" if ranked else "error",
        text=text,
        numbers={"systematic_sq": control.systematic_sq, "systematic_sq_se": control.systematic_sq_se},
        rank=50 if ranked else 0,
    )


def _region_finding(region: str, e: Estimate, result: Attribution, *, rank: int) -> Finding:
    figures = f"{e.systematic_sq:.1e} ± {e.systematic_sq_se:.1e} nats² (n = {e.num_tokens}, K = {e.num_replicates})"
    local = result.local_differing.get(region)
    made = "" if local is None else f" and {100 * local:.1f} % of its elements differ when fed the same input"
    gain, error = result.gain_of_aligning(region)
    if e.detectable:
        text = f"{region}: systematic {figures}{made}; aligning it alone removes {gain:.1e} ± {error:.1e} nats²."
    else:
        text = f"{region}: systematic {figures} cannot be told from zero{made}."
    return Finding(
        code="systematic-region",
        severity="warning" if e.detectable else "info",
        text=text,
        region=region,
        numbers={
            "systematic_sq": e.systematic_sq,
            "systematic_sq_se": e.systematic_sq_se,
            "chaotic_rms": e.chaotic_rms,
            "gain_of_aligning_sq": gain,
            "gain_of_aligning_sq_se": error,
            "local_differing": local,
        },
        rank=1 + rank,
    )


def _total_finding(everything: Estimate, each: Sequence[Estimate]) -> Finding:
    parts = sum(e.systematic_sq for e in each)
    error = float(np.sqrt(sum(e.systematic_sq_se**2 for e in each)))
    return Finding(
        code="systematic-total",
        severity="info",
        text=f"All regions together: systematic {everything.systematic_sq:.1e} ± {everything.systematic_sq_se:.1e} nats²; "
        f"the parts sum to {parts:.1e} ± {error:.1e}. Chaotic level {everything.chaotic_rms:.3f} nats rms per token.",
        numbers={
            "systematic_sq": everything.systematic_sq,
            "systematic_sq_se": everything.systematic_sq_se,
            "sum_of_parts_sq": parts,
            "chaotic_rms": everything.chaotic_rms,
        },
        rank=10,
    )
