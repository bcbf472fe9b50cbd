"""What aligning a part does to the metrics of ``rpadiag compare``, with standard errors.

The reference (every part aligned) stands for the rollout engine, q; the trainer as it is, or with one part aligned, is p; both are
under the same noise, replicate by replicate. Names and formulas are those of :mod:`rpadiag.compare.metrics`. Extremes (``max_abs_d``,
``log_ppl_diff_max``, ...) are left out: an extreme has no error that leaving out sequences can estimate.

Shape legend: K replicates, N tokens, G sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.estimate import unbiased_square
from rpadiag.attribution.resample import Measured, Sequences, jackknife
from rpadiag.compare.metrics import CLIP_RANGE, k3

Floats = NDArray[np.float64]

METRICS = (
    "mean_abs_d",
    "rms_d",
    "exact_share",
    "kl",
    "k3_kl",
    "chi2_token",
    "training_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_seq",
    "rollout_is_mean",
    "rollout_is_std",
    "rollout_is_eff_sample_size",
    "outside_ratio_share",
    "rollout_probs_diff_mean",
    "rollout_actor_probs_pearson_corr",
    "systematic_sq",
    "weight_bias_sq",
    "sequence_log_ratio_sq",
)
_TOKEN_SUMS = ("d", "abs_d", "d_sq", "exact", "k3", "chi2", "excess", "excess_sq", "outside", "probs_diff", "pp", "qq", "p_sq",
               "q_sq", "pq", "systematic_sq", "weight_sq")  # fmt: skip
_SEQUENCE_SUMS = ("training_ppl", "log_diff", "abs_log_diff", "ppl_ratio", "chi2_seq", "sequence_sq")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One metric of the trainer as it is and with one part aligned; ``change`` is the second minus the first, with its joint error."""

    metric: str
    as_is: Measured
    aligned: Measured
    change: Measured


class MetricSums:
    """Sums per sequence of everything the metrics of p against q are made of, means over replicates. p, q: ``[K, N]`` nats."""

    def __init__(self, p: Floats, q: Floats, sequences: Sequences) -> None:
        d = p - q
        excess, low, high = np.expm1(d), *CLIP_RANGE
        prob_p, prob_q, rho = np.exp(p), np.exp(q), np.exp(d)
        tokens = [d, np.abs(d), d * d, d == 0, k3(d), np.expm1(2 * d), excess, excess**2, (rho < low) | (rho > high)]
        tokens += [np.abs(prob_q * excess), prob_p, prob_q, prob_p**2, prob_q**2, prob_p * prob_q]
        per_token = [np.asarray(x, dtype=np.float64).mean(axis=0) for x in tokens]
        per_token += [unbiased_square(d), unbiased_square(excess)]
        whole_d, whole_p = sequences.sums(d), sequences.sums(p)
        mean_d = whole_d / sequences.counts
        per_sequence = [
            np.exp(-whole_p / sequences.counts), -mean_d, np.abs(mean_d), np.exp(-mean_d), np.expm1(2 * whole_d)
        ]  # fmt: skip
        self.per_sequence: Floats = np.stack(
            [
                sequences.counts,
                np.ones(len(sequences)),
                *(sequences.sums(x) for x in per_token),
                *(x.mean(axis=0) for x in per_sequence),
                unbiased_square(whole_d),
            ]
        )


def metrics_of(sums: MetricSums) -> dict[str, Measured]:
    """Every metric of METRICS with its standard error."""
    return dict(zip(METRICS, jackknife(_metrics, sums.per_sequence), strict=True))


def effects_of(as_is: MetricSums, aligned: MetricSums) -> list[Effect]:
    """What changes from one trainer to the other, both against the same reference."""
    half = len(as_is.per_sequence)

    def change(sums: Floats) -> Floats:
        return _metrics(sums[half:]) - _metrics(sums[:half])

    changes = jackknife(change, np.concatenate([as_is.per_sequence, aligned.per_sequence]))
    before, after = metrics_of(as_is), metrics_of(aligned)
    return [
        Effect(metric=name, as_is=before[name], aligned=after[name], change=moved)
        for name, moved in zip(METRICS, changes, strict=True)
    ]


def _metrics(sums: Floats) -> Floats:
    """METRICS in order from the rows of :class:`MetricSums`, ``[R]`` or ``[R, G]``."""
    n, num = sums[0], sums[1]
    t = {name: row / n for name, row in zip(_TOKEN_SUMS, sums[2 : 2 + len(_TOKEN_SUMS)], strict=True)}
    s = {name: row / num for name, row in zip(_SEQUENCE_SUMS, sums[2 + len(_TOKEN_SUMS) :], strict=True)}
    variance = np.maximum(t["excess_sq"] - t["excess"] ** 2, 0.0)
    scale = np.sqrt(np.maximum(t["p_sq"] - t["pp"] ** 2, 0.0) * np.maximum(t["q_sq"] - t["qq"] ** 2, 0.0))
    values = {
        "mean_abs_d": t["abs_d"],
        "rms_d": np.sqrt(t["d_sq"]),
        "exact_share": t["exact"],
        "kl": -t["d"],
        "k3_kl": t["k3"],
        "chi2_token": t["chi2"],
        "training_ppl": s["training_ppl"],
        "log_ppl_diff": s["log_diff"],
        "log_ppl_abs_diff": s["abs_log_diff"],
        "ppl_ratio": s["ppl_ratio"],
        "chi2_seq": s["chi2_seq"],
        "rollout_is_mean": 1 + t["excess"],
        "rollout_is_std": np.sqrt(variance),
        "rollout_is_eff_sample_size": 1 / (1 + variance / (1 + t["excess"]) ** 2),
        "outside_ratio_share": t["outside"],
        "rollout_probs_diff_mean": t["probs_diff"],
        "rollout_actor_probs_pearson_corr": np.minimum(1.0, (t["pq"] - t["pp"] * t["qq"]) / scale),
        "systematic_sq": t["systematic_sq"],
        "weight_bias_sq": t["weight_sq"],
        "sequence_log_ratio_sq": s["sequence_sq"],
    }
    return np.stack([values[name] for name in METRICS])
