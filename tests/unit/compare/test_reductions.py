"""The all-reduce as an operation of its own: what was planted is what is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rpadiag.bits import to_numpy_bits
from rpadiag.compare.reductions import REFERENCE, Reductions, narrowed, widened
from rpadiag.errors import CaptureError

T, W = 37, 64


def partials(num_ranks: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_ranks)
    return [torch.randn(T, W, generator=generator).to(dtype) for _ in range(num_ranks)]


def reduced(ranks: list[torch.Tensor], total: torch.Tensor, dtype: str = "bfloat16") -> tuple[Reductions, np.ndarray]:
    found = Reductions()
    ours = found.add("o_reduce", to_numpy_bits(torch.cat(ranks, dim=1)), to_numpy_bits(total), dtype=dtype)
    return found, ours


def once(ranks: list[torch.Tensor]) -> torch.Tensor:
    return sum(r.float() for r in ranks).to(ranks[0].dtype)  # type: ignore[union-attr]


def each(ranks: list[torch.Tensor]) -> torch.Tensor:
    total = ranks[0]
    for partial in ranks[1:]:
        total = total + partial
    return total


def truncated(ranks: list[torch.Tensor]) -> torch.Tensor:
    total = sum(r.float() for r in ranks)
    return (total.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("add", "num_ranks", "named"),
    [
        (once, 2, REFERENCE),
        (once, 4, REFERENCE),
        (truncated, 2, "in FP32 in the order of ranks, truncated once"),
        (each, 4, "and rounded after each addition, in the order of ranks"),
        (lambda r: each([*r[2:], *r[:2]]), 4, "and rounded after each addition, around the ring from rank 2"),
        (lambda r: each([r[0] + r[1], r[2] + r[3]]), 4, None),
    ],
)
def test_the_precision_and_order_that_was_planted_is_named(
    add: Callable[[list[torch.Tensor]], torch.Tensor], num_ranks: int, named: str | None
) -> None:
    ranks = partials(num_ranks)
    found, ours = reduced(ranks, add(ranks))
    (finding,) = found.finding()
    assert finding.numbers["reproduced_by"] == named
    assert finding.numbers["num_ranks"] == num_ranks
    assert f"over {num_ranks} ranks (o_proj)" in finding.text
    assert (named or "no order and precision") in finding.text
    np.testing.assert_array_equal(ours, to_numpy_bits(once(ranks)))
    assert finding.numbers["num_differing"] == int((once(ranks) != add(ranks)).sum())


def test_one_addition_cannot_tell_orders_apart_and_lists_no_other() -> None:
    ranks = partials(2)
    found, _ = reduced(ranks, once(ranks))
    assert set(found.wrong) == {REFERENCE, "in FP32 in the order of ranks, truncated once"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_summed_in_fp32_too(dtype: torch.dtype) -> None:
    ranks = partials(3, dtype)
    found, _ = reduced(ranks, once(ranks), str(dtype).removeprefix("torch."))
    assert found.wrong[REFERENCE] == 0


def test_elements_of_several_all_reduces_are_pooled() -> None:
    ranks = partials(2)
    found, _ = reduced(ranks, once(ranks))
    found.add("down_reduce", to_numpy_bits(torch.cat(ranks, dim=1)), to_numpy_bits(truncated(ranks)), dtype="bfloat16")
    (finding,) = found.finding()
    assert found.num_elements == 2 * T * W and finding.numbers["reproduced_by"] is None
    assert "o_proj, down_proj" in finding.text


def test_rounding_and_truncation_are_those_of_torch() -> None:
    values = torch.randn(100_000) * torch.exp(torch.randn(100_000) * 20)
    values[:4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    np.testing.assert_array_equal(narrowed(values.numpy(), "bfloat16"), to_numpy_bits(values.bfloat16()))
    assert np.isnan(widened(narrowed(np.array([np.nan], np.float32), "bfloat16"), "bfloat16")).all()
    np.testing.assert_array_equal(
        widened(to_numpy_bits(values.bfloat16()), "bfloat16"), values.bfloat16().float().numpy()
    )


@pytest.mark.parametrize("width", [W, W + 1, 2 * W - 1])
def test_partial_products_that_are_no_whole_number_of_ranks_are_an_error(width: int) -> None:
    with pytest.raises(CaptureError, match="partial products"):
        Reductions().add("o_reduce", np.zeros((T, width), np.uint16), np.zeros((T, W), np.uint16), dtype="bfloat16")


def test_without_an_all_reduce_nothing_is_said() -> None:
    assert Reductions().finding() == []
