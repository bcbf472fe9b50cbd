"""Expert choices: flips counted by tokens, ties apart, whatever the dtype of the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpadiag.bits import to_numpy_bits
from rpadiag.compare.aggregate import Aggregate
from rpadiag.compare.experts import Flips, count_flips, flip_findings, on_line, tied_tokens


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_a_token_whose_second_expert_changes_is_a_flip_and_a_new_order_of_the_same_is_none() -> None:
    ours = logits([3, 2, 1, 0], [3, 2, 1, 0])
    theirs = logits([3, 1, 2, 0], [2, 3, 1, 0])
    assert count_flips(ours, theirs, 2) == Flips(num_tokens=2, num_flips=1, num_ties=0)


def test_equal_logits_at_the_boundary_are_a_tie_and_no_flip() -> None:
    ours = logits([3, 2, 2, 0])
    assert tied_tokens(ours, 2).tolist() == [True]
    assert count_flips(ours, logits([3, 1, 2, 0]), 2) == Flips(num_tokens=1, num_flips=0, num_ties=1)
    # whichever of the two equal ones is taken, the other stack's fourth expert is not among them
    assert count_flips(ours, logits([3, 0, 1, 2]), 2).num_flips == 1
    assert tied_tokens(logits([3, 3, 1, 0]), 2).tolist() == [False]  # a tie among the chosen leaves nothing open


def test_a_token_that_goes_to_every_expert_cannot_flip() -> None:
    assert count_flips(logits([1, 2]), logits([2, 1]), 2) == Flips(num_tokens=1, num_flips=0, num_ties=0)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12))
def test_bfloat16_patterns_compare_as_the_numbers_they_stand_for(values: list[float]) -> None:
    tensor = torch.tensor(values).to(torch.bfloat16)
    line, numbers = on_line(to_numpy_bits(tensor)), tensor.float().numpy()
    assert np.array_equal(line[:, None] < line[None], numbers[:, None] < numbers[None])
    assert np.array_equal(line[:, None] == line[None], numbers[:, None] == numbers[None])


@pytest.mark.parametrize("seed", range(3))
def test_flips_equal_those_of_torch_where_nothing_is_tied(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(200, 8, generator=g)
    b = a + 0.2 * torch.randn(200, 8, generator=g)
    sets = [torch.zeros(200, 8).scatter(1, x.topk(2).indices, 1.0) for x in (a, b)]
    expected = int((sets[0] != sets[1]).any(-1).sum())
    assert expected > 10
    assert count_flips(a.numpy(), b.numpy(), 2).num_flips == expected


def test_counts_add_up_and_an_unmeasured_local_count_stays_unmeasured() -> None:
    one = Flips(num_tokens=5, num_flips=2, num_ties=1)
    assert (one + one).num_local_flips is None
    assert one + Flips(num_tokens=3, num_local_flips=1) == Flips(
        num_tokens=8, num_flips=2, num_ties=1, num_local_flips=1
    )


def test_the_finding_names_counts_layers_and_what_fp32_says() -> None:
    model, control = Aggregate(), Aggregate()
    model.add("layers.0.router", flips=Flips(num_tokens=100, num_flips=3, num_ties=1, num_local_flips=0))
    model.add("layers.2.router", flips=Flips(num_tokens=100, num_flips=0, num_local_flips=0))
    control.add("layers.0.router", flips=Flips(num_tokens=50))
    (finding,) = flip_findings(model, control)
    assert "3 of 200" in finding.text and "2 layers" in finding.text and "in FP32 0 of 50" in finding.text
    assert "1 pairs have equal logits" in finding.text
    assert finding.numbers["by_site"] == {"layers.0.router": 3}
    assert finding.severity == "warning"


def test_a_model_without_experts_has_no_such_finding() -> None:
    dense = Aggregate()
    dense.add("layers.0.q")
    assert flip_findings(dense, None) == []
