"""Logprob metrics against values worked out by hand and against exact rational arithmetic."""

from __future__ import annotations

import json
import math
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rpadiag.compare.metric_sums import MetricSums
from rpadiag.compare.metrics import k3, logprob_metrics, metric_names, metrics_of
from rpadiag.errors import NotComparableError
from rpadiag.runs.manifest import dump_json

LOG2 = math.log(2.0)
# Two sequences. Probabilities: trainer 1/2, 1/4 | 1/8; rollout 1/4, 1/4 | 1/2. Ratios: 2, 1 | 1/4.
P = np.log([0.5, 0.25, 0.125])
Q = np.log([0.25, 0.25, 0.5])
IDS = [0, 0, 1]

GOLDEN = {
    "num_tokens": 3,
    "num_sequences": 2,
    "num_nonfinite": 0,
    "mean_abs_d": (1 + 0 + 2) * LOG2 / 3,
    "max_abs_d": 2 * LOG2,
    "rms_d": LOG2 * math.sqrt(5 / 3),
    "exact_share": 1 / 3,
    "kl": (-1 + 0 + 2) * LOG2 / 3,
    # rho - 1 - d: 2 - 1 - log 2; 0; 1/4 - 1 + 2 log 2
    "k3_kl": ((1 - LOG2) + 0 + (-0.75 + 2 * LOG2)) / 3,
    "chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
    # products of ratios: 2 and 1/4
    "chi2_seq": (4 + 1 / 16) / 2 - 1,
    # perplexity of sequence 0 under the trainer: (1/2 * 1/4)^(-1/2) = sqrt(8); of sequence 1: 8
    "training_ppl": (math.sqrt(8) + 8) / 2,
    "rollout_ppl": (4 + 2) / 2,
    "training_log_ppl": (1.5 + 3) * LOG2 / 2,
    "rollout_log_ppl": (2 + 1) * LOG2 / 2,
    # log(training / rollout): log(sqrt(8) / 4) = -log(2) / 2; log(8 / 2) = 2 log 2
    "log_ppl_diff": (-0.5 + 2) * LOG2 / 2,
    "log_ppl_abs_diff": (0.5 + 2) * LOG2 / 2,
    "log_ppl_diff_max": 2 * LOG2,
    "log_ppl_diff_min": -0.5 * LOG2,
    "ppl_ratio": (math.sqrt(8) / 4 + 4) / 2,
    "rollout_is_mean": (2 + 1 + 0.25) / 3,
    "rollout_is_std": math.sqrt((4 + 1 + 1 / 16) / 3 - (3.25 / 3) ** 2),
    "rollout_is_min": 0.25,
    "rollout_is_max": 2.0,
    "rollout_is_eff_sample_size": (3.25 / 3) ** 2 / ((4 + 1 + 1 / 16) / 3),
    "outside_ratio_share": 2 / 3,
    # |1/2 - 1/4|, 0, |1/8 - 1/2|
    "rollout_probs_diff_mean": (0.25 + 0 + 0.375) / 3,
    "rollout_probs_diff_max": 0.375,
    "rollout_probs_diff_std": math.sqrt((0.0625 + 0.140625 - 0.625**2 / 3) / 2),
    # x = 1/2, 1/4, 1/8 (mean 7/24); y = 1/4, 1/4, 1/2 (mean 1/3): sums of deviations times 24
    "rollout_actor_probs_pearson_corr": (5 * -2 + -1 * -2 + -4 * 4) / math.sqrt((25 + 1 + 16) * (4 + 4 + 16)),
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_metric_has_the_value_worked_out_by_hand(name: str) -> None:
    assert logprob_metrics(P, Q, sequence_ids=IDS)[name] == pytest.approx(GOLDEN[name], rel=1e-14)


def test_no_metric_lacks_a_value_worked_out_by_hand() -> None:
    got = logprob_metrics(P, Q, sequence_ids=IDS, p_argmax=[1, 2, 3], q_argmax=[1, 2, 4])
    structured = {"worst_sequences", "sequence_outliers", "argmax_flips", "argmax_flip_share"}
    assert set(got) == set(GOLDEN) | structured
    assert (got["argmax_flips"], got["argmax_flip_share"]) == (1, 1 / 3)


def test_design_names_are_all_present() -> None:
    names = [
        "kl",
        "k3_kl",
        "training_ppl",
        "rollout_ppl",
        "log_ppl_diff",
        "log_ppl_abs_diff",
        "log_ppl_diff_max",
        "log_ppl_diff_min",
        "ppl_ratio",
        "chi2_token",
        "chi2_seq",
        "rollout_is_mean",
        "rollout_is_std",
        "rollout_is_min",
        "rollout_is_max",
        "rollout_is_eff_sample_size",
        "rollout_probs_diff_mean",
        "rollout_probs_diff_max",
        "rollout_probs_diff_std",
        "rollout_actor_probs_pearson_corr",
    ]
    assert set(names) <= set(logprob_metrics(P, Q, sequence_ids=IDS))


def test_identical_logprobs_are_at_distance_0_exactly() -> None:
    got = logprob_metrics(P, P, sequence_ids=IDS)
    for name in ("mean_abs_d", "kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "rollout_is_std"):
        assert got[name] == 0.0
    for name in ("exact_share", "rollout_is_mean", "rollout_is_eff_sample_size", "ppl_ratio"):
        assert got[name] == 1.0
    assert got["rollout_actor_probs_pearson_corr"] == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("d", [1e-12, -3e-9, 1e-6, -9.99e-4, 1.01e-3, -0.5, 1.0, 5.0])
def test_k3_keeps_14_digits_where_exp_minus_1_would_lose_them(d: float) -> None:
    getcontext().prec = 60
    exact = Decimal(d).exp() - 1 - Decimal(d)
    assert abs(Decimal(float(k3(np.array([d]))[0])) / exact - 1) < Decimal("1e-12")
    if abs(d) < 1e-3:
        assert abs(Decimal(float(k3(np.array([d]))[0])) / exact - 1) < Decimal("1e-14")


def test_fp32_control_sized_differences_are_resolved() -> None:
    p = np.full(1000, -1.0)
    q = p + np.where(np.arange(1000) % 2, 1e-9, -1e-9)
    got = logprob_metrics(p, q, sequence_ids=np.zeros(1000))
    assert got["k3_kl"] == pytest.approx(5e-19, rel=1e-6)
    assert got["rollout_is_std"] == pytest.approx(1e-9, rel=1e-6)


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, 30, elements=st.floats(-30, 0, width=32)),
    hnp.arrays(np.float32, 30, elements=st.floats(-30, 0, width=32)),
    hnp.arrays(np.int64, 30, elements=st.integers(-3, 3)),
    st.randoms(use_true_random=False),
)
def test_order_of_tokens_does_not_matter(p: Any, q: Any, ids: Any, random: Any) -> None:
    order = list(range(30))
    random.shuffle(order)
    a = logprob_metrics(p, q, sequence_ids=ids)
    b = logprob_metrics(p[order], q[order], sequence_ids=ids[order])
    for name in GOLDEN:
        assert a[name] == pytest.approx(b[name], rel=1e-9, abs=1e-12, nan_ok=True), name


