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
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpadiag.errors import NotComparableError

CLIP_RANGE = (0.8, 1.2)  # the usual PPO clipping range of rho
OUTLIER_DEVIATIONS = 5.0
MIN_SEQUENCES_FOR_OUTLIERS = 8
NUM_WORST = 5

Floats = NDArray[np.float64]


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
    p64, q64 = np.asarray(p, np.float64).reshape(-1), np.asarray(q, np.float64).reshape(-1)
    ids = np.asarray(sequence_ids).reshape(-1)
    if not len(p64) == len(q64) == len(ids):
        raise NotComparableError(
            f"trainer scored {len(p64)} tokens and the rollout engine {len(q64)} ({len(ids)} sequence ids)"
        )
    finite = np.isfinite(p64) & np.isfinite(q64)
    p64, q64, ids = p64[finite], q64[finite], ids[finite]
    sequences = _Sequences(p64, q64, ids)
    out: dict[str, Any] = {
        "num_tokens": len(p64),
        "num_sequences": len(sequences.ids),
        "num_nonfinite": int(np.count_nonzero(~finite)),
    }
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        out |= _distance(p64, q64)
        out |= _divergence(p64, q64)
        out |= _perplexity(sequences)
        out |= _importance_ratio(p64 - q64)
        out |= _probabilities(p64, q64)
        out |= _argmax_flips(p_argmax, q_argmax, finite)
        out |= sequences.outliers()
    return out


def k3(d: Floats) -> Floats:
    """exp(d) - 1 - d without cancellation: its own series where |d| < 1e-3 (truncation below 1e-15 relative)."""
    with np.errstate(over="ignore"):
        direct = np.expm1(d) - d
    series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    return np.where(np.abs(d) < 1e-3, series, direct)


def _mean(x: Floats) -> float:
    return float(np.mean(x)) if x.size else math.nan


def _distance(p: Floats, q: Floats) -> dict[str, Any]:
    """How far apart, in nats. ``exact_share``: tokens with p == q; both come from float32, so equal to the bit."""
    d = np.abs(p - q)
    return {
        "mean_abs_d": _mean(d),
        "max_abs_d": float(d.max()) if d.size else math.nan,
        "rms_d": math.sqrt(_mean(d * d)) if d.size else math.nan,
        "exact_share": _mean((d == 0).astype(np.float64)),
    }


def _divergence(p: Floats, q: Floats) -> dict[str, Any]:
    """Over tokens: ``kl`` = mean(q - p), an estimate of KL(rollout || trainer) that may be negative; ``k3_kl`` =
    mean(rho - 1 - d), the same with less variance; ``chi2_token`` = mean(rho^2) - 1.
    """
    d = p - q
    return {"kl": _mean(-d), "k3_kl": _mean(k3(d)), "chi2_token": _mean(np.expm1(2 * d))}


def _perplexity(sequences: _Sequences) -> dict[str, Any]:
    """Means over sequences, each of them counted once whatever its length.

    With m_p and m_q the mean log-probabilities of one sequence: ``training_ppl`` = exp(-m_p), ``rollout_ppl`` =
    exp(-m_q), ``log_ppl_diff`` = m_q - m_p, which is log(training_ppl / rollout_ppl) and positive when the trainer
    finds the text less likely; ``ppl_ratio`` = exp(log_ppl_diff). ``chi2_seq`` = mean(prod(rho)^2) - 1.
    """
    m_p, m_q = sequences.mean_p, sequences.mean_q
    diff = -sequences.mean_d
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


def _importance_ratio(d: Floats) -> dict[str, Any]:
    """Of rho over tokens, raw: mean, standard deviation (of the population, as verl), min, max.

    ``rollout_is_eff_sample_size`` = 1 / mean((rho / mean(rho))^2), a share of n: 1 when all ratios are equal.
    ``outside_ratio_share``: tokens with rho outside [0.8, 1.2].
    """
    if not d.size:
        names = ("mean", "std", "min", "max", "eff_sample_size")
        return {f"rollout_is_{n}": math.nan for n in names} | {"outside_ratio_share": math.nan}
    excess = np.expm1(d)  # rho - 1, exact for small d
    mean_excess = _mean(excess)
    variance = _mean((excess - mean_excess) ** 2)
    low, high = CLIP_RANGE
    rho = np.exp(d)
    return {
        "rollout_is_mean": 1 + mean_excess,
        "rollout_is_std": math.sqrt(variance),
        "rollout_is_min": float(rho.min()),
        "rollout_is_max": float(rho.max()),
        "rollout_is_eff_sample_size": 1 / (1 + variance / (1 + mean_excess) ** 2),
        "outside_ratio_share": _mean(((rho < low) | (rho > high)).astype(np.float64)),
    }


