"""Causes that manifests name: each is recognised, none is invented, and no difference with one is called rounding."""

from __future__ import annotations

from typing import Any

import pytest

from rpadiag.bits import UlpStats
from rpadiag.compare.aggregate import Aggregate
from rpadiag.compare.causes import batch_invariance, is_quantised, known_causes, narrow_cache
from rpadiag.compare.evidence import Control, Evidence
from rpadiag.compare.verdict import decide

PLAIN = {"dtype": "bfloat16", "cache_dtype": "auto", "quantization": None}
CONFIG = {"rms_eps": 1e-5, "rope": {"theta": 10000.0, "type": "default"}}
OFF = UlpStats(
    n=1000, num_differing=900, max_ulp=300, hist=(100,) + (0,) * 7 + (900,) + (0,) * 8, sum_sq_diff=0.01, sum_sq_a=1.0
)
SAME = UlpStats(n=1000, hist=(1000,) + (0,) * 16, sum_sq_a=1.0)


def evidence(**changes: Any) -> Evidence:
    aggregate = Aggregate()
    aggregate.add("embed", total=SAME)
    aggregate.add("layers.0.attn", total=OFF, local=OFF)
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "aggregate": aggregate,
        "control": Control(reason="none"),
        "mean_abs_d": 0.2,
        "max_abs_d": 1.0,
        "num_tokens": 100,
        "rollout": "vLLM 0.32.0",
    }
    return Evidence(**{**values, **changes})


