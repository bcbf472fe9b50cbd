"""What is said: the sentence, the findings, and that each number in them is the measured one."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import World

from rpadiag.attribution.attribute import Attribution, attribute
from rpadiag.attribution.design import parts_of
from rpadiag.attribution.plan import Plan
from rpadiag.attribution.rows import attribution_rows, effect_rows, summary
from rpadiag.attribution.verdict import findings, verdict
from rpadiag.findings import Finding
from rpadiag.runs.schema import ATTRIBUTION, EFFECTS

PARTS = parts_of(("rope", "swiglu", "rmsnorm"))


def run(world: World, num_replicates: int = 16, **plan: object) -> Attribution:
    return attribute(
        world.score,
        Plan(parts=PARTS, num_replicates=num_replicates, **plan),  # type: ignore[arg-type]
        world.sequence_ids,
        local_differing={"rope": 0.23},
    )


@pytest.fixture(scope="module")
def result() -> Attribution:
    return run(World(parts=PARTS, systematic={"rope": 0.008, "rmsnorm": 0.014}, num_sequences=40, num_tokens=60), 24)


def told(result: Attribution, code: str) -> Finding:
    return next(f for f in findings(result) if f.code == code)


def test_sentence_names_who_is_responsible_how_sure_and_what_aligning_does_not_remove(result: Attribution) -> None:
    said = verdict(result, findings(result))
    assert said.kind == "attributed"
    share = result.shares["rmsnorm"]
    assert f"rmsnorm ({100 * share.value:.0f} ± {100 * share.se:.0f} % of the total" in said.sentence
    assert "are responsible" in said.sentence and "align rmsnorm first" in said.sentence
    assert "swiglu cannot be told from zero" in said.sentence
    assert f"{result.total.chaotic_rms.value:.3f} nats rms of chaos" in said.sentence


def test_regions_as_strong_as_one_another_are_not_put_in_an_order() -> None:
    tied = run(World(parts=PARTS, systematic={"rope": 0.014, "rmsnorm": 0.014}, num_sequences=40, num_tokens=60), 24)
    sentence = verdict(tied, findings(tied)).sentence
    assert "are responsible" in sentence and "differ by less than their error, so neither comes first" in sentence


def test_regions_that_were_not_asked_are_named(result: Attribution) -> None:
    said = verdict(result, findings(result), not_asked=("attention", "matmul"))
    assert said.sentence.endswith("Not asked: attention, matmul (--regions).")


def test_strongest_part_comes_first_with_what_aligning_it_does(result: Attribution) -> None:
    first = findings(result)[0]
    assert (first.code, first.region, first.severity) == ("systematic-region", "rmsnorm", "notice")
    for part in ("responsible", "p = ", "40 sequences, K = 24", "policy-gradient weight", "mean |d| from"):
        assert part in first.text
    assert first.numbers["gain_of_aligning_sq"] == -result.effect("rmsnorm", "systematic_sq").change.value


def test_chaos_is_said_to_stay_and_what_would_remove_it(result: Attribution) -> None:
    text = told(result, "chaotic-part").text
    assert "batch-invariant kernels" in text and "FP16" in text and "FP32" in text
    assert told(result, "gap-saturated").severity == "notice"


def test_only_the_trainer_is_said_to_be_replicated(result: Attribution) -> None:
    assert told(result, "replicated-stacks").text.startswith("Only the trainer was replicated.")


def test_sum_of_the_parts_is_held_against_the_whole(result: Attribution) -> None:
    finding = told(result, "systematic-total")
    assert "the two agree" in finding.text
    assert finding.numbers["gap_sq"] == pytest.approx(
        finding.numbers["sum_of_parts_sq"] - finding.numbers["systematic_sq"]
    )


def test_nothing_found_is_no_accusation() -> None:
    result = run(World(parts=PARTS), 4)
    said = verdict(result, findings(result))
    assert (
        said.kind == "attributed"
        and "No part is found responsible with 4 replicates of 960 tokens in 24 sequences" in said.sentence
    )
    assert not [f for f in findings(result) if f.severity == "warning"]


def test_failed_control_comes_first_and_no_part_is_named() -> None:
    result = run(World(parts=PARTS, systematic={"rope": 0.02}, control_shift=0.03), 4)
    said = findings(result)
    assert said[0].code == "self-control" and said[0].severity == "error"
    assert not [f for f in said if f.code == "systematic-region"]
    assert verdict(result, said).kind == "inconclusive" and "self-control failed" in verdict(result, said).sentence


def test_one_sequence_asks_for_more_prompts() -> None:
    result = run(World(parts=PARTS, num_sequences=1, num_tokens=100), 4)
    assert "100 tokens make 1 sequence" in findings(result)[0].text
    assert "Use more prompts" in verdict(result, findings(result)).sentence


def test_few_sequences_are_said_to_be_few() -> None:
    finding = told(run(World(parts=PARTS, num_sequences=4, num_tokens=100), 4), "few-sequences")
    assert "4 sequences" in finding.text and "3 degrees of freedom" in finding.text


def test_confirmation_interactions_and_stopping_are_reported() -> None:
    world = World(parts=PARTS, systematic={"rope": 0.03})
    result = run(world, 32, confirm=True, interactions=True, precision=0.3)
    assert told(result, "confirmation").text.startswith(
        "The second kind of noise, equivalent batches, confirms the first"
    )
    assert "over 8 combinations: none of 3 pairs" in told(result, "interactions").text
    assert "so no more were made" in told(result, "replicates").text


def test_noise_that_shifts_the_mean_is_a_warning() -> None:
    finding = told(run(World(parts=PARTS, noise_shift=0.02, shared=0.0)), "noise-check")
    assert finding.severity == "warning" and "--confirm" in finding.text


def test_rows_have_the_columns_of_the_schema_and_the_numbers_of_the_result(result: Attribution) -> None:
    rows = attribution_rows(result)
    assert {k for row in rows for k in row} <= set(ATTRIBUTION.column_names)
    each = {row["region"]: row for row in rows if row["design"] == "each"}
    assert each["rope"]["decision"] == "responsible" and each["rope"]["detectable"] is True
    assert each["rope"]["systematic_sq"] == result.by_design("each")["rope"].systematic_sq.value
    assert each["rope"]["local_differing"] == 0.23 and each["rope"]["naive_rank"] in (1, 2, 3)
    effects = effect_rows(result)
    assert {k for row in effects for k in row} == set(EFFECTS.column_names)
    assert {row["region"] for row in effects} == {"rope", "swiglu", "rmsnorm", "all"}


def test_keys_of_the_rows_are_unique() -> None:
    rows = attribution_rows(run(World(parts=PARTS), 4, confirm=True, interactions=True))
    keys = [tuple(row[k] for k in ATTRIBUTION.key) for row in rows]
    assert len(set(keys)) == len(keys)


def test_summary_holds_the_checks_and_is_plain_data(result: Attribution) -> None:
    said = summary(result)
    assert said["ranked"] and said["replicated"] == ["trainer"] and said["correction"] == "Holm"
    assert said["additivity"]["holds"] and [c["variant"] for c in said["noise"]] == ["reference", "all"]
    assert np.isfinite(said["additivity"]["gap_sq_se"])