def _probabilities(p: Floats, q: Floats) -> dict[str, Any]:
    """Of |exp(p) - exp(q)|: mean, max, and the sample standard deviation (n - 1, as verl; NaN for one token).

    ``rollout_actor_probs_pearson_corr``: Pearson correlation of exp(p) and exp(q); NaN when one side is constant.
    """
    diff = np.abs(np.exp(q) * np.expm1(p - q))
    return {
        "rollout_probs_diff_mean": _mean(diff),
        "rollout_probs_diff_max": float(diff.max()) if diff.size else math.nan,
        "rollout_probs_diff_std": float(np.std(diff, ddof=1)) if diff.size > 1 else math.nan,
        "rollout_actor_probs_pearson_corr": _pearson(np.exp(p), np.exp(q)),
    }


def _pearson(x: Floats, y: Floats) -> float:
    if x.size < 2:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / scale)) if scale else math.nan


def _argmax_flips(
    p_argmax: ArrayLike | None, q_argmax: ArrayLike | None, finite: NDArray[np.bool_]
) -> Mapping[str, Any]:
    if p_argmax is None or q_argmax is None:
        return {}
    a, b = np.asarray(p_argmax).reshape(-1), np.asarray(q_argmax).reshape(-1)
    if not len(a) == len(b) == len(finite):
        raise NotComparableError(f"{len(a)} and {len(b)} most likely tokens for {len(finite)} scored tokens")
    flips = int(np.count_nonzero(a[finite] != b[finite]))
    total = int(np.count_nonzero(finite))
    return {"argmax_flips": flips, "argmax_flip_share": flips / total if total else math.nan}


class _Sequences:
    """Sums by sequence, in order of sequence id. mean_d and sum_d are of d itself, not differences of means."""

    def __init__(self, p: Floats, q: Floats, ids: NDArray[Any]) -> None:
        self.ids, inverse, self.num_tokens = np.unique(ids, return_inverse=True, return_counts=True)
        size = len(self.ids)

        def total(x: Floats) -> Floats:
            return np.bincount(inverse, weights=x, minlength=size).astype(np.float64)

        d = p - q
        self.sum_d = total(d)
        self.mean_p, self.mean_q = total(p) / self.num_tokens, total(q) / self.num_tokens
        self.mean_d = self.sum_d / self.num_tokens
        self.mean_abs_d = total(np.abs(d)) / self.num_tokens
        self.k3_kl = total(k3(d)) / self.num_tokens
        self.max_abs_d = np.zeros(size)
        np.maximum.at(self.max_abs_d, inverse, np.abs(d))

    def outliers(self) -> dict[str, Any]:
        """``worst_sequences``: the few with the largest mean |d|, worst first.

        ``sequence_outliers``: those whose mean |d| lies more than 5 robust standard deviations (1.4826 times the
        median absolute deviation) above the median; None below 8 sequences, where that means nothing.
        """
        order = np.argsort(-self.mean_abs_d, kind="stable")
        worst = [self._row(int(i)) for i in order[:NUM_WORST]]
        if len(self.ids) < MIN_SEQUENCES_FOR_OUTLIERS:
            return {"worst_sequences": worst, "sequence_outliers": None}
        center = float(np.median(self.mean_abs_d))
        spread = 1.4826 * float(np.median(np.abs(self.mean_abs_d - center)))
        limit = center + OUTLIER_DEVIATIONS * spread
        beyond = [self._row(int(i)) for i in order if self.mean_abs_d[i] > limit]
        return {"worst_sequences": worst, "sequence_outliers": beyond}

    def _row(self, i: int) -> dict[str, Any]:
        return {
            "prompt": int(self.ids[i]),
            "num_tokens": int(self.num_tokens[i]),
            "mean_abs_d": float(self.mean_abs_d[i]),
            "max_abs_d": float(self.max_abs_d[i]),
            "k3_kl": float(self.k3_kl[i]),
            "log_ppl_diff": float(-self.mean_d[i]),
        }
