"""The estimator on data whose answer is known: it is unbiased, its error bar covers, and its control can fail."""

from __future__ import annotations

import numpy as np
import pytest

from rpadiag.attribution.attribute import attribute, findings
from rpadiag.attribution.design import Replicate, check_num_replicates, parts_of, replicates_of, variants_of
from rpadiag.attribution.estimate import clusters_of, estimate, jackknife_mean
from rpadiag.errors import UsageError

REGIONS = ("rope", "swiglu", "rmsnorm")


def sequences(num: int, length: int) -> np.ndarray:
    return np.repeat(np.arange(num), length)


def test_systematic_part_is_unbiased_under_chaos_twenty_times_larger() -> None:
    rng = np.random.default_rng(1)
    ids = sequences(40, 25)
    truth = 0.01 * rng.standard_normal(len(ids))
    values = []
    for _ in range(60):
        reference = 0.05 * rng.standard_normal((8, len(ids)))
        variant = truth + 0.05 * rng.standard_normal((8, len(ids)))
        values.append(estimate(variant, reference, ids).systematic_sq)
    # 60 independent estimates: the mean must lie within four of its own standard errors of the planted value
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    assert abs(np.mean(values) - np.mean(truth**2)) < 4 * error


def test_error_bar_covers_the_spread_of_repeated_estimates() -> None:
    rng = np.random.default_rng(2)
    ids = sequences(32, 20)
    estimates = [
        estimate(0.05 * rng.standard_normal((6, len(ids))), 0.05 * rng.standard_normal((6, len(ids))), ids)
        for _ in range(80)
    ]
    spread = np.std([e.systematic_sq for e in estimates], ddof=1)
    claimed = np.mean([e.systematic_sq_se for e in estimates])
    assert 0.7 < claimed / spread < 1.4
    # |z| > 2 about 5 % of the time; 80 draws stay below 12 with a probability above 0.999
    assert sum(abs(e.z) > 2 for e in estimates) < 12


def test_identical_variant_gives_exactly_zero() -> None:
    logprobs = np.random.default_rng(3).standard_normal((4, 50))
    result = estimate(logprobs, logprobs.copy(), sequences(10, 5))
    assert result.systematic_sq == 0.0
    assert result.systematic_sq_se == 0.0
    assert not result.detectable


def test_few_sequences_are_cut_into_blocks_that_do_not_cross_sequences() -> None:
    ids = sequences(2, 40)
    clusters = clusters_of(ids)
    assert clusters.max() + 1 == 6
    assert not set(clusters[:40]) & set(clusters[40:])


def test_jackknife_of_independent_values_is_the_standard_error_of_the_mean() -> None:
    values = np.random.default_rng(4).standard_normal(200)
    mean, error = jackknife_mean(values, np.arange(200))
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / np.sqrt(200))


def planted_score(effects: dict[str, float], ids: np.ndarray, *, broken_self: bool = False):
    rng = np.random.default_rng(5)
    direction = {r: rng.standard_normal(len(ids)) for r in effects}

    def logprobs(replicate: Replicate) -> np.ndarray:
        noise = np.random.default_rng([replicate.seed, len(replicate.variant.aligned)]).standard_normal(len(ids))
        missing = set(effects) - {s.region for s in replicate.variant.aligned}
        shift = sum((effects[r] * direction[r] for r in missing), np.zeros(len(ids)))
        if broken_self and replicate.variant.design == "self":
            shift = shift + 0.3
        return 0.04 * noise + shift

    return lambda asked: ((r, logprobs(r)) for r in asked)


def test_planted_region_is_found_and_the_others_are_not() -> None:
    ids = sequences(30, 30)
    result = attribute(
        planted_score({"rope": 0.03, "swiglu": 0.0, "rmsnorm": 0.0}, ids), REGIONS, ids, num_replicates=8
    )
    each = result.by_design("each")
    assert result.ranked
    assert each["rope"].detectable
    assert each["rope"].systematic_sq == pytest.approx(9e-4, rel=0.3)
    assert abs(each["swiglu"].z) < 3
    assert abs(each["rmsnorm"].z) < 3
    gain, error = result.gain_of_aligning("rope")
    assert gain > 6e-4 and gain > 2 * error
    first = next(f for f in findings(result) if f.code == "systematic-region")
    assert first.region == "rope"


def test_failed_self_control_refuses_to_rank() -> None:
    ids = sequences(30, 30)
    score = planted_score({"rope": 0.03, "swiglu": 0.0, "rmsnorm": 0.0}, ids, broken_self=True)
    result = attribute(score, REGIONS, ids, num_replicates=4)
    assert not result.ranked
    told = findings(result)
    assert told[0].code == "self-control"
    assert told[0].severity == "error"
    assert not [f for f in told if f.code == "systematic-region"]


def test_saturated_gap_is_said() -> None:
    ids = sequences(20, 20)

    def logprobs(replicate: Replicate) -> np.ndarray:
        # any missing region gives the same chaotic gap, as one flipped ULP does
        key = [replicate.index, len(replicate.variant.aligned) < 3, sum(replicate.variant.name.encode())]
        return 0.04 * np.random.default_rng([abs(int(k)) for k in key]).standard_normal(len(ids))

    result = attribute(lambda asked: ((r, logprobs(r)) for r in asked), REGIONS, ids, num_replicates=4)
    assert result.saturated
    assert any(f.code == "gap-saturated" for f in findings(result))


def test_every_variant_gets_the_same_noise_except_the_self_control() -> None:
    by_design: dict[str, set[int]] = {}
    for replicate in replicates_of(variants_of(parts_of(REGIONS)), range(3), seed=7):
        by_design.setdefault(replicate.variant.design, set()).add(replicate.seed)
    assert by_design["reference"] == by_design["each"] == by_design["all"] == by_design["only"]
    assert not by_design["self"] & by_design["reference"]


def test_one_region_needs_no_variant_with_it_alone() -> None:
    assert [v.design for v in variants_of(parts_of(("rope",)))] == ["reference", "each", "all", "self"]


def test_one_replicate_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        check_num_replicates(1)


def test_one_cluster_gives_no_error_bar_and_nothing_is_ranked() -> None:
    ids = sequences(1, 10)
    result = attribute(
        planted_score({"rope": 0.03, "swiglu": 0.0, "rmsnorm": 0.0}, ids), REGIONS, ids, num_replicates=3
    )
    assert not result.ranked
    assert "10 tokens make 1 cluster" in findings(result)[0].text
