"""The checks of an attribution catch what they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from synthetic import World

from rpadiag.attribution.attribute import Attribution, attribute
from rpadiag.attribution.design import parts_of, replicates_of
from rpadiag.attribution.plan import Plan

PARTS = parts_of(("rope", "swiglu", "rmsnorm"))


def run(world: World, num_replicates: int = 16, **plan: object) -> Attribution:
    return attribute(world.score, Plan(parts=PARTS, num_replicates=num_replicates, **plan), world.sequence_ids)  # type: ignore[arg-type]


def test_honest_noise_shifts_no_mean_and_the_unperturbed_forward_is_one_draw_of_it() -> None:
    checks = run(World(parts=PARTS, systematic={"rope": 0.01})).noise
    assert [c.variant for c in checks] == ["reference", "all"]
    for c in checks:
        assert c.holds
        assert abs(c.spread_ratio.value - 1) < 4 * c.spread_ratio.se


def test_noise_that_shifts_every_logprob_is_caught() -> None:
    checks = run(World(parts=PARTS, noise_shift=0.02, shared=0.0)).noise
    assert not any(c.holds for c in checks)
    assert all(abs(c.mean_shift.value - 0.02) < 4 * c.mean_shift.se for c in checks)


def test_second_kind_of_noise_confirms_what_is_there() -> None:
    found = {c.name: c for c in run(World(parts=PARTS, systematic={"rope": 0.015}), confirm=True).confirmations}
    assert set(found) == {"rope", "swiglu", "rmsnorm", "all"}
    assert all(c.agrees for c in found.values())
    assert abs(found["rope"].correlation.value - 1) < 4 * found["rope"].correlation.se


def test_second_kind_of_noise_does_not_confirm_what_only_one_kind_sees() -> None:
    found = {c.name: c for c in run(World(parts=PARTS, batch_only={"rope": 0.02}), confirm=True).confirmations}
    assert not found["rope"].agrees and found["swiglu"].agrees


def test_second_kind_of_few_draws_confirms_by_what_it_shares() -> None:
    """Two distinct draws leave half of the chaos in the second kind's square; what the two kinds share is untouched by it."""
    world = World(parts=PARTS, systematic={"rope": 0.02})

    def score(replicates):  # type: ignore[no-untyped-def]
        for r in replicates:
            few = replace(r, seed=r.seed % 2) if r.kind == "batch" else r
            yield r, world.logprobs(few)

    found = {
        c.name: c
        for c in attribute(score, Plan(parts=PARTS, num_replicates=16, confirm=True), world.sequence_ids).confirmations
    }
    assert all(c.agrees and 0.3 < c.spread < 0.7 for c in found.values())
    assert found["swiglu"].second.p_above < 1e-3  # frozen chaos, taken for systematic by the second kind alone
    assert abs(found["rope"].shared.value - 0.02**2) < 4 * found["rope"].shared.se


def test_second_kind_that_changes_nothing_confirms_nothing() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.015})

    def score(replicates):  # type: ignore[no-untyped-def]
        for r in replicates:
            exact = next(replicates_of((r.variant,), (0,), seed=0, kind="none"))
            yield r, world.logprobs(exact if r.kind == "batch" else r)

    plan = Plan(parts=PARTS, num_replicates=8, confirm=True)
    found = attribute(score, plan, world.sequence_ids).confirmations
    assert all(c.changes_nothing and not c.agrees for c in found)


def test_local_prediction_that_is_the_truth_agrees_and_one_that_is_not_disagrees() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.015, "rmsnorm": 0.015})
    truth = world.field_of("rope", 0.015)
    wrong = np.random.default_rng(1).permutation(world.field_of("rmsnorm", 0.015))
    result = attribute(
        world.score,
        Plan(parts=PARTS, num_replicates=16),
        world.sequence_ids,
        local_effects={"rope": truth, "rmsnorm": wrong},
    )
    rope, rmsnorm = result.local["rope"], result.local["rmsnorm"]
    assert rope.agrees and abs(rope.slope.value - 1) < 4 * rope.slope.se
    assert not rmsnorm.agrees and abs(rmsnorm.shared.value) < 4 * rmsnorm.shared.se


def test_noise_in_the_prediction_lowers_the_slope_unless_its_draws_are_given() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.015}, num_sequences=40)
    truth = world.field_of("rope", 0.015)
    draws = truth + 0.02 * np.random.default_rng(2).standard_normal((4, world.n))
    plan = Plan(parts=PARTS, num_replicates=16)
    slopes = {}
    for given in (draws.mean(axis=0), draws):
        agreement = attribute(world.score, plan, world.sequence_ids, local_effects={"rope": given}).local["rope"]
        slopes[given.ndim] = agreement.slope
        assert agreement.agrees  # what is shared with the replicates does not depend on noise in the prediction
    assert slopes[1].value < 0.8  # 0.015^2 / (0.015^2 + 0.02^2 / 4)
    assert abs(slopes[2].value - 1) < 4 * slopes[2].se


def test_prediction_of_more_than_there_is_disagrees_where_its_draws_are_given() -> None:
    world = World(parts=PARTS, num_sequences=40)
    draws = world.field_of("rope", 0.015) + 0.005 * np.random.default_rng(3).standard_normal((4, world.n))
    result = attribute(
        world.score, Plan(parts=PARTS, num_replicates=16), world.sequence_ids, local_effects={"rope": draws}
    )
    assert not result.local["rope"].agrees


def test_part_that_changes_nothing_and_of_which_nothing_is_predicted_agrees() -> None:
    world = World(parts=PARTS, inert=("swiglu",))
    result = attribute(
        world.score,
        Plan(parts=PARTS, num_replicates=4),
        world.sequence_ids,
        local_effects={"swiglu": np.zeros(world.n)},
    )
    assert result.local["swiglu"].agrees


def test_self_control_fails_on_a_shift_that_leaves_the_square_alone() -> None:
    """A mean shift of 0.004 nats is 1.6e-5 in square: within the error of that, far outside the error of the mean."""
    world = World(parts=PARTS, control_shift=0.004, shared=0.0, num_sequences=40)
    result = run(world, 32)
    assert result.control.systematic_sq.p_two_sided > 0.0027
    assert not result.ranked
