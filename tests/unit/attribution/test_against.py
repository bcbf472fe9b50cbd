"""Trainers held against a rollout engine that was replicated too, in synthetic worlds."""

from __future__ import annotations

import pytest
from synthetic import World

from rpadiag.attribution.attribute import Attribution, attribute
from rpadiag.attribution.design import parts_of
from rpadiag.attribution.plan import Plan
from rpadiag.attribution.rows import attribution_rows, summary
from rpadiag.attribution.verdict import findings

PARTS = parts_of(("rope", "swiglu", "rmsnorm"))
PLANTED = {"rope": 0.013, "rmsnorm": 0.010}


def run(engine: float, **plan: object) -> Attribution:
    world = World(parts=PARTS, systematic=PLANTED, engine=engine, num_sequences=40)
    asked = Plan(parts=tuple(PARTS), num_replicates=24, **{"rollout": True, **plan})  # type: ignore[arg-type]
    return attribute(world.score, asked, world.sequence_ids)


@pytest.fixture(scope="module")
def other() -> Attribution:
    """An engine that differs from the aligned trainer in something that is not among the parts."""
    return run(engine=0.012)


def test_what_the_parts_do_not_cover_is_left_with_all_of_them_aligned(other: Attribution) -> None:
    assert other.against is not None
    left, whole = other.against.estimates["reference"].systematic_sq, other.against.estimates["all"].systematic_sq
    assert abs(left.value - 0.012**2) < 4 * left.se
    assert abs(whole.value - (0.013**2 + 0.010**2 + 0.012**2)) < 4 * whole.se
    (told,) = [f for f in findings(other) if f.code == "against-rollout"]
    assert "is above zero" in told.text


def test_aligning_a_part_alone_gains_what_the_part_carries(other: Attribution) -> None:
    assert other.against is not None
    for name, rms in {**PLANTED, "swiglu": 0.0}.items():
        change = other.against.change(name)
        assert abs(change.value + rms**2) < 4 * change.se, name
    both = other.against.change("reference")
    assert abs(both.value + 0.013**2 + 0.010**2) < 4 * both.se


def test_engine_that_is_the_aligned_trainer_leaves_exactly_nothing() -> None:
    result = run(engine=0.0)
    assert result.against is not None and result.against.estimates["reference"].is_zero
    (told,) = [f for f in findings(result) if f.code == "against-rollout"]
    assert "to the last bit" in told.text


def test_both_stacks_are_said_to_be_replicated_and_parts_keep_their_numbers(other: Attribution) -> None:
    alone = run(engine=0.012, rollout=False)
    assert other.replicated == ("trainer", "rollout") and alone.replicated == ("trainer",)
    assert alone.against is None and {c.variant for c in other.noise} == {"reference", "all", "rollout"}
    for name, decision in alone.decisions.items():
        assert other.decisions[name] == decision
    (told,) = [f for f in findings(other) if f.code == "replicated-stacks"]
    assert told.text.startswith("Both stacks were replicated")


def test_rows_and_summary_hold_the_numbers_against_the_engine(other: Attribution) -> None:
    rows = {r["region"]: r for r in attribution_rows(other) if r["design"] == "rollout"}
    assert list(rows) == ["all", "rope", "swiglu", "rmsnorm", "reference"]
    assert other.against is not None
    assert rows["rope"]["systematic_sq"] == other.against.estimates["rope"].systematic_sq.value
    assert set(summary(other)["against_rollout"]["change_by_aligning"]) == {"rope", "swiglu", "rmsnorm", "reference"}


def test_interactions_and_one_part_go_with_a_rollout() -> None:
    crossed = run(engine=0.012, interactions=True)
    assert crossed.against is not None and {c.parts for c in crossed.interactions if len(c.parts) == 2}
    single = parts_of(("rope",))
    world = World(parts=single, systematic={"rope": 0.013}, engine=0.012)
    found = attribute(world.score, Plan(parts=single, num_replicates=8, rollout=True), world.sequence_ids)
    assert found.against is not None and list(found.against.estimates) == ["all", "reference"]
