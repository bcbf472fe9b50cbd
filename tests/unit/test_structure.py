"""The shape of a difference: ULP line, one-sidedness, rows, columns, and noise that is none of these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rpadiag.errors import UsageError
from rpadiag.structure import (
    change,
    coherence,
    describe_structure,
    num_mismatches,
    ordered_bits,
    same_values,
    signed_ulp,
)

BF16 = torch.bfloat16
X = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).to(BF16)


def moved(steps: Tensor, x: Tensor = X) -> Tensor:
    """x moved by whole ULP in magnitude."""
    return (x.view(torch.int16) + steps.to(torch.int16)).view(BF16)


def coin(seed: int, share: float = 0.3) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(X.shape, generator=g) < share).int() * (2 * torch.randint(0, 2, X.shape, generator=g) - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_zeros_of_both_signs_share_a_place_and_neighbours_are_one_apart(dtype: torch.dtype) -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0], dtype=dtype)
    up = torch.nextafter(x.double(), x.double() + 1) if dtype == torch.float64 else None
    places = ordered_bits(x)
    assert places[0] == places[1] == 0 and places[2] == -places[3]
    if up is not None:
        assert (ordered_bits(up) - places).tolist() == [1, 1, 1, 1]


def test_integers_have_no_ulp() -> None:
    with pytest.raises(UsageError, match="int32"):
        ordered_bits(torch.zeros(3, dtype=torch.int32))


def test_magnitude_is_counted_away_from_zero() -> None:
    d, magnitude = signed_ulp(torch.tensor([1.0, -1.0]).to(BF16), torch.tensor([1.0078125, -1.0078125]).to(BF16))
    assert d.tolist() == [1, -1] and magnitude.tolist() == [1, 1]


def test_nan_equals_nan_and_differs_from_numbers() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert same_values(x, x.clone()) and num_mismatches(x, x.clone()) == 0
    assert num_mismatches(x, torch.tensor([1.0, 2.0])) == 1
    assert not same_values(x, torch.tensor([1.0, 2.0]))


def test_equal_tensors_have_no_structure() -> None:
    assert describe_structure(X, X.clone()).kind == "equal"


def test_truncation_is_one_sided() -> None:
    found = describe_structure(X, moved(-(coin(2).abs())))
    assert found.kind == "one-sided" and "toward zero" in found.text and "truncation" in found.text


def test_random_rounding_is_scattered() -> None:
    found = describe_structure(X, moved(coin(3)))
    assert found.kind == "scattered" and "unbiased" in found.text
    assert found.numbers["differing"] == pytest.approx(0.3, abs=0.02)


def test_a_scalar_of_the_row_is_per_row() -> None:
    sign = 2 * torch.randint(0, 2, (128, 1), generator=torch.Generator().manual_seed(4)) - 1
    assert describe_structure(X, moved(coin(5).abs() * sign)).kind == "per-row"


def test_a_weight_is_per_column() -> None:
    sign = 2 * torch.randint(0, 2, (1, 256), generator=torch.Generator().manual_seed(6)) - 1
    assert describe_structure(X, moved(coin(7).abs() * sign)).kind == "per-column"


def test_differences_confined_to_few_rows_are_per_row() -> None:
    few = (torch.arange(128) % 16 == 0)[:, None]
    assert describe_structure(X, moved(coin(8) * few)).kind == "per-row"


def test_rounding_a_rounded_row_times_a_scalar_is_not_mistaken_for_a_row_effect() -> None:
    """bf16(bf16(x * r) * w) against bf16(x * r * w): each row is biased by its own pattern, weakly."""
    r = torch.rand(128, 1, generator=torch.Generator().manual_seed(9)) + 0.5
    w = torch.rand(256, generator=torch.Generator().manual_seed(10)) + 0.5
    once = (X.float() * r * w).to(BF16)
    twice = ((X.float() * r).to(BF16).float() * w).to(BF16)
    assert coherence(once, twice, axis=1) < 0.4
    assert describe_structure(once, twice).kind == "scattered"


def test_change_counts_what_it_says() -> None:
    y = X.clone()
    y[0, 0] = float("inf")
    y[1, :4] = moved(torch.ones_like(X, dtype=torch.int32))[1, :4]
    c = change(X, y)
    assert (c.n, c.num_differing, c.max_ulp) == (X.numel(), 5, 1)
    assert c.magnitude_balance == 1.0


def test_structure_needs_two_matrices_of_one_shape() -> None:
    with pytest.raises(UsageError, match="rows, columns"):
        describe_structure(X, X[:5])
