"""Sampling on the real vLLM engine: decode noise apart from the difference of the stacks, sampling semantics apart from numerics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpadiag.engines.vllm import VllmEngine
from rpadiag.engines.vllm_child import child_environment
from rpadiag.errors import UsageError
from rpadiag.runs import open_run
from rpadiag.workflows.compare import Comparison, run_compare
from rpadiag.workflows.options import CompareOptions

pytestmark = pytest.mark.vllm
PROMPTS = ("The quick brown fox jumps over the lazy dog.", "Rounding once at the end.", "import numpy as np")
NUM_TOKENS = 9


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], vllm_on: Callable[..., Any]) -> Iterator[VllmEngine]:
    shared = vllm_on(tiny("llama"), max_model_len=128)
    yield shared
    shared.reload(logprobs_mode="raw_logprobs")  # as it was: other modules use it too


@pytest.fixture
def compared(tiny: Callable[[str], Path], engine: VllmEngine, tmp_path: Path) -> Callable[..., Comparison]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))

    def compare(arguments: dict[str, Any], **changes: Any) -> Comparison:
        plain = {"logprobs_mode": "raw_logprobs", "hf_overrides": None}
        engine.reload(dtype="bfloat16", **{**plain, **arguments})
        options = CompareOptions(
            model=str(tiny("llama")), prompts=prompts, run=tmp_path / "run", device="cpu", control="none", **changes
        )
        return run_compare(options, running=engine)

    return compare


def test_sampled_decoded_and_rescored_logprobs_of_the_same_tokens_are_told_apart(
    compared: Callable[..., Comparison],
) -> None:
    result = compared({}, generate=NUM_TOKENS, temperature=0.8, top_p=0.95)
    run = open_run(result.run)
    tokens = run.tokens()
    decode = tokens[tokens.source == "decode"]
    assert len(decode) == NUM_TOKENS * len(PROMPTS)
    assert tokens.q_rescored.notna().all()
    metrics = run.metrics["logprob"]
    assert metrics["decode"]["num_tokens"] == metrics["rescored"]["num_tokens"] == len(decode)
    for name, column in (("decode", "q"), ("rescored", "q_rescored")):
        gap = np.abs(decode.p.to_numpy(np.float64) - decode[column].to_numpy(np.float64)).mean()
        assert metrics[name]["mean_abs_d"] == pytest.approx(gap, rel=1e-6)
    floors = {f["name"]: f for f in result.floors}
    assert {"rollout_batched", "rollout_decode_batched", "rollout_rescored"} <= set(floors)
    assert floors["rollout_rescored"]["num_tokens"] == floors["rollout_decode_batched"]["num_tokens"] == len(decode)
    itself = np.abs(decode.q.to_numpy(np.float64) - decode.q_rescored.to_numpy(np.float64)).mean()
    assert floors["rollout_rescored"]["mean_abs_d"] == pytest.approx(itself, rel=1e-6, abs=1e-9)
    sites = run.sites()
    assert set(sites[sites.source == "decode"].site) == set(sites[sites.source == "prefill"].site)
    numbers = next(f for f in run.findings if f["code"] == "decode")["numbers"]
    assert numbers["mean_abs_d_sampled"] == metrics["decode"]["mean_abs_d"]
    assert run.manifest["rollout"]["sampling"]["temperature"] == 0.8
    assert result.verdict.kind == "rounding only"  # raw logprobs: temperature and top-p only chose the tokens


def test_logprobs_after_temperature_are_named_as_sampling_semantics_and_not_as_numerics(
    compared: Callable[..., Comparison],
) -> None:
    result = compared({"logprobs_mode": "processed_logprobs"}, generate=NUM_TOKENS, temperature=0.5)
    assert result.verdict.kind == "different computation"
    assert result.verdict.site == "logprob"
    assert "after temperature 0.5" in result.verdict.sentence and "raw_logprobs" in result.verdict.sentence
    metrics = open_run(result.run).metrics["logprob"]
    assert metrics["decode"]["mean_abs_d"] > 10 * metrics["prefill"]["mean_abs_d"]


def test_processed_logprobs_of_the_models_own_distribution_are_raw_ones(compared: Callable[..., Comparison]) -> None:
    assert compared({"logprobs_mode": "processed_logprobs"}, generate=NUM_TOKENS).verdict.kind == "rounding only"


def test_a_head_in_float32_is_recognised_and_its_logits_are_not_compared(compared: Callable[..., Comparison]) -> None:
    result = compared({"hf_overrides": {"head_dtype": "float32"}})
    run = open_run(result.run)
    assert run.manifest["rollout"]["head_dtype"] == "float32"
    finding = next(f for f in run.findings if f["code"] == "head-dtype")
    assert finding["numbers"] == {"trainer": "bfloat16", "rollout": "float32"}
    assert "logits" not in set(run.sites().site)
    assert "float32" in run.manifest["sites"]["absent"]["logits"]


def test_batch_invariant_mode_is_refused_on_a_cpu_where_it_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UsageError, match="batch-invariant mode is for GPUs"):
        child_environment("cpu", True, False, 1, tmp_path)
    assert child_environment("cuda", True, False, 1, tmp_path)["TORCHDYNAMO_DISABLE"] == "1"
