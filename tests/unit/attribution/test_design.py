"""Parts, variants, noise and factorial designs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rpadiag.attribution.design import (
    Switch,
    factorial_points,
    layer_groups,
    layers_by_region,
    parts_of,
    replicates_of,
    variants_of,
)
from rpadiag.attribution.plan import Collected, Plan
from rpadiag.errors import UsageError

REGIONS = ("rope", "swiglu", "rmsnorm")


def test_one_region_needs_no_variant_with_it_alone() -> None:
    assert [v.design for v in variants_of(parts_of(("rope",)))] == ["reference", "each", "all", "self"]


def test_layers_are_cut_into_groups_as_equal_as_possible_that_cover_all() -> None:
    for num, groups in ((30, 6), (30, 4), (7, 3), (2, 2)):
        ranges = layer_groups(num, groups)
        assert [n for a, b in ranges for n in range(a, b)] == list(range(num))
        assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1


def test_parts_by_layer_switch_all_regions_of_a_group_and_the_head_stays_whole() -> None:
    parts = parts_of(("rope", "rmsnorm", "lm_head"), by=("layer",), num_layers=4, num_groups=2)
    assert [p.name for p in parts] == ["layers 0-1", "layers 2-3", "lm_head"]
    assert parts[0].switches == (Switch(region="rope", layers=(0, 2)), Switch(region="rmsnorm", layers=(0, 2)))
    assert parts[2].switches == (Switch(region="lm_head"),)


def test_parts_by_region_and_layer_are_single_switches_with_names_that_differ() -> None:
    parts = parts_of(REGIONS, by=("region", "layer"), num_layers=2)
    assert [p.name for p in parts][:3] == ["rope layer 0", "rope layer 1", "swiglu layer 0"]
    assert len({p.name for p in parts}) == 6 and all(len(p.switches) == 1 for p in parts)


def test_unknown_unit_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="known units: region, layer"):
        parts_of(REGIONS, by=("head",))


def test_every_part_is_left_out_once_and_ranges_of_a_region_unite() -> None:
    parts = parts_of(REGIONS, by=("layer",), num_layers=6, num_groups=3)
    left = next(v for v in variants_of(parts) if v.design == "each" and v.name == "layers 2-3")
    assert layers_by_region(left.aligned, 6) == dict.fromkeys(REGIONS, (0, 1, 4, 5))
    assert layers_by_region((Switch(region="rope"),), 3) == {"rope": (0, 1, 2)}


def test_every_variant_gets_the_same_noise_except_the_self_control() -> None:
    seeds: dict[str, set[int]] = {}
    for replicate in replicates_of(variants_of(parts_of(REGIONS)), range(3), seed=7):
        seeds.setdefault(replicate.variant.design, set()).add(replicate.seed)
    assert seeds["reference"] == seeds["each"] == seeds["all"] == seeds["only"]
    assert not seeds["self"] & seeds["reference"]


def test_forward_that_two_variants_share_is_asked_for_once() -> None:
    plan = Plan(parts=parts_of(("rope", "rmsnorm")), num_replicates=3)
    asked = Collected().missing(plan.of_round(range(3)))
    # each rope = only rmsnorm and the other way round: reference, two, all, self times three, and two without noise
    assert len(asked) == 5 * 3 + 2 == plan.num_forwards
    assert len({r.forward for r in asked}) == len(asked)


def test_interactions_of_three_parts_cost_no_further_forward() -> None:
    parts = parts_of(REGIONS)
    assert len(variants_of(parts, interactions=True)) == len(variants_of(parts))
    assert len(Plan(parts=parts, num_replicates=2, interactions=True).points) == 8


@pytest.mark.parametrize("num", range(2, 9))
def test_main_effects_and_pairs_are_clear_of_one_another(num: int) -> None:
    signs = np.where(np.array(factorial_points(num)), 1, -1)
    columns = [signs[:, i] for i in range(num)]
    columns += [signs[:, i] * signs[:, j] for i, j in itertools.combinations(range(num), 2)]
    table = np.stack(columns)
    assert (table @ table.T == len(signs) * np.eye(len(columns), dtype=int)).all()
    assert (table.sum(axis=1) == 0).all()
    assert len(signs) == len({tuple(s) for s in signs.tolist()}) == {5: 16, 6: 32, 7: 64, 8: 64}.get(num, 2**num)


def test_too_many_parts_for_a_factorial_design_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--interactions needs 2 to 8 parts, got 9"):
        variants_of(parts_of([f"r{i}" for i in range(9)]), interactions=True)


@pytest.mark.parametrize(
    ("field", "value", "says"), [("num_replicates", 1, "at least 2"), ("precision", 1.5, "between 0 and 1")]
)
def test_plan_that_cannot_work_is_a_usage_error(field: str, value: float, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Plan(**{"parts": parts_of(REGIONS), "num_replicates": 4, field: value})


def test_rounds_cover_every_replicate_once() -> None:
    plan = Plan(parts=parts_of(REGIONS), num_replicates=10, precision=0.2)
    assert [list(r) for r in plan.rounds] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(Plan(parts=parts_of(REGIONS), num_replicates=10).rounds) == 1
