"""Logprob metrics under the names that RL training frameworks log them by.

For every scored token, p is its log-probability under the trainer, q under the rollout engine (both in nats, of the
token that the rollout engine sampled or that the prompt holds), d = p - q, and rho = exp(d) the importance ratio.
Names and formulas are those of verl (``verl/trainer/ppo/rollout_corr_helper.py`` and ``verl/utils/debug/metrics.py``
of verl-project/verl at commit 20c30bf8), with two differences that are stated where they matter: ratios are raw, where verl clamps d to +-20
and truncates weights at a threshold; and everything is float64, where verl uses the dtype of the log-probabilities.
``k3_kl`` is prime-rl's ``mismatch_kl`` and NeMo-RL's ``gen_kl_error``.

Small differences are the usual case, so nothing is computed as exp(d) - 1: see :func:`k3` and ``expm1`` below.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rpadiag.compare.metric_sums import CLIP_RANGE, Floats, MetricSums, SequenceSums, k3

OUTLIER_DEVIATIONS = 5.0
MIN_SEQUENCES_FOR_OUTLIERS = 8
NUM_WORST = 5

__all__ = ["CLIP_RANGE", "k3", "logprob_metrics", "metric_names", "metrics_of"]


def logprob_metrics(
    p: ArrayLike,
    q: ArrayLike,
    *,
    sequence_ids: ArrayLike,
    p_argmax: ArrayLike | None = None,
    q_argmax: ArrayLike | None = None,
) -> dict[str, Any]:
    """Every metric of the two stacks' log-probabilities, as JSON-ready numbers (NaN where undefined).

    p, q: log-probabilities [N] in nats, trainer and rollout. sequence_ids: [N] integers, the sequence of each token
    (any order, any values). p_argmax, q_argmax: [N] most likely token ids; without them there are no flip counts.

    Tokens where p or q is NaN or infinite are counted in ``num_nonfinite`` and left out of every other number.
    A ratio that overflows float64 gives infinity. Raises NotComparableError when the lengths differ.
    """
    return metrics_of(MetricSums().add(p, q, sequence_ids=sequence_ids, p_argmax=p_argmax, q_argmax=q_argmax))


def metric_names() -> tuple[str, ...]:
    """Name of every metric that is one number."""
    every = logprob_metrics([-1.0], [-1.0], sequence_ids=[0], p_argmax=[0], q_argmax=[0])
    return tuple(name for name, value in every.items() if isinstance(value, int | float))


def metrics_of(sums: MetricSums) -> dict[str, Any]:
    """The metrics of everything that was added to ``sums``; see :func:`logprob_metrics`."""
    sequences = sums.sequences()
    out: dict[str, Any] = {
        "num_tokens": sums.num_tokens,
        "num_sequences": len(sequences.ids),
        "num_nonfinite": sums.num_nonfinite,
    }
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        out |= _distance(sums)
        out |= _divergence(sums)
        out |= _perplexity(sequences)
        out |= _importance_ratio(sums)
        out |= _probabilities(sums)
        if sums.num_argmax or (sums.num_nonfinite and not sums.num_tokens):
            out |= _argmax_flips(sums)
        out |= _outliers(sequences)
    return out


def _share(part: float, n: int) -> float:
    return part / n if n else math.nan


def _mean(x: Floats) -> float:
    return float(np.mean(x)) if x.size else math.nan


def _distance(sums: MetricSums) -> dict[str, Any]:
    """How far apart, in nats. ``exact_share``: tokens with p == q; both come from float32, so equal to the bit."""
    n = sums.num_tokens
    return {
        "mean_abs_d": sums.abs_d.mean if n else math.nan,
        "max_abs_d": max(sums.max_d, -sums.min_d) if n else math.nan,
        "rms_d": math.sqrt(sums.sum_sq_d / n) if n else math.nan,
        "exact_share": _share(sums.num_exact, n),
    }


def _divergence(sums: MetricSums) -> dict[str, Any]:
    """Over tokens: ``kl`` = mean(q - p), an estimate of KL(rollout || trainer) that may be negative; ``k3_kl`` =
    mean(rho - 1 - d), the same with less variance; ``chi2_token`` = mean(rho^2) - 1.
    """
    n = sums.num_tokens
    return {
        "kl": _share(0.0 - sums.sum_d, n),
        "k3_kl": _share(sums.sum_k3, n),
        "chi2_token": _share(sums.sum_chi2, n),
    }


def _perplexity(sequences: SequenceSums) -> dict[str, Any]:
    """Means over sequences, each of them counted once whatever its length.

    With m_p and m_q the mean log-probabilities of one sequence: ``training_ppl`` = exp(-m_p), ``rollout_ppl`` =
    exp(-m_q), ``log_ppl_diff`` = m_q - m_p, which is log(training_ppl / rollout_ppl) and positive when the trainer
    finds the text less likely; ``ppl_ratio`` = exp(log_ppl_diff). ``chi2_seq`` = mean(prod(rho)^2) - 1.
    """
    m_p, m_q = sequences.sum_p / sequences.num_tokens, sequences.sum_q / sequences.num_tokens
    diff = 0.0 - sequences.sum_d / sequences.num_tokens
    return {
        "training_ppl": _mean(np.exp(-m_p)),
        "training_log_ppl": _mean(-m_p),
        "rollout_ppl": _mean(np.exp(-m_q)),
        "rollout_log_ppl": _mean(-m_q),
        "log_ppl_diff": _mean(diff),
        "log_ppl_abs_diff": _mean(np.abs(diff)),
        "log_ppl_diff_max": float(diff.max()) if diff.size else math.nan,
        "log_ppl_diff_min": float(diff.min()) if diff.size else math.nan,
        "ppl_ratio": _mean(np.exp(diff)),
        "chi2_seq": _mean(np.expm1(2 * sequences.sum_d)),
    }


def _importance_ratio(sums: MetricSums) -> dict[str, Any]:
    """Of rho over tokens, raw: mean, standard deviation (of the population, as verl), min, max.

    ``rollout_is_eff_sample_size`` = 1 / mean((rho / mean(rho))^2), a share of n: 1 when all ratios are equal.
    ``outside_ratio_share``: tokens with rho outside [0.8, 1.2].
    """
    n = sums.num_tokens
    if not n:
        names = ("mean", "std", "min", "max", "eff_sample_size")
        return {f"rollout_is_{n}": math.nan for n in names} | {"outside_ratio_share": math.nan}
    near_one = abs(sums.excess.mean) < 0.5
    mean = 1 + sums.excess.mean if near_one else sums.ratio.mean
    variance = (sums.excess if near_one else sums.ratio).squares / n
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(variance),
        "rollout_is_min": float(np.exp(sums.min_d)),
        "rollout_is_max": float(np.exp(sums.max_d)),
        "rollout_is_eff_sample_size": 1 / (1 + variance / mean**2),
        "outside_ratio_share": _share(sums.num_outside, n),
    }


def _probabilities(sums: MetricSums) -> dict[str, Any]:
    """Of |exp(p) - exp(q)|: mean, max, and the sample standard deviation (n - 1, as verl; NaN for one token).

    ``rollout_actor_probs_pearson_corr``: Pearson correlation of exp(p) and exp(q); NaN when one side is constant.
    """
    n = sums.num_tokens
    scale = math.sqrt(sums.prob_p.squares) * math.sqrt(sums.prob_q.squares)
    return {
        "rollout_probs_diff_mean": sums.gap.mean if n else math.nan,
        "rollout_probs_diff_max": sums.max_gap if n else math.nan,
        "rollout_probs_diff_std": math.sqrt(sums.gap.squares / (n - 1)) if n > 1 else math.nan,
        "rollout_actor_probs_pearson_corr": max(-1.0, min(1.0, sums.prob_pq / scale)) if n > 1 and scale else math.nan,
    }


def _argmax_flips(sums: MetricSums) -> dict[str, Any]:
    return {"argmax_flips": sums.num_flips, "argmax_flip_share": _share(sums.num_flips, sums.num_argmax)}


def _outliers(sequences: SequenceSums) -> dict[str, Any]:
    """``worst_sequences``: the few with the largest mean |d|, worst first.

    ``sequence_outliers``: those whose mean |d| lies more than 5 robust standard deviations (1.4826 times the
    median absolute deviation) above the median; None below 8 sequences, where that means nothing.
    """
    mean_abs_d = sequences.sum_abs_d / sequences.num_tokens
    order = np.argsort(-mean_abs_d, kind="stable")
    worst = [_sequence_row(sequences, int(i)) for i in order[:NUM_WORST]]
    if len(sequences.ids) < MIN_SEQUENCES_FOR_OUTLIERS:
        return {"worst_sequences": worst, "sequence_outliers": None}
    center = float(np.median(mean_abs_d))
    spread = 1.4826 * float(np.median(np.abs(mean_abs_d - center)))
    limit = center + OUTLIER_DEVIATIONS * spread
    beyond = [_sequence_row(sequences, int(i)) for i in order if mean_abs_d[i] > limit]
    return {"worst_sequences": worst, "sequence_outliers": beyond}


def _sequence_row(sequences: SequenceSums, i: int) -> dict[str, Any]:
    n = int(sequences.num_tokens[i])
    return {
        "prompt": int(sequences.ids[i]),
        "num_tokens": n,
        "mean_abs_d": float(sequences.sum_abs_d[i] / n),
        "max_abs_d": float(sequences.max_abs_d[i]),
        "k3_kl": float(sequences.sum_k3[i] / n),
        "log_ppl_diff": float(0.0 - sequences.sum_d[i] / n),
    }
