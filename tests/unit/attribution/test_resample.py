"""Errors over sequences, Student's distribution and Holm's correction against known values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rpadiag.attribution.resample import (
    Measured,
    Sequences,
    holm,
    jackknife,
    mean_over_tokens,
    student_quantile,
    student_tail,
)


def ids(num: int, length: int) -> np.ndarray:
    return np.repeat(np.arange(num), length)


@pytest.mark.parametrize(
    ("dof", "level", "value"),
    [(1, 0.975, 12.7062), (2, 0.95, 2.919986), (7, 0.975, 2.364624), (30, 0.99, 2.457262), (5, 0.9995, 6.868827)],
)
def test_quantiles_are_those_of_the_printed_tables(dof: int, level: float, value: float) -> None:
    assert student_quantile(level, dof) == pytest.approx(value, rel=2e-6)
    assert student_tail(value, dof) == pytest.approx(1 - level, rel=1e-4)


def test_tail_is_symmetric_and_half_at_zero() -> None:
    assert student_tail(0.0, 9) == 0.5
    assert student_tail(-1.3, 9) + student_tail(1.3, 9) == pytest.approx(1.0)
    assert student_tail(math.inf, 9) == 0.0


def test_jackknife_of_independent_values_is_the_standard_error_of_the_mean() -> None:
    values = np.random.default_rng(4).standard_normal(200)
    mean = mean_over_tokens(values, Sequences(np.arange(200)))
    assert mean.value == pytest.approx(values.mean())
    assert mean.se == pytest.approx(values.std(ddof=1) / np.sqrt(200))
    assert mean.dof == 199


def test_tokens_that_share_their_noise_do_not_shrink_the_error() -> None:
    rng = np.random.default_rng(5)
    shared = rng.standard_normal(20)
    sequences = Sequences(ids(20, 50))
    claimed = mean_over_tokens(np.repeat(shared, 50), sequences).se
    assert claimed == pytest.approx(shared.std(ddof=1) / np.sqrt(20))  # and not smaller by sqrt(50)


def test_error_of_a_ratio_is_joint() -> None:
    rng = np.random.default_rng(6)
    a = rng.uniform(1, 2, 30)
    ratio = jackknife(lambda s: (s[0] / s[1])[None], np.stack([3 * a, a]))[0]
    assert ratio.value == pytest.approx(3.0)
    assert ratio.se < 1e-12


def test_one_sequence_has_no_error_and_nothing_is_above_zero() -> None:
    only = mean_over_tokens(np.ones(10), Sequences(ids(1, 10)))
    assert only.value == 1.0 and math.isinf(only.se)
    assert only.p_above == 1.0 and only.p_two_sided == 1.0 and math.isinf(only.upper())


def test_exact_zero_is_not_above_zero_and_exact_difference_is() -> None:
    assert Measured(value=0.0, se=0.0, dof=5).p_above == 1.0
    assert Measured(value=1.0, se=0.0, dof=5).p_above == 0.0
    assert Measured(value=0.0, se=1.0, dof=5).p_above == 0.5


def test_sequences_may_come_in_any_order_and_length() -> None:
    sequences = Sequences(np.array([7, 3, 7, 3, 7]))
    assert len(sequences) == 2
    assert sequences.sums(np.arange(5.0)).tolist() == [4.0, 6.0]
    assert sequences.sums(np.ones((2, 5))).tolist() == [[2.0, 3.0], [2.0, 3.0]]


def test_holm_is_the_step_down_procedure() -> None:
    # by hand: 4 * 0.01, max(0.04, 3 * 0.013), 2 * 0.03, max(0.06, 0.04)
    assert holm([0.03, 0.01, 0.013, 0.04]) == pytest.approx([0.06, 0.04, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
