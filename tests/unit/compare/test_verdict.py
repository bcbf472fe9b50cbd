"""The rules of the verdict, on evidence made of real ULP statistics of small arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rpadiag.bits import UlpStats, ulp_stats
from rpadiag.compare.aggregate import Aggregate
from rpadiag.compare.evidence import Control, Evidence, PositionCheck
from rpadiag.compare.pairing import check_positions
from rpadiag.compare.verdict import decide

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal(20_000).astype(np.float32)


def bf16(values: np.ndarray, *, truncate: bool = False) -> np.ndarray:
    raw = values.astype(np.float32).view(np.uint32)
    if truncate:
        return (raw >> 16).astype(np.uint16)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def same() -> UlpStats:
    return ulp_stats(bf16(VALUES), bf16(VALUES))


def rounded_elsewhere(share: float = 0.2) -> UlpStats:
    nudged = bf16(VALUES).copy()
    moved = RNG.random(len(nudged)) < share
    nudged[moved] += RNG.choice(np.array([1, -1], dtype=np.int16), moved.sum()).astype(np.uint16)
    return ulp_stats(bf16(VALUES), nudged)


def off_by(relative: float) -> UlpStats:
    return ulp_stats(VALUES, (VALUES * np.float32(1 + relative)).astype(np.float32))


def aggregate(**local: UlpStats) -> Aggregate:
    out = Aggregate()
    for point, stats in local.items():
        out.add(f"layers.0.{point}", total=stats, local=stats)
    return out


def evidence(local: Aggregate, control: Control | None = None, **changes: object) -> Evidence:
    values: dict[str, object] = {
        "dtype": "bfloat16",
        "aggregate": local,
        "control": control or Control(reason="switched off"),
        "mean_abs_d": 0.04,
        "max_abs_d": 0.2,
        "num_tokens": 100,
        "rollout": "vLLM 0.32.0",
    }
    return Evidence(**(values | changes))  # type: ignore[arg-type]


def test_equal_sites_and_logprobs_are_identical() -> None:
    verdict = decide(evidence(aggregate(q_rope=same(), act=same()), mean_abs_d=0.0, max_abs_d=0.0))
    assert verdict.kind == "identical"


def test_equal_logprobs_over_differing_sites_are_not_identical() -> None:
    verdict = decide(evidence(aggregate(q_rope=rounded_elsewhere()), mean_abs_d=0.0, max_abs_d=0.0))
    assert verdict.kind == "rounding only"


def test_rounding_only_names_the_regions_that_make_it_with_their_share() -> None:
    control = Control(aggregate=aggregate(q_rope=off_by(1e-7)), mean_abs_d=5e-6, num_tokens=50)
    verdict = decide(evidence(aggregate(q_rope=rounded_elsewhere(0.2), act=same()), control))
    assert verdict.kind == "rounding only"
    assert "RoPE (20 % of elements)" in verdict.sentence
    assert "SwiGLU" not in verdict.sentence
    assert verdict.site == "layers.0.q_rope"


def test_what_is_expected_under_rounding_only_is_no_warning() -> None:
    truncated = ulp_stats(bf16(VALUES), bf16(VALUES, truncate=True))
    control = Control(aggregate=aggregate(q_rope=off_by(1e-7)), mean_abs_d=5e-6, num_tokens=50)
    verdict = decide(evidence(aggregate(q_rope=truncated, post_norm=rounded_elsewhere()), control))
    graded = {f.code: f.severity for f in verdict.evidence}
    assert graded == {"fp32-control": "info", "one-sided-rounding": "notice", "local-divergence": "info"}


def test_residual_adds_do_not_dilute_what_norms_make_and_the_finding_says_what_is_pooled() -> None:
    verdict = decide(evidence(aggregate(resid_attn=same(), post_norm=rounded_elsewhere(0.2))))
    (made,) = [f for f in verdict.evidence if f.region == "rmsnorm"]
    assert made.numbers["local_differing"] > 0.19 and "(n = 20,000 of post_norm," in made.text


def test_mean_is_over_prompts_and_what_was_generated_and_says_so() -> None:
    verdict = decide(evidence(aggregate(q_rope=rounded_elsewhere()), num_generated=32))
    assert "n = 100 tokens: 68 of prompts, 32 generated)" in verdict.sentence


def test_truncation_is_told_from_rounding_elsewhere() -> None:
    truncated = ulp_stats(bf16(VALUES), bf16(VALUES, truncate=True))
    control = Control(aggregate=aggregate(q_rope=off_by(1e-7)), mean_abs_d=5e-6, num_tokens=50)
    verdict = decide(evidence(aggregate(q_rope=truncated, post_norm=rounded_elsewhere()), control))
    biased = [f for f in verdict.evidence if f.code == "one-sided-rounding"]
    assert [f.region for f in biased] == ["rope"]
    assert biased[0].text.startswith("vLLM 0.32.0 truncates in RoPE")
    assert "truncated, not rounded to nearest" in verdict.sentence


@pytest.mark.parametrize(("point", "hint"), [("post_norm", "epsilon"), ("q_rope", "theta"), ("attn", "mask")])
def test_a_mistake_that_only_fp32_shows_is_found_at_its_site(point: str, hint: str) -> None:
    control = Control(aggregate=aggregate(**{"act": off_by(1e-7), point: off_by(1e-4)}), mean_abs_d=4e-4, num_tokens=50)
    verdict = decide(evidence(aggregate(**{point: rounded_elsewhere()}), control))
    assert verdict.kind == "different computation"
    assert verdict.site == f"layers.0.{point}"
    assert hint in verdict.sentence


def test_an_fp32_gap_that_no_operation_explains_is_said() -> None:
    control = Control(aggregate=aggregate(act=off_by(1e-7)), mean_abs_d=0.02, num_tokens=50)
    verdict = decide(evidence(aggregate(act=same()), control))
    assert verdict.kind == "different computation"
    assert "no single operation explains it" in verdict.sentence


def test_without_a_control_rounding_only_says_what_it_cannot_exclude() -> None:
    verdict = decide(evidence(aggregate(q_rope=rounded_elsewhere())))
    assert verdict.kind == "rounding only"
    assert "without an FP32 control (switched off) a small mistake could hide" in verdict.sentence


def test_a_mistake_of_the_16_bit_path_alone_is_found_beside_a_clean_control() -> None:
    control = Control(aggregate=aggregate(q_rope=off_by(1e-7)), mean_abs_d=5e-6, num_tokens=50)
    broken = ulp_stats(bf16(VALUES), bf16(VALUES * np.float32(1.1)))
    verdict = decide(evidence(aggregate(q_rope=broken), control))
    assert (verdict.kind, verdict.site) == ("different computation", "layers.0.q_rope")
    assert "In FP32 it agrees, so the mistake is in its bfloat16 path" in verdict.sentence


def test_a_nan_on_one_side_is_never_rounding() -> None:
    overflowed = VALUES.copy()
    overflowed[:7] = np.nan
    stats = ulp_stats(bf16(VALUES), np.where(np.isnan(overflowed), np.uint16(0x7FC0), bf16(VALUES)))
    verdict = decide(evidence(aggregate(act=stats), mean_abs_d=float("nan"), max_abs_d=float("nan"), num_nonfinite=3))
    assert (verdict.kind, verdict.site) == ("different computation", "layers.0.act")
    assert "7 of 20,000 elements are NaN or infinite on one side only" in verdict.sentence


def test_logprobs_that_are_not_finite_give_no_verdict_by_themselves() -> None:
    verdict = decide(evidence(aggregate(act=same()), mean_abs_d=float("nan"), max_abs_d=float("nan"), num_nonfinite=3))
    assert verdict.kind == "inconclusive"


def test_differing_weights_come_before_every_number() -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(5)]
    verdict = decide(evidence(Aggregate(), weights_differing=names))
    assert verdict.kind == "not comparable"
    assert "model.layers.0.mlp.up_proj.weight" in verdict.sentence and "and 2 more" in verdict.sentence


def test_shifted_positions_excuse_rope_but_nothing_else() -> None:
    shifted = PositionCheck(kind="shifted", offset=3)
    harmless = Control(aggregate=aggregate(q_rope=off_by(1.0), attn=off_by(1e-7)), mean_abs_d=5e-6, num_tokens=50)
    verdict = decide(evidence(aggregate(q_rope=rounded_elsewhere()), harmless, positions=shifted))
    assert verdict.kind == "rounding only"
    assert any(f.code == "positions-shifted" and f.numbers["offset"] == 3 for f in verdict.evidence)
    harmful = Control(aggregate=aggregate(q_rope=off_by(1.0), attn=off_by(1e-3)), mean_abs_d=5e-3, num_tokens=50)
    assert decide(evidence(aggregate(attn=same()), harmful, positions=shifted)).site == "layers.0.attn"


def test_positions_that_differ_in_another_way_are_not_comparable() -> None:
    found = check_positions([(0, np.arange(6), np.array([0, 1, 2, 0, 1, 2]))])
    assert (found.kind, found.prompt, found.index) == ("different", 0, 3)
    assert decide(evidence(aggregate(q_rope=same()), positions=found)).kind == "not comparable"


def test_positions_equal_shifted_and_unobserved_are_told_apart() -> None:
    assert check_positions([(0, np.arange(4), np.arange(4))]).kind == "equal"
    assert check_positions([(0, np.arange(4) + 3, np.arange(4))]).offset == 3
    assert check_positions([(0, None, np.arange(4))]).kind == "unobserved"


def test_a_pooled_site_keeps_the_counts_of_every_sequence() -> None:
    pooled = Aggregate()
    for _ in range(3):
        pooled.add("layers.0.act", total=same(), local=same())
    assert pooled.local_by_region()["swiglu"].n == 3 * len(VALUES)
    assert pooled.first_divergent() is None