@settings(deadline=None)
@given(hnp.arrays(np.float64, 20, elements=st.floats(-5, 5)))
def test_k3_is_never_negative_and_the_effective_sample_size_is_a_share(d: Any) -> None:
    got = logprob_metrics(d - 10, np.full(20, -10.0), sequence_ids=np.zeros(20))
    assert got["k3_kl"] >= 0
    assert 0 < got["rollout_is_eff_sample_size"] <= 1


def test_nonfinite_logprobs_are_counted_and_left_out() -> None:
    p = [*P, -math.inf, math.nan, -1.0]
    q = [*Q, -1.0, -1.0, -math.inf]
    got = logprob_metrics(p, q, sequence_ids=[*IDS, 1, 1, 2], p_argmax=[0] * 6, q_argmax=[0, 0, 0, 1, 1, 1])
    assert (got["num_nonfinite"], got["num_tokens"], got["num_sequences"], got["argmax_flips"]) == (3, 3, 2, 0)
    for name in set(GOLDEN) - {"num_nonfinite"}:
        assert got[name] == pytest.approx(GOLDEN[name], rel=1e-14)


def test_no_tokens_give_counts_of_0_and_no_numbers_that_could_be_believed() -> None:
    got = logprob_metrics([], [], sequence_ids=[], p_argmax=[], q_argmax=[])
    assert (got["num_tokens"], got["num_sequences"], got["worst_sequences"]) == (0, 0, [])
    for name in set(GOLDEN) - {"num_tokens", "num_sequences", "num_nonfinite"}:
        assert math.isnan(got[name]), name