@pytest.mark.parametrize(
    ("cache", "model", "expected"),
    [
        ("auto", "bfloat16", None),
        (None, "bfloat16", None),
        ("bfloat16", "bfloat16", None),
        ("float16", "bfloat16", None),
        ("bfloat16", "float32", "bfloat16"),
        ("fp8", "bfloat16", "fp8"),
        ("fp8_e5m2", "float16", "fp8_e5m2"),
        ("int8_per_token_head", "bfloat16", "int8_per_token_head"),
        ("nvfp4", "bfloat16", "nvfp4"),
    ],
)
def test_a_cache_with_fewer_bits_than_the_model_is_recognised(
    cache: str | None, model: str, expected: str | None
) -> None:
    assert narrow_cache({"cache_dtype": cache, "dtype": model}) == expected


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, None),
        ({"quantization": None, "config": {}}, None),
        ({"quantization": "None"}, None),
        ({"quantization": "fp8"}, "fp8"),
        ({"config": {"quantization": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_quantised_weights_are_recognised_from_the_engine_or_the_checkpoint(
    meta: dict[str, Any], expected: str | None
) -> None:
    assert is_quantised(meta) == expected


def test_stacks_that_run_the_same_have_no_known_cause() -> None:
    assert known_causes({**PLAIN, "config": CONFIG}, {**PLAIN, "config": dict(CONFIG)}) == ()
    assert known_causes({}, {}) == ()


def test_an_entry_that_only_one_side_has_is_no_difference() -> None:
    assert known_causes({"config": {**CONFIG, "hidden_act": "silu"}}, {"config": CONFIG}) == ()


def test_a_differing_configuration_is_named_with_both_values_and_nothing_else() -> None:
    other = {**CONFIG, "rope": {"theta": 500000.0, "type": "default"}}
    (finding,) = known_causes({"config": CONFIG}, {"config": other})
    assert (finding.code, finding.region) == ("config-differs", "rope")
    assert "RoPE is theta 10000 in the trainer and theta 500000 in the rollout" in finding.text
    assert "default" not in finding.text


def test_an_fp8_cache_is_its_own_cause_and_not_rounding() -> None:
    causes = known_causes(PLAIN, {**PLAIN, "cache_dtype": "fp8"})
    verdict = decide(evidence(causes=causes))
    assert verdict.kind == "different computation"
    assert "a KV cache in fp8" in verdict.sentence and "quantisation, not rounding" in verdict.sentence
    assert verdict.evidence[0].code == "quantised-kv-cache"
    assert "layers" not in verdict.sentence  # attention is what the cache reaches: nothing else is off


def test_what_a_named_cause_does_not_reach_is_said_beside_it() -> None:
    aggregate = evidence().aggregate
    aggregate.add("layers.0.post_norm", total=OFF, local=OFF)
    causes = known_causes(PLAIN, {**PLAIN, "cache_dtype": "fp8"})
    verdict = decide(evidence(causes=causes, aggregate=aggregate))
    assert verdict.site == "layers.0.post_norm"
    assert "layers.0.post_norm is off by more than rounding" in verdict.sentence


def test_quantised_weights_come_before_the_fp32_control_which_they_would_fail_too() -> None:
    causes = known_causes(PLAIN, {**PLAIN, "quantization": "fp8"})
    control = Control(aggregate=evidence().aggregate, mean_abs_d=0.1, num_tokens=100)
    verdict = decide(evidence(causes=causes, control=control))
    assert "weights quantised with fp8" in verdict.sentence
    assert verdict.kind == "different computation"


def test_weights_that_differ_because_they_are_quantised_say_so() -> None:
    causes = known_causes(PLAIN, {**PLAIN, "quantization": "awq"})
    verdict = decide(evidence(causes=causes, weights_differing=["a", "b"]))
    assert verdict.kind == "not comparable" and "quantised weights (awq)" in verdict.sentence


def test_equal_results_stay_identical_whatever_a_manifest_says() -> None:
    aggregate = Aggregate()
    aggregate.add("embed", total=SAME)
    verdict = decide(
        evidence(
            aggregate=aggregate,
            mean_abs_d=0.0,
            max_abs_d=0.0,
            causes=known_causes(PLAIN, {**PLAIN, "cache_dtype": "fp8"}),
        )
    )
    assert verdict.kind == "identical"
    assert [f.code for f in verdict.evidence] == ["quantised-kv-cache"]


def test_without_control_and_local_divergence_the_verdict_is_inconclusive() -> None:
    aggregate = Aggregate()
    aggregate.add("layers.0.attn", total=OFF)
    verdict = decide(evidence(aggregate=aggregate, no_local="no model", control=Control(reason="not given")))
    assert verdict.kind == "inconclusive"
    assert "not given" in verdict.sentence and "no model" in verdict.sentence and "layers.0.attn" in verdict.sentence


def test_an_fp32_control_alone_can_acquit_but_says_what_it_did_not_see() -> None:
    aggregate = Aggregate()
    aggregate.add("layers.0.attn", total=OFF)
    control = Control(aggregate=Aggregate(), mean_abs_d=1e-5, num_tokens=50)
    verdict = decide(evidence(aggregate=aggregate, no_local="no model", control=control))
    assert verdict.kind == "rounding only"
    assert "to 1e-05 nats in FP32" in verdict.sentence and "could hide" in verdict.sentence


def test_an_fp32_control_alone_names_the_first_site_that_is_off() -> None:
    fp32 = Aggregate()
    fp32.add("embed", total=SAME)
    fp32.add("layers.0.input_norm", total=OFF)
    control = Control(aggregate=fp32, mean_abs_d=1e-2, num_tokens=50)
    verdict = decide(evidence(aggregate=fp32, no_local="no model", control=control))
    assert verdict.kind == "different computation" and verdict.site == "layers.0.input_norm"
    assert "the first site that is off there is layers.0.input_norm" in verdict.sentence


def test_a_differing_configuration_decides_where_no_measurement_does() -> None:
    aggregate = Aggregate()
    aggregate.add("layers.0.attn", total=OFF)
    causes = known_causes({"config": CONFIG}, {"config": {**CONFIG, "rms_eps": 1e-6}})
    verdict = decide(evidence(aggregate=aggregate, no_local="no model", causes=causes))
    assert verdict.kind == "different computation"
    assert "epsilon of RMSNorm is 1e-05 in the trainer and 1e-06 in the rollout" in verdict.sentence


@pytest.mark.parametrize(
    ("floor", "severity", "says"),
    [
        (0.0, "info", "floors are 0"),
        (0.0129, "warning", "floors are not 0 (rollout_batched 0.0129 nats"),
        (None, "info", "not measured"),
    ],
)
def test_batch_invariant_mode_is_believed_only_where_the_floors_agree(
    floor: float | None, severity: str, says: str
) -> None:
    floors = [{"name": "trainer_padded", "stack": "trainer", "mean_abs_d": 0.5}]
    if floor is not None:
        floors.append({"name": "rollout_batched", "stack": "rollout", "mean_abs_d": floor})
    (finding,) = batch_invariance({"env": {"VLLM_BATCH_INVARIANT": "1"}}, floors)
    assert finding.severity == severity and says in finding.text
    assert batch_invariance({"env": {"VLLM_BATCH_INVARIANT": "0"}}, floors) == ()
