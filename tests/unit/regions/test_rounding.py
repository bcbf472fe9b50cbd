"""Rounding primitives against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from rpadiag.regions.rounding import fma, fma_lp, store, to_lp

LP = (torch.bfloat16, torch.float16)


def _spread(count: int, seed: int, low: float = -30.0, high: float = 30.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.empty(count).uniform_(low, high, generator=generator)
    return torch.randn(count, generator=generator) * torch.exp2(exponent)


def _nearest(exact: Fraction, lp: torch.dtype) -> float:
    """The lp value next to a rational, ties to even, found among the neighbours of a guess."""
    guess = torch.tensor(float(exact), dtype=torch.float64).to(torch.float32).to(lp)
    integer = torch.int32 if lp == torch.float32 else torch.int16
    bits = int(guess.view(integer))
    best = None
    for step in (-1, 0, 1):
        value = torch.tensor(bits + step, dtype=integer).view(lp)
        if not torch.isfinite(value):
            continue
        key = (abs(Fraction(float(value)) - exact), (bits + step) & 1)
        if best is None or key < best[0]:
            best = (key, float(value))
    assert best is not None
    return best[1]


@pytest.mark.parametrize("lp", LP)
def test_store_to_nearest_even_is_the_nearest_value(lp: torch.dtype) -> None:
    x = _spread(2000, 0, -12, 12)
    for value, rounded in zip(x.tolist(), store(x, lp).to(torch.float32).tolist(), strict=True):
        assert rounded == _nearest(Fraction(value), lp)


@pytest.mark.parametrize("lp", LP)
def test_truncating_store_is_the_neighbour_toward_zero(lp: torch.dtype) -> None:
    x = _spread(100_000, 1, -40, 14)
    down = store(x, lp, "truncate").to(torch.float32)
    assert bool((down.abs() <= x.abs()).all())
    up = (store(x, lp, "truncate").view(torch.int16) + 1).view(lp).to(torch.float32)
    assert bool(((up.abs() > x.abs()) | (down == x)).all())


def test_truncating_bfloat16_drops_the_low_half_of_the_word() -> None:
    x = torch.cat([_spread(100_000, 2, -120, 120), torch.tensor([0.0, -0.0, 1e-40, -1e-40])])
    expected = (x.numpy().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert np.array_equal(store(x, torch.bfloat16, "truncate").to(torch.float32).numpy(), expected)


@pytest.mark.parametrize("lp", LP)
def test_truncating_keeps_nan_and_infinity_and_never_makes_them(lp: torch.dtype) -> None:
    largest = torch.finfo(lp).max
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), largest * 1.0001, -largest * 1.0001])
    out = store(x, lp, "truncate").to(torch.float32)
    assert out[0].isnan() and out[1] == float("inf") and out[2] == float("-inf")
    assert out[3] == largest and out[4] == -largest


def test_fma_rounds_once() -> None:
    a, b = _spread(3000, 3), _spread(3000, 4)
    c = -(a * b) * (1 + torch.randn(3000, generator=torch.Generator().manual_seed(5)) * 2.0**-22)
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), fma(a, b, c).tolist(), strict=True):
        assert got == _nearest(Fraction(x) * Fraction(y) + Fraction(z), torch.float32)


@pytest.mark.parametrize("lp", LP)
def test_fma_to_lp_rounds_once_where_two_roundings_differ(lp: torch.dtype) -> None:
    # 1 + half an lp ulp is a tie; an addend far below decides it, and is lost in float32.
    half = torch.finfo(lp).eps / 2
    a = torch.tensor([1.0 + half, 1.0 + half])
    c = torch.tensor([2.0**-40, -(2.0**-40)])
    one = torch.ones(2)
    assert fma_lp(a, one, c, lp).tolist() == [1.0 + 2 * half, 1.0]
    assert store(a * one + c, lp).tolist() == [1.0, 1.0]


def test_fma_that_underflows_gives_zero_or_the_least_subnormal() -> None:
    a, b = torch.tensor([1e-30, -1e-30]), torch.tensor([1e-30, 1e-30])
    assert fma_lp(a, b, torch.zeros(2), torch.bfloat16).tolist() == [0.0, 0.0]


def test_float32_is_never_rounded() -> None:
    x = _spread(1000, 6)
    assert torch.equal(to_lp(x, torch.float32), x) and torch.equal(store(x, torch.float32, "truncate"), x)
