"""Site maps: complete, true to the modules they name, and explicit about what they do not hold for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny import FAMILIES as TINY_FAMILIES

from rpadiag.engines.families import FAMILIES, architectures, family_for
from rpadiag.engines.families.sitemap import TAKES
from rpadiag.errors import InputError
from rpadiag.sites import POINTS, inputs_of


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    return FAMILIES[request.param]


def config(**changes):
    values = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 32,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
    return SimpleNamespace(**{**values, **changes})


def test_every_family_has_a_tiny_checkpoint_to_be_tested_on():
    assert set(TINY_FAMILIES) == set(FAMILIES)


def test_each_point_of_the_vocabulary_is_mapped_on_both_stacks_or_absent_with_a_reason(family):
    for points in (family.trainer, family.rollout):
        assert set(points) | set(family.absent) == set(POINTS)
        assert not set(points) & set(family.absent)
        assert all(source.take in TAKES for source in points.values())
    assert all(len(reason) > 20 for reason in family.absent.values())


def test_fused_slices_name_every_part_once(family):
    for point, source in family.rollout.items():
        if source.take == "slice":
            assert source.parts[source.index] == point
            assert len(set(source.parts)) == len(source.parts)


def test_widths_of_fused_parts_add_up_to_the_fused_parameter(family):
    widths = family.widths(family.facts(config()))
    assert (widths["q"], widths["k"], widths["v"]) == (64, 32, 32)
    assert (widths["gate"], widths["up"], widths["act"], widths["down"]) == (96, 96, 96, 64)


def test_every_site_a_site_reads_exists(family):
    facts = family.facts(config())
    for site in facts.sites:
        assert set(inputs_of(site, facts.sites, num_layers=facts.num_layers)) <= set(facts.sites)


def test_residual_after_the_last_layer_is_read_at_the_final_norm(family):
    for stack in ("trainer", "rollout"):
        path, _ = family.source("layers.2.resid_mlp", stack=stack, num_layers=3)
        assert path == "model.norm"
        path, _ = family.source("layers.0.resid_mlp", stack=stack, num_layers=3)
        assert path == "model.layers.1.input_layernorm"


def test_sliding_windows_follow_what_the_stacks_read():
    windows = {name: family.facts(config()).sliding_windows for name, family in FAMILIES.items()}
    assert windows == {
        "llama": (None, None, None),
        "qwen2": (None, 32, None),
        "qwen3": (None, 32, None),
        "mistral": (32, 32, 32),
    }


def test_unsupported_architecture_is_an_error_that_lists_the_supported_ones():
    with pytest.raises(InputError) as caught:
        family_for(["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in caught.value.message
    assert all(name in caught.value.detail for name in architectures())
    with pytest.raises(InputError, match="none named"):
        family_for(None)


def test_configurations_the_map_does_not_hold_for_are_refused(family):
    with pytest.raises(InputError, match="quantization_config"):
        family.facts(config(quantization_config={"bits": 4}))
    with pytest.raises(InputError, match="gelu"):
        family.facts(config(hidden_act="gelu"))


def test_a_point_that_the_family_lacks_is_an_error_with_its_reason():
    with pytest.raises(InputError) as caught:
        FAMILIES["llama"].source("layers.0.q_norm", stack="trainer", num_layers=2)
    assert "no per-head norm" in caught.value.detail
