"""The metrics of compare from sums per sequence: the same numbers, with errors that know what they share."""

from __future__ import annotations

import numpy as np
import pytest

from rpadiag.attribution.effects import METRICS, MetricSums, effects_of, metrics_of
from rpadiag.attribution.resample import Sequences
from rpadiag.compare.metrics import logprob_metrics

IDS = np.repeat(np.arange(12), [9, 30, 21, 17, 40, 5, 33, 28, 12, 19, 25, 31])
N = len(IDS)


def draws(seed: int, num: int = 3, spread: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = -rng.exponential(2.0, (num, N))
    return q + spread * rng.standard_normal((num, N)), q


@pytest.mark.parametrize(
    "name", [m for m in METRICS if m not in ("systematic_sq", "weight_bias_sq", "sequence_log_ratio_sq")]
)
def test_metric_is_the_one_that_compare_reports(name: str) -> None:
    p, q = draws(1)
    q[:, ::7] = p[:, ::7]
    every = np.concatenate([IDS + 100 * k for k in range(len(p))])  # each replicate is a set of sequences of its own
    known = logprob_metrics(p.reshape(-1), q.reshape(-1), sequence_ids=every)[name]
    assert metrics_of(MetricSums(p, q, Sequences(IDS)))[name].value == pytest.approx(known, rel=1e-9)


def test_change_between_trainers_that_share_their_noise_has_a_joint_error() -> None:
    rng = np.random.default_rng(2)
    q = -rng.exponential(2.0, (6, N))
    noise = 0.05 * rng.standard_normal((6, N)) * rng.uniform(0.2, 2.0, 12)[IDS]
    found = effects_of(MetricSums(q + noise, q, Sequences(IDS)), MetricSums(q + 0.9 * noise, q, Sequences(IDS)))
    change = next(e for e in found if e.metric == "mean_abs_d")
    assert change.change.value == pytest.approx(-0.1 * change.as_is.value)
    assert change.change.se == pytest.approx(0.1 * change.as_is.se)
    assert change.change.se < 0.2 * np.hypot(change.as_is.se, change.aligned.se)


def test_aligned_to_the_bit_gives_the_values_of_identity() -> None:
    _, q = draws(3)
    found = {k: m.value for k, m in metrics_of(MetricSums(q, q, Sequences(IDS))).items()}
    assert found["mean_abs_d"] == 0.0 and found["exact_share"] == 1.0 and found["rollout_is_eff_sample_size"] == 1.0
    assert found["rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
