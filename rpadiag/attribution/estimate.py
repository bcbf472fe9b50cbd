"""Estimates of the systematic part of a logprob gap, with standard errors.

For a variant v and the reference r, replicate k and token t give D[k, t] = logp_v - logp_r. Its mean over replicates
estimates the systematic difference b[t] = E[D[., t]]. The mean square of that mean is biased upwards by its own variance,
so per token the unbiased estimate of b[t]**2 is ``mean_k(D)**2 - var_k(D) / K`` (sample variance, K - 1). It can be negative;
it is not clipped, because clipping would turn noise into an effect.

Standard errors come from a delete-one jackknife over clusters: one sequence each, or blocks of tokens where there are
too few sequences. Tokens of a sequence share their noise, so they are never treated as independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_CLUSTERS = 8
BLOCK_TOKENS = 16
DETECTABLE_Z = 2.0
SELF_CONTROL_Z = 3.0
SATURATED_SHARE = 0.7

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Systematic part of one variant against the reference.

    systematic_sq: E[b^2] in nats^2, unbiased, may be negative. systematic_sq_se: its jackknife standard error.
    chaotic_rms: rms over tokens of the replicate spread of the variant itself, nats.
    mean_abs_d: mean |D| of single forwards, nats: what an end-to-end comparison would show.
    """

    systematic_sq: float
    systematic_sq_se: float
    chaotic_rms: float
    mean_abs_d: float
    num_replicates: int
    num_tokens: int
    num_clusters: int

    @property
    def z(self) -> float:
        """Estimate over its standard error; 0 when both vanish."""
        if self.systematic_sq_se == 0.0:
            return 0.0 if self.systematic_sq == 0.0 else float("inf")
        return self.systematic_sq / self.systematic_sq_se

    @property
    def detectable(self) -> bool:
        """More than two standard errors above zero."""
        return self.z > DETECTABLE_Z

    @property
    def systematic_rms(self) -> float:
        """Square root of the systematic part, nats; 0 where the estimate is negative."""
        return float(np.sqrt(max(self.systematic_sq, 0.0)))


def clusters_of(sequence_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cluster label per token, ``[num_tokens]``: the sequence, or blocks of 16 tokens below 8 sequences."""
    _, labels = np.unique(sequence_ids, return_inverse=True)
    if labels.max(initial=0) + 1 >= MIN_CLUSTERS:
        return labels.astype(np.int64)
    position = np.zeros_like(labels)
    for label in range(labels.max(initial=0) + 1):
        here = labels == label
        position[here] = np.arange(int(here.sum()))
    block = position // BLOCK_TOKENS
    _, blocked = np.unique(np.stack([labels, block]), axis=1, return_inverse=True)
    return blocked.reshape(-1).astype(np.int64)


def jackknife_mean(values: Floats, clusters: NDArray[np.int64]) -> tuple[float, float]:
    """Mean over tokens and its delete-one-cluster jackknife standard error."""
    sums = np.bincount(clusters, weights=values)
    counts = np.bincount(clusters).astype(np.float64)
    total, num_tokens, num_clusters = sums.sum(), counts.sum(), len(sums)
    mean = float(total / num_tokens)
    if num_clusters < 2:
        return mean, float("inf")
    left_out = (total - sums) / (num_tokens - counts)
    variance = (num_clusters - 1) / num_clusters * np.square(left_out - left_out.mean()).sum()
    return mean, float(np.sqrt(variance))


def estimate(variant: Floats, reference: Floats, sequence_ids: NDArray[np.int64]) -> Estimate:
    """Systematic part of ``variant`` against ``reference``, both logprobs ``[K, num_tokens]`` in nats."""
    if variant.shape != reference.shape or variant.ndim != 2 or variant.shape[1] != len(sequence_ids):
        raise ValueError(f"shapes differ: {variant.shape}, {reference.shape}, {len(sequence_ids)} sequence ids")
    num_replicates = variant.shape[0]
    difference = variant - reference
    mean = difference.mean(axis=0)
    per_token = np.square(mean) - difference.var(axis=0, ddof=1) / num_replicates
    clusters = clusters_of(sequence_ids)
    value, error = jackknife_mean(per_token, clusters)
    return Estimate(
        systematic_sq=value,
        systematic_sq_se=error,
        chaotic_rms=float(np.sqrt(variant.var(axis=0, ddof=1).mean())),
        mean_abs_d=float(np.abs(difference).mean()),
        num_replicates=num_replicates,
        num_tokens=variant.shape[1],
        num_clusters=int(clusters.max()) + 1,
    )


def self_control_holds(control: Estimate) -> bool:
    """The reference against itself must be zero within three standard errors, and the error must be known."""
    return bool(np.isfinite(control.systematic_sq_se)) and abs(control.z) <= SELF_CONTROL_Z


def is_saturated(each: Mapping[str, Estimate], everything: Estimate) -> bool:
    """Leaving one region out shows nearly the whole end-to-end gap for more than one region.

    Then mean |d| ranks nothing: any single difference already moves every logprob as far as all together.
    """
    if everything.mean_abs_d == 0.0:
        return False
    large = [e for e in each.values() if e.mean_abs_d >= SATURATED_SHARE * everything.mean_abs_d]
    return len(large) > 1
