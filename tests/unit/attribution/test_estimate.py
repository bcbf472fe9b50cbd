"""The estimator on data whose answer is known: it is unbiased, and its error bar covers."""

from __future__ import annotations

import numpy as np
import pytest

from rpadiag.attribution.estimate import estimate, share_of
from rpadiag.attribution.resample import Sequences


def sequences(num: int, length: int) -> Sequences:
    return Sequences(np.repeat(np.arange(num), length))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def test_systematic_part_is_unbiased_under_chaos_forty_times_larger() -> None:
    rng = np.random.default_rng(1)
    groups = sequences(40, 25)
    truth = 1.25e-3 * rng.standard_normal(1000)
    values = []
    for _ in range(60):
        reference = 0.05 * rng.standard_normal((8, 1000))
        variant = truth + 0.05 * rng.standard_normal((8, 1000))
        values.append(estimate(variant, reference, groups).systematic_sq.value)
    mean, error = mean_and_error(values)  # 60 independent estimates: within four of their own standard errors
    assert abs(mean - np.mean(truth**2)) < 4 * error


def test_error_bar_covers_the_spread_of_repeated_estimates() -> None:
    rng = np.random.default_rng(2)
    groups = sequences(32, 20)
    estimates = [
        estimate(0.05 * rng.standard_normal((6, 640)), 0.05 * rng.standard_normal((6, 640)), groups).systematic_sq
        for _ in range(80)
    ]
    spread = np.std([m.value for m in estimates], ddof=1)
    claimed = np.mean([m.se for m in estimates])
    assert 0.7 < claimed / spread < 1.4
    # p < 0.05 about 5 % of the time; 80 draws stay below 12 with a probability above 0.999
    assert sum(m.p_above < 0.05 for m in estimates) < 12


def test_signed_shift_is_found_with_its_sign() -> None:
    rng = np.random.default_rng(3)
    groups = sequences(20, 50)
    reference = 0.05 * rng.standard_normal((16, 1000))
    variant = -0.004 + 0.05 * rng.standard_normal((16, 1000))
    shift = estimate(variant, reference, groups).mean_shift
    assert abs(shift.value + 0.004) < 4 * shift.se
    assert shift.p_two_sided < 0.001


def test_k3_splits_into_half_the_systematic_square_and_the_rest() -> None:
    rng = np.random.default_rng(4)
    groups = sequences(30, 100)
    truth = 0.02 * rng.standard_normal(3000)
    found = estimate(truth + 0.03 * rng.standard_normal((16, 3000)), 0.03 * rng.standard_normal((16, 3000)), groups)
    assert found.k3_kl.value == pytest.approx(found.k3_kl_systematic.value + found.k3_kl_chaotic.value)
    assert abs(found.k3_kl_systematic.value - np.mean(truth**2) / 2) < 4 * found.k3_kl_systematic.se
    # k3(d) = d^2 / 2 + d^3 / 6 + ...; with d of 0.05 the rest is a percent
    assert found.k3_kl_chaotic.value == pytest.approx(2 * 0.03**2 / 2, rel=0.05)


def test_bias_of_the_policy_gradient_weight_is_unbiased() -> None:
    """E[rho - 1] with D normal is exp(b + s^2 / 2) - 1: known, and not zero even where b is."""
    rng = np.random.default_rng(5)
    groups = sequences(40, 25)
    truth = 0.02 * rng.standard_normal(1000)
    weight = np.expm1(truth + 2 * 0.05**2 / 2)
    squares, means = [], []
    for _ in range(60):
        found = estimate(truth + 0.05 * rng.standard_normal((6, 1000)), 0.05 * rng.standard_normal((6, 1000)), groups)
        squares.append(found.weight_bias_sq.value)
        means.append(found.weight_bias.value)
    for values, known in ((squares, np.mean(weight**2)), (means, np.mean(weight))):
        mean, error = mean_and_error(values)
        assert abs(mean - known) < 4 * error


def test_sequence_ratio_adds_up_what_tokens_share() -> None:
    rng = np.random.default_rng(6)
    groups = sequences(50, 40)
    found = estimate(0.003 + 0.02 * rng.standard_normal((16, 2000)), 0.02 * rng.standard_normal((16, 2000)), groups)
    # a shift of 0.003 on each of 40 tokens is 0.12 of a sequence
    assert abs(found.sequence_sq.value - 0.12**2) < 4 * found.sequence_sq.se
    assert found.sequence_chaotic_rms.value == pytest.approx(0.02 * np.sqrt(2 * 40), rel=0.1)


def test_identical_variant_gives_exactly_zero() -> None:
    logprobs = np.random.default_rng(7).standard_normal((4, 50))
    found = estimate(logprobs, logprobs.copy(), sequences(10, 5))
    assert found.systematic_sq.value == 0.0 and found.systematic_sq.se == 0.0
    assert found.is_zero and found.systematic_sq.p_above == 1.0


def test_share_of_the_total_has_a_smaller_error_than_its_terms_would_give() -> None:
    rng = np.random.default_rng(8)
    groups = sequences(30, 50)
    truth = 0.03 * rng.standard_normal(1500) * np.repeat(rng.uniform(0.3, 2.0, 30), 50)
    reference = 0.01 * rng.standard_normal((8, 1500))
    part = estimate(truth + 0.01 * rng.standard_normal((8, 1500)), reference, groups)
    total = estimate(1.1 * truth + 0.01 * rng.standard_normal((8, 1500)), reference, groups)
    share = share_of(part.sums["systematic_sq"], total.sums["systematic_sq"])
    assert abs(share.value - 1 / 1.21) < 4 * share.se
    alone = share.value * np.hypot(
        part.systematic_sq.se / part.systematic_sq.value, total.systematic_sq.se / total.systematic_sq.value
    )
    assert share.se < 0.5 * alone


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        estimate(np.zeros((2, 5)), np.zeros((3, 5)), sequences(1, 5))
