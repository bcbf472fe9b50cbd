"""The site vocabulary: addresses, what each operation reads, and patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpadiag.errors import UsageError
from rpadiag.sites import (
    ALIGNABLE_REGIONS,
    LAYER_POINTS,
    POINTS,
    REGIONS,
    all_sites,
    check_patterns,
    check_regions,
    inputs_of,
    layer_site,
    match_sites,
    region_of,
    split_site,
)

LLAMA = all_sites(2, qk_norm=False)
QWEN3 = all_sites(2, qk_norm=True)


def test_every_point_belongs_to_a_known_region() -> None:
    assert {p.region for p in POINTS.values()} <= set(REGIONS)
    assert set(ALIGNABLE_REGIONS) < set(REGIONS)


def test_sites_come_in_execution_order_and_once() -> None:
    assert LLAMA[:3] == ["embed", "layers.0.input_norm", "layers.0.q"]
    assert LLAMA[-4:] == ["layers.1.resid_mlp", "final_norm", "logits", "logprob"]
    assert len(set(LLAMA)) == len(LLAMA) == 2 * 15 + 4
    assert len(QWEN3) == 2 * 17 + 4


def test_every_operation_reads_only_what_comes_before_it() -> None:
    for sites in (LLAMA, QWEN3):
        for index, site in enumerate(sites):
            assert set(inputs_of(site, sites, num_layers=2)) <= set(sites[:index]), site


@pytest.mark.parametrize(
    ("site", "reads"),
    [
        ("embed", ()),
        ("layers.0.input_norm", ("embed",)),
        ("layers.1.input_norm", ("layers.0.resid_mlp",)),
        ("layers.1.resid_attn", ("layers.0.resid_mlp", "layers.1.o")),
        ("layers.1.act", ("layers.1.gate", "layers.1.up")),
        ("layers.0.attn", ("layers.0.q_rope", "layers.0.k_rope", "layers.0.v")),
        ("final_norm", ("layers.1.resid_mlp",)),
        ("logits", ("final_norm",)),
    ],
)
def test_operation_reads_the_sites_of_its_formula(site: str, reads: tuple[str, ...]) -> None:
    assert inputs_of(site, LLAMA, num_layers=2) == reads


def test_rope_reads_the_normalised_query_where_the_family_has_one() -> None:
    assert inputs_of("layers.1.q_rope", QWEN3, num_layers=2) == ("layers.1.q_norm",)
    assert inputs_of("layers.1.q_rope", LLAMA, num_layers=2) == ("layers.1.q",)


@given(st.integers(0, 10_000), st.sampled_from([p.name for p in LAYER_POINTS]))
def test_address_splits_into_what_it_was_made_of(layer: int, point: str) -> None:
    assert split_site(layer_site(layer, point)) == (layer, point)


@pytest.mark.parametrize("site", ["", "q_rope", "layers.0", "layers.x.q", "layers.-1.q", "layers.0.nope", "a.0.q"])
def test_unknown_address_is_an_error_that_lists_the_known_ones(site: str) -> None:
    with pytest.raises(UsageError, match=r"layers\.N\.q_rope"):
        split_site(site)


def test_region_of_an_address_is_that_of_its_point() -> None:
    assert region_of("layers.7.act") == "swiglu"
    assert region_of("final_norm") == "rmsnorm"


def test_no_pattern_selects_every_site() -> None:
    assert match_sites([], LLAMA) == LLAMA


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["q_rope"], ["layers.0.q_rope", "layers.1.q_rope"]),
        (["layers.1.q"], ["layers.1.q"]),
        (["layers.0.?_rope"], ["layers.0.q_rope", "layers.0.k_rope"]),
        (["logits", "embed"], ["embed", "logits"]),
        (["layers.1.*_norm", "final_norm"], ["layers.1.input_norm", "layers.1.post_norm", "final_norm"]),
    ],
)
def test_patterns_select_by_address_or_point_in_execution_order(patterns: list[str], chosen: list[str]) -> None:
    assert match_sites(patterns, LLAMA) == chosen


@pytest.mark.parametrize("pattern", ["q_ropes", "layers.2.q", "layers.[01].q", ""])
def test_pattern_that_matches_nothing_is_an_error_even_beside_one_that_does(pattern: str) -> None:
    with pytest.raises(UsageError, match="matches nothing"):
        match_sites(["q", pattern], LLAMA)


@pytest.mark.parametrize(
    "pattern", ["q_rope", "layers.99.q", "layers.1?.*", "*_norm", "*", "embed", "logprob", "expert_out", "down_reduce"]
)
def test_pattern_that_some_model_may_answer_passes_before_a_model_is_known(pattern: str) -> None:
    check_patterns([pattern])


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("q_ropee", "did you mean q_rope?"),
        ("layers.0.q_ropes", "did you mean layers.0.q_rope?"),
        ("model.layers.*.mlp.act", "did you mean layers.*.act?"),
        ("input_layernorm", "did you mean input_norm?"),
        ("layers.0.logits", "did you mean logits?"),
        ("zzzz", "patterns are globs over addresses such as layers.0.q_rope"),
        ("", "patterns are globs"),
    ],
)
def test_pattern_that_no_model_answers_is_refused_before_one_is_known(pattern: str, hint: str) -> None:
    with pytest.raises(UsageError, match="matches nothing") as refused:
        check_patterns(["embed", pattern])
    assert "known sites: input_norm, q, k, " in str(refused.value) and f"hint: {hint}" in str(refused.value)


def test_regions_keep_their_order_and_lose_repeats() -> None:
    assert check_regions(["swiglu", "rope", "swiglu"]) == ("swiglu", "rope")


def test_unknown_region_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="known regions: rope, swiglu, rmsnorm"):
        check_regions(["attention"])