def test_one_token_has_no_sample_deviation_and_no_correlation() -> None:
    got = logprob_metrics([-1.0], [-1.5], sequence_ids=[7])
    assert math.isnan(got["rollout_probs_diff_std"]) and math.isnan(got["rollout_actor_probs_pearson_corr"])
    assert got["rollout_is_std"] == 0.0


def test_a_ratio_beyond_float64_is_infinite_and_not_clamped() -> None:
    got = logprob_metrics(np.full(1000, -0.1), np.full(1000, -1.0), sequence_ids=np.zeros(1000))
    assert got["chi2_seq"] == math.inf
    assert json.loads(dump_json(got))["chi2_seq"] is None


def test_ratios_beyond_verls_clamp_of_20_nats_stay_raw() -> None:
    got = logprob_metrics([-1.0, -1.0], [-26.0, -1.0], sequence_ids=[0, 0])
    assert got["rollout_is_max"] == pytest.approx(math.exp(25.0))


def test_a_sequence_far_from_the_others_is_an_outlier_and_the_first_of_the_worst() -> None:
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(20), 50)
    d = rng.normal(0, 0.03, ids.size)
    d[ids == 13] += 0.4
    got = logprob_metrics(d - 2, np.full(ids.size, -2.0), sequence_ids=ids)
    assert [s["prompt"] for s in got["sequence_outliers"]] == [13]
    assert got["worst_sequences"][0] == got["sequence_outliers"][0]
    assert got["worst_sequences"][0]["num_tokens"] == 50
    assert len(got["worst_sequences"]) == 5
    quiet = logprob_metrics(np.where(ids == 13, -2.0, d - 2), np.full(ids.size, -2.0), sequence_ids=ids)
    assert quiet["sequence_outliers"] == []


def test_outliers_are_not_named_among_few_sequences() -> None:
    assert logprob_metrics(P, Q, sequence_ids=IDS)["sequence_outliers"] is None


def test_sides_of_different_length_are_not_comparable() -> None:
    with pytest.raises(NotComparableError, match="trainer scored 3 tokens and the rollout engine 2"):
        logprob_metrics(P, Q[:2], sequence_ids=IDS)
    with pytest.raises(NotComparableError, match="most likely"):
        logprob_metrics(P, Q, sequence_ids=IDS, p_argmax=[1], q_argmax=[1, 2, 3])


def test_result_is_strict_json_after_the_writer_has_seen_it() -> None:
    text = dump_json(logprob_metrics([-1.0], [math.nan], sequence_ids=[0]))
    assert json.loads(text, parse_constant=pytest.fail)["num_nonfinite"] == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_sums_of_chunks_are_the_sums_of_the_whole(num_chunks: int, seed: int) -> None:
    """Chunks cut sequences anywhere; merging changes rounding only, about 30 additions of relative error 1e-16."""
    rng = np.random.default_rng(seed)
    q = -rng.exponential(2, 200)
    p = q + rng.normal(0, 0.2, 200)
    p[rng.integers(0, 200)] = np.nan
    ids = np.sort(rng.integers(0, 12, 200))
    flips = rng.integers(0, 2, 200)
    whole = logprob_metrics(p, q, sequence_ids=ids, p_argmax=flips, q_argmax=0 * flips)
    cuts = np.array_split(np.arange(200), num_chunks)
    streamed, merged = MetricSums(), MetricSums()
    for part in cuts:
        chunk = {"sequence_ids": ids[part], "p_argmax": flips[part], "q_argmax": 0 * flips[part]}
        streamed.add(p[part], q[part], **chunk)
        merged = merged + MetricSums().add(p[part], q[part], **chunk)
    for sums in (streamed, merged):
        got = metrics_of(sums)
        assert set(got) == set(whole)
        for name in metric_names():
            assert got[name] == pytest.approx(whole[name], rel=1e-10, abs=1e-13, nan_ok=True), name
        assert [r["prompt"] for r in got["worst_sequences"]] == [r["prompt"] for r in whole["worst_sequences"]]
