"""What one variant of the trainer does to logprobs, as unbiased estimates with standard errors.

For a variant v and the reference r, replicate k and token t give D[k, t] = logp_v - logp_r. Its mean over replicates
estimates the systematic difference b[t] = E[D[., t]]. The mean square of that mean is biased upwards by its own variance,
so per token the unbiased estimate of b[t]**2 is ``mean_k(D)**2 - var_k(D) / K`` (sample variance, K - 1), which is the mean over
all pairs of different replicates of D[k] D[l]. It can be negative; it is not clipped, because clipping would turn noise into an effect.

The same estimator gives the systematic part of the importance weight, E[rho - 1]**2 with rho = exp(D) (the variant as trainer, the
reference as rollout), and of the sum of D over a sequence, the logarithm of the sequence's ratio.

Shape legend: K replicates, N tokens, G sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.resample import Measured, Sequences, jackknife
from rpadiag.compare.metrics import k3

Floats = NDArray[np.float64]

# Sums over sequences that an Estimate keeps, all of token means over replicates unless said otherwise.
SUMS = (
    "tokens",  # number of tokens
    "systematic_sq",  # unbiased b^2
    "shift",  # D
    "abs_d",  # |D|
    "k3",  # k3(D)
    "chaotic_sq",  # variance of the variant itself over replicates
    "noise_sq",  # variance of D over replicates
    "weight",  # rho - 1
    "weight_sq",  # unbiased E[rho - 1]^2
    "noise_linear",  # 4 b^2 var(D): the part of the estimator's variance that falls with 1/K
    "noise_quadratic",  # 2 var(D)^2: the part that falls with 1/(K (K - 1))
    "sequences",  # 1
    "sequence_sq",  # unbiased square of the sequence's mean sum of D
    "sequence_noise_sq",  # variance over replicates of the sequence's sum of D
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One variant against the reference. Squares are per token unless "sequence" is in their name.

    systematic_sq: E[b^2], nats^2; may be negative. mean_shift: E[b], nats; positive = the variant finds the tokens more likely.
    chaotic_rms: rms over tokens of the replicate spread of the variant itself, nats.
    mean_abs_d: mean |D| of single forwards, nats: what an end-to-end comparison shows; it saturates.
    k3_kl: mean of exp(D) - 1 - D, nats. k3_kl_systematic: its systematic part E[b^2] / 2, exact to second order in D.
    k3_kl_chaotic: the rest. weight_bias: mean of rho - 1 over tokens and replicates. weight_bias_sq: unbiased mean square over
    tokens of E[rho - 1]. sequence_sq: unbiased mean square over sequences of E[log ratio of the sequence], nats^2.
    sequence_chaotic_rms: rms spread of that logarithm over replicates, nats.
    sums: the sums per sequence ``[G]`` behind all of them, by name of SUMS, for joint errors with other variants.
    """

    systematic_sq: Measured
    mean_shift: Measured
    chaotic_rms: Measured
    mean_abs_d: Measured
    k3_kl: Measured
    k3_kl_systematic: Measured
    k3_kl_chaotic: Measured
    weight_bias: Measured
    weight_bias_sq: Measured
    sequence_sq: Measured
    sequence_chaotic_rms: Measured
    num_replicates: int
    num_tokens: int
    num_sequences: int
    sums: Mapping[str, Floats] = field(repr=False)

    @property
    def systematic_rms(self) -> float:
        """Square root of the systematic part, nats; 0 where the estimate is negative."""
        return float(np.sqrt(max(self.systematic_sq.value, 0.0)))

    @property
    def is_zero(self) -> bool:
        """The variant gives the reference's logprobs to the bit in every replicate: it switches nothing here."""
        return not self.sums["abs_d"].any()


def unbiased_square(draws: Floats) -> Floats:
    """Unbiased estimate of E[x]^2 per column of independent draws ``[K, N]``, K at least 2."""
    return np.square(draws.mean(axis=0)) - draws.var(axis=0, ddof=1) / len(draws)


def estimate(variant: Floats, reference: Floats, sequences: Sequences) -> Estimate:
    """Estimates of ``variant`` against ``reference``, both logprobs ``[K, N]`` in nats."""
    if variant.shape != reference.shape or variant.ndim != 2 or variant.shape[1] != sequences.num_tokens:
        raise ValueError(f"shapes differ: {variant.shape}, {reference.shape}, {sequences.num_tokens} sequence ids")
    num = len(variant)
    difference = variant - reference
    square, noise = unbiased_square(difference), difference.var(axis=0, ddof=1)
    weight = np.expm1(difference)
    per_token = {
        "systematic_sq": square,
        "shift": difference.mean(axis=0),
        "abs_d": np.abs(difference).mean(axis=0),
        "k3": k3(difference).mean(axis=0),
        "chaotic_sq": variant.var(axis=0, ddof=1),
        "noise_sq": noise,
        "weight": weight.mean(axis=0),
        "weight_sq": unbiased_square(weight),
        "noise_linear": 4 * square * noise,
        "noise_quadratic": 2 * np.square(noise) * (num - 1) / (num + 1),  # E[var^2] is larger than var^2
    }
    whole = sequences.sums(difference)
    sums = {name: sequences.sums(values) for name, values in per_token.items()} | {
        "tokens": sequences.counts,
        "sequences": np.ones(len(sequences)),
        "sequence_sq": unbiased_square(whole),
        "sequence_noise_sq": whole.var(axis=0, ddof=1),
    }
    values = jackknife(_results, np.stack([sums[name] for name in SUMS]))
    return Estimate(
        **dict(zip(_RESULTS, values, strict=True)),
        num_replicates=num,
        num_tokens=variant.shape[1],
        num_sequences=len(sequences),
        sums=sums,
    )


_RESULTS = (
    "systematic_sq",
    "mean_shift",
    "chaotic_rms",
    "mean_abs_d",
    "k3_kl",
    "k3_kl_systematic",
    "k3_kl_chaotic",
    "weight_bias",
    "weight_bias_sq",
    "sequence_sq",
    "sequence_chaotic_rms",
)


def _results(sums: Floats) -> Floats:
    s = dict(zip(SUMS, sums, strict=True))
    n = s["tokens"]
    systematic_kl = s["systematic_sq"] / n / 2
    return np.stack(
        [
            s["systematic_sq"] / n,
            s["shift"] / n,
            np.sqrt(np.maximum(s["chaotic_sq"], 0.0) / n),
            s["abs_d"] / n,
            s["k3"] / n,
            systematic_kl,
            s["k3"] / n - systematic_kl,
            s["weight"] / n,
            s["weight_sq"] / n,
            s["sequence_sq"] / s["sequences"],
            np.sqrt(np.maximum(s["sequence_noise_sq"], 0.0) / s["sequences"]),
        ]
    )


def share_of(part: Floats, total: Floats) -> Measured:
    """A part's systematic square as a share of the total's, with the joint error. Both are sums over each sequence, ``[G]``."""
    return jackknife(lambda s: (s[0] / s[1])[None], np.stack([part, total]))[0]
