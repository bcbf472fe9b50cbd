"""Main effects and interactions of synthetic worlds."""

from __future__ import annotations

import pytest
from synthetic import World

from rpadiag.attribution.attribute import Attribution, attribute
from rpadiag.attribution.design import parts_of
from rpadiag.attribution.factorial import Contrast
from rpadiag.attribution.plan import Plan
from rpadiag.attribution.verdict import findings, verdict

REGIONS = ("rope", "swiglu", "rmsnorm", "attention", "matmul", "lm_head")


def run(world: World, num_replicates: int = 16) -> Attribution:
    plan = Plan(parts=tuple(world.parts), num_replicates=num_replicates, interactions=True)
    return attribute(world.score, plan, world.sequence_ids)


def found(result: Attribution) -> dict[tuple[str, ...], Contrast]:
    return {c.parts: c for c in result.interactions if c.p_adjusted <= 0.05}


@pytest.mark.parametrize("num", [3, 4, 5])
def test_planted_interaction_is_found_and_no_other_pair(num: int) -> None:
    pair = ("rope", "rmsnorm")
    world = World(parts=parts_of(REGIONS[:num]), systematic={"rope": 0.012}, interactions={pair: 0.02})
    result = run(world)
    assert {p for p in found(result) if len(p) == 2} == {pair}
    contrast = found(result)[pair]
    assert (
        abs(contrast.systematic_sq.value - (0.02 / 2) ** 2) < 4 * contrast.systematic_sq.se
    )  # half a difference of effects


def test_interaction_breaks_the_sum_of_the_parts_and_is_said_to() -> None:
    pair = ("rope", "rmsnorm")
    parts = parts_of(REGIONS[:3])
    with_pair = run(World(parts=parts, systematic={"rope": 0.012}, interactions={pair: 0.02}))
    without = run(World(parts=parts, systematic={"rope": 0.012, "rmsnorm": 0.012}))
    assert not with_pair.additivity.holds and without.additivity.holds
    beyond = with_pair.additivity.beyond
    assert abs(beyond.value - 0.02**2) < 4 * beyond.se and beyond.p_above < 1e-4


def test_without_interactions_none_is_found_and_main_effects_are_the_parts() -> None:
    world = World(parts=parts_of(REGIONS[:4]), systematic={"rope": 0.012, "rmsnorm": 0.008})
    result = run(world)
    assert set(found(result)) == {("rope",), ("rmsnorm",)}
    for (name,), contrast in found(result).items():
        assert abs(contrast.systematic_sq.value - world.systematic[name] ** 2) < 4 * contrast.systematic_sq.se


def test_main_effect_has_a_smaller_error_than_one_at_a_time() -> None:
    result = run(World(parts=parts_of(REGIONS[:4])))
    for contrast in result.interactions[:4]:
        assert contrast.systematic_sq.se < 0.5 * result.by_design("each")[contrast.parts[0]].systematic_sq.se


def test_decisions_rest_on_main_effects_and_find_what_one_at_a_time_misses() -> None:
    world = World(parts=parts_of(REGIONS[:4]), systematic={"rope": 0.0035}, num_sequences=40, num_tokens=60)
    crossed = run(world, 24)
    plain = attribute(world.score, Plan(parts=tuple(world.parts), num_replicates=24), world.sequence_ids)
    assert [n for n, d in crossed.decisions.items() if d.responsible] == ["rope"]
    assert crossed.decisions["rope"].evidence == "main square"
    assert not any(d.responsible for d in plain.decisions.values())
    assert "main effect" in verdict(crossed, findings(crossed)).sentence


def test_switch_that_changes_nothing_has_a_main_effect_of_exactly_zero() -> None:
    result = run(World(parts=parts_of(REGIONS[:3]), systematic={"rope": 0.01}, inert=("swiglu",)), 4)
    main = result.main_effect("swiglu")
    assert main is not None and main.systematic_sq.value == 0.0 and main.shift.value == 0.0


def test_fraction_of_five_parts_has_sixteen_points() -> None:
    result = run(World(parts=parts_of(REGIONS[:5]), systematic={"matmul": 0.012}), 8)
    assert result.interactions[0].num_points == 16
    assert set(found(result)) == {("matmul",)}
