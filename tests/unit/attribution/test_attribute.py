"""Attribution of synthetic worlds with planted answers, from replicates to decisions."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import World

from rpadiag.attribution.attribute import Attribution, attribute
from rpadiag.attribution.decide import NO_EFFECT, NOT_DISTINGUISHABLE, NOT_RANKED, RESPONSIBLE, SATURATED
from rpadiag.attribution.design import parts_of
from rpadiag.attribution.plan import Plan
from rpadiag.errors import EngineError

REGIONS = ("rope", "swiglu", "rmsnorm", "attention")
PARTS = parts_of(REGIONS)


def run(world: World, num_replicates: int = 16, **plan: object) -> Attribution:
    return attribute(
        world.score, Plan(parts=tuple(world.parts), num_replicates=num_replicates, **plan), world.sequence_ids
    )  # type: ignore[arg-type]


def responsible(result: Attribution) -> set[str]:
    return {name for name, d in result.decisions.items() if d.responsible}


@pytest.mark.parametrize("planted", REGIONS)
def test_the_one_planted_region_is_found_and_the_others_are_not(planted: str) -> None:
    result = run(World(parts=PARTS, systematic={planted: 0.013}))
    assert result.ranked and responsible(result) == {planted}
    found = result.by_design("each")[planted].systematic_sq
    assert abs(found.value - 0.013**2) < 4 * found.se
    assert abs(result.shares[planted].value - 1.0) < 4 * result.shares[planted].se
    assert result.saturated and result.decisions[planted].end_to_end == SATURATED


def test_two_planted_regions_are_both_found_and_add_up_within_the_error() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.010, "rmsnorm": 0.013}, num_sequences=40, num_tokens=60)
    result = run(world, 24)
    assert responsible(result) == {"rope", "rmsnorm"}
    a = result.additivity
    assert a.holds and abs(a.gap_of_squares.value) < 4 * a.gap_of_squares.se
    assert abs(a.sum_of_squares.value - (0.010**2 + 0.013**2)) < 4 * a.sum_of_squares.se


def test_planted_layer_range_is_found_by_layer() -> None:
    parts = parts_of(("rope", "rmsnorm"), by=("layer",), num_layers=30)
    result = run(World(parts=parts, systematic={"layers 10-14": 0.013}))
    assert responsible(result) == {"layers 10-14"}


def test_region_in_a_layer_range_is_found_by_region_and_layer() -> None:
    parts = parts_of(("rope", "rmsnorm"), by=("region", "layer"), num_layers=30)
    result = run(World(parts=parts, systematic={"rmsnorm layers 0-9": 0.015}))
    assert responsible(result) == {"rmsnorm layers 0-9"}


def test_systematic_bias_forty_times_below_the_chaos_is_found() -> None:
    """1e-3 nats on every token, of one sign, under a chaotic part of 0.04: the mean shows it long before the mean square does."""
    world = World(parts=PARTS, systematic={"rope": 1e-3}, shifts={"rope": 1e-3}, chaos=0.04, num_tokens=120)
    result = run(world, 128)
    assert responsible(result) == {"rope"} and result.decisions["rope"].evidence == "shift"
    shift = result.by_design("each")["rope"].mean_shift
    assert abs(shift.value - 1e-3) < 4 * shift.se


def test_switch_that_changes_nothing_is_called_that() -> None:
    result = run(World(parts=PARTS, systematic={"rope": 0.013}, inert=("swiglu",)))
    assert result.by_design("each")["swiglu"].is_zero
    assert result.decisions["swiglu"].end_to_end == NO_EFFECT
    assert result.decisions["swiglu"].word == NOT_DISTINGUISHABLE


def test_aligning_a_part_removes_what_it_carries() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.010, "rmsnorm": 0.013}, num_sequences=40, num_tokens=60)
    result = run(world, 24)
    for name, rms in world.systematic.items():
        for metric in ("systematic_sq", "weight_bias_sq"):
            change = result.effect(name, metric).change
            assert abs(change.value + rms**2) < 4 * change.se and change.se < 0.4 * rms**2
    assert result.effect("all", "mean_abs_d").aligned.value == 0.0
    assert result.floor["mean_abs_d"].value > 0.03  # chaos, which no alignment removes


def test_ranking_by_mean_abs_d_misleads_on_the_same_data() -> None:
    """Over ten worlds the gain in mean |d| of one forward names the strongest of three parts by luck, the systematic part every time."""
    naive = systematic = 0
    for seed in range(10):
        world = World(parts=PARTS[:3], systematic={"rope": 0.010, "rmsnorm": 0.006}, seed=seed)
        result = run(world)
        systematic += result.strongest_first()[0][0] == "rope" and result.decisions["rope"].responsible
        naive += result.naive["rope"].rank == 1
    assert systematic == 10
    assert naive < 8  # one in three by chance


def test_failed_self_control_ranks_nothing() -> None:
    result = run(World(parts=PARTS, systematic={"rope": 0.02}, control_shift=0.02))
    assert not result.ranked
    assert {d.word for d in result.decisions.values()} == {NOT_RANKED}


def test_one_sequence_gives_no_error_bar_and_ranks_nothing() -> None:
    result = run(World(parts=PARTS, systematic={"rope": 0.02}, num_sequences=1, num_tokens=200))
    assert not result.ranked and not responsible(result)


def test_token_without_a_finite_logprob_is_left_out_everywhere() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.013})

    def score(replicates):  # type: ignore[no-untyped-def]
        for replicate, logprobs in world.score(replicates):
            yield replicate, np.where(np.arange(world.n) % 100 == replicate.index, np.nan, logprobs)

    result = attribute(score, Plan(parts=PARTS, num_replicates=16), world.sequence_ids)
    # 16 residues of 100 over 960 tokens: ten of each
    assert result.num_nonfinite == 16 * 10 and result.total.num_tokens == world.n - 160
    assert responsible(result) == {"rope"}


def test_no_finite_token_is_an_error() -> None:
    world = World(parts=PARTS)
    with pytest.raises(EngineError, match="no token has a finite logprob"):
        attribute(
            lambda asked: ((r, np.full(world.n, np.nan)) for r in asked),
            Plan(parts=PARTS, num_replicates=2),
            world.sequence_ids,
        )


def test_interrupted_attribution_goes_on_to_equal_numbers() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.013})
    plan = Plan(parts=PARTS, num_replicates=12, precision=0.3, confirm=True, interactions=True)
    whole = attribute(world.score, plan, world.sequence_ids)
    for stop in (0, 1, 7, 40, whole.num_forwards - 1):
        kept: list[tuple] = []

        def interrupted(replicates, stop=stop, kept=kept):  # type: ignore[no-untyped-def]
            for answer in world.score(replicates):
                if len(kept) == stop:
                    raise KeyboardInterrupt
                yield answer

        with pytest.raises(KeyboardInterrupt):
            attribute(interrupted, plan, world.sequence_ids, on_scored=lambda r, x, kept=kept: kept.append((r, x)))
        assert len(kept) == stop
        resumed = attribute(world.score, plan, world.sequence_ids, done=kept)
        assert resumed.num_forwards == whole.num_forwards - stop
        assert resumed.decisions == whole.decisions and resumed.shares == whole.shares
        assert resumed.effects == whole.effects and resumed.interactions == whole.interactions
        assert repr(resumed.confirmations) == repr(whole.confirmations)  # NaN is not equal to itself
        assert resumed.noise == whole.noise


def test_stopping_rule_stops_when_the_strongest_part_is_precise_enough() -> None:
    strong = run(World(parts=PARTS, systematic={"rope": 0.03}), 64, precision=0.2)
    assert strong.stopped_early and strong.num_replicates < 32
    best = strong.by_design("each")["rope"].systematic_sq
    assert best.se <= 0.2 * best.value and strong.decisions["rope"].word == RESPONSIBLE
    weak = run(World(parts=PARTS, systematic={"rope": 0.001}), 12, precision=0.2)
    assert not weak.stopped_early and weak.num_replicates == 12


def test_tighter_precision_takes_more_replicates() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.02}, num_sequences=60, num_tokens=60)
    used = [run(world, 64, precision=p).num_replicates for p in (0.3, 0.1)]
    assert used[0] < used[1]
