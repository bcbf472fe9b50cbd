"""Site maps: complete, true to the modules they name, and explicit about what they do not hold for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny import FAMILIES as TINY_FAMILIES

from rpadiag.engines.base import EXPERT_POINTS
from rpadiag.engines.families import FAMILIES, architectures, family_for
from rpadiag.engines.families.sitemap import TAKES
from rpadiag.errors import InputError
from rpadiag.sites import POINTS, REDUCED, split_site


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
        lacking = set(family.absent) | (set() if family.experts else set(EXPERT_POINTS))
        assert set(points) | lacking == set(POINTS) - set(
            REDUCED
        )  # an all-reduce is found through the point that it gives
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
    assert (widths["gate"], widths["up"], widths["down"]) == (96, 96, 64)
    assert widths["geglu" if "geglu" in widths else "act"] == 96


def test_every_site_a_site_reads_exists(family):
    facts = family.facts(config())
    for site in facts.sites:
        assert set(facts.reads(site)) <= set(facts.sites)


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
        "qwen3_moe": (None, None, None),
        "gemma2": (None, 32, None),
        "gemma3": (None, 32, None),
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


MOE = FAMILIES["qwen3_moe"]


def experts(**changes):
    return MOE.facts(config(num_experts=8, num_experts_per_tok=2, **changes))


def points_of(facts, layer):
    return [p for n, p in map(split_site, facts.sites) if n == layer]


def test_sites_of_a_layer_with_experts_are_its_own_and_those_of_a_dense_layer_too():
    facts = experts(mlp_only_layers=[1])
    assert facts.expert_layers == (0, 2)
    assert points_of(facts, 0)[-4:] == ["post_norm", "router", "expert_out", "resid_mlp"]
    assert points_of(facts, 1)[-6:] == ["post_norm", "gate", "up", "act", "down", "resid_mlp"]
    assert "layers 0, 2" in facts.absent_reasons["gate"]
    assert "layer 1" in facts.absent_reasons["router"]


def test_every_second_layer_has_experts_where_the_sparse_step_says_so():
    assert experts(decoder_sparse_step=2).expert_layers == (1,)


def test_a_model_of_experts_alone_has_no_dense_point_and_says_why():
    facts = experts()
    assert facts.expert_layers == (0, 1, 2)
    assert "every layer has experts" in facts.absent["down"]
    assert "router" not in facts.absent_reasons


def test_a_moe_configuration_without_experts_is_dense():
    facts = MOE.facts(config())
    assert facts.expert_layers == ()
    assert "no layer of this model has experts" in facts.absent["expert_out"]


def test_residual_reads_what_was_added_to_it_in_each_kind_of_layer():
    facts = experts(mlp_only_layers=[1])
    assert facts.reads("layers.0.resid_mlp") == ("layers.0.resid_attn", "layers.0.expert_out")
    assert facts.reads("layers.1.resid_mlp") == ("layers.1.resid_attn", "layers.1.down")
    gemma = FAMILIES["gemma2"].facts(config())
    assert gemma.reads("layers.1.resid_attn") == ("layers.0.resid_mlp", "layers.1.attn_norm")
    assert gemma.reads("layers.1.resid_mlp") == ("layers.1.resid_attn", "layers.1.mlp_norm")
    assert gemma.reads("layers.1.down") == ("layers.1.geglu",)
