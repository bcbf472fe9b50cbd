"""The callback in the real GRPOTrainer of the installed TRL: three ways of generating, the last of them vLLM colocated on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpadiag.cli.app import run as rpadiag
from rpadiag.errors import RpadiagError, UsageError
from rpadiag.runs import open_run
from rpadiag.workflows.rollouts import RolloutsOptions, run_rollouts

SCRIPT = Path(__file__).with_name("train_with_trl.py")
TRL_METRICS = {"mean": "sampling/sampling_logp_difference/mean", "max": "sampling/sampling_logp_difference/max"}


@pytest.fixture(scope="module")
def trained(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """``trained(mode)``: the result of one training; ``out`` is its directory, ``stderr`` what it said. All run in one process."""
    root = tmp_path_factory.mktemp("trl")
    modes = ["transformers", "rollout_func", *(["vllm"] if find_spec("vllm") else [])]
    command = [sys.executable, str(SCRIPT), str(tiny("qwen3")), str(root), *modes]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def result(mode: str) -> dict[str, Any]:
        out = root / mode
        said = (out / "stderr").read_text(errors="replace") if out.exists() else ""
        assert (out / "result.json").exists(), said[-3000:] + done.stderr[-3000:]
        return {**json.loads((out / "result.json").read_text()), "out": out, "stderr": said}

    return result


def logged(result: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in result["log"] if name in entry]


def test_training_with_transformers_is_aligned_and_says_that_there_is_nothing_to_measure(
    trained: Callable[[str], dict[str, Any]],
) -> None:
    result = trained("transformers")
    assert result["steps"] == 3 and [list(a["regions"]) for a in result["aligned"]] == [["rope", "swiglu"]]
    assert all(math.isfinite(g) and g > 0 for g in logged(result, "grad_norm"))
    assert result["still_aligned"] == []
    assert result["stderr"].count("rpadiag has nothing to measure: TRL keeps no old_per_token_logps") == 1
    assert not (result["out"] / "runs").exists()


def test_log_probabilities_of_a_rollout_func_are_measured_under_the_names_of_trl(
    trained: Callable[[str], dict[str, Any]],
) -> None:
    result = trained("rollout_func")
    (mean,) = logged(result, TRL_METRICS["mean"])
    measured = run_rollouts(RolloutsOptions(files=(), schema="trl"), records=result["rows"])
    assert mean == pytest.approx(measured.metrics["mean_abs_d"], rel=1e-6) and 0 < mean < 0.1
    assert logged(result, "rpadiag/k3_kl") == [pytest.approx(measured.metrics["k3_kl"], rel=1e-6)]


def test_failed_gate_stops_the_training_where_that_was_asked_for(trained: Callable[[str], dict[str, Any]]) -> None:
    result = trained("rollout_func")
    assert result["steps"] == 1 and [g[0] for g in result["gates"]] == ["fail"]
    assert "training is stopped: k3_kl is" in result["stderr"]


@pytest.mark.vllm
def test_vllm_in_grpo_is_measured_as_trl_measures_it(trained: Callable[[str], dict[str, Any]]) -> None:
    result = trained("vllm")
    assert result["steps"] == 3 and logged(result, "rpadiag/num_faults") == [0.0] * 3
    assert sorted(p.name for p in (result["out"] / "runs").iterdir()) == ["step-000001", "step-000003"]
    for step in (1, 3):
        metrics = open_run(result["out"] / "runs" / f"step-{step:06d}").metrics["logprob"]["all"]
        assert metrics["mean_abs_d"] == pytest.approx(logged(result, TRL_METRICS["mean"])[step - 1], rel=1e-5)
        assert metrics["max_abs_d"] == pytest.approx(logged(result, TRL_METRICS["max"])[step - 1], rel=1e-5)
        assert metrics["k3_kl"] == pytest.approx(logged(result, "rpadiag/k3_kl")[step - 1], rel=1e-12)
        assert 0 < metrics["mean_abs_d"] < 0.1


@pytest.mark.vllm
def test_run_of_a_step_holds_the_tokens_of_the_batch_and_both_stacks(trained: Callable[[str], dict[str, Any]]) -> None:
    result = trained("vllm")
    run = open_run(result["out"] / "runs" / "step-000003")
    kept = [
        [value for value, real in zip(row[column], row["completion_mask"], strict=True) if real]
        for column in ("old_per_token_logps", "sampling_per_token_logps", "completion_ids")
        for row in result["rows"]
    ]
    num = len(result["rows"])
    for i, column in enumerate(("p", "q", "token")):
        expected = np.concatenate([np.asarray(x) for x in kept[i * num : (i + 1) * num]])
        assert np.array_equal(run.tokens()[column].to_numpy(np.float32), expected.astype(np.float32))
    trainer, rollout = run.manifest["trainer"], run.manifest["rollout"]
    assert trainer["engine"].startswith("TRL ") and trainer["step"] == 3
    assert trainer["aligned"]["regions"] == ["rope", "swiglu", "rmsnorm", "qk_norm"]
    assert rollout["mode"] == "colocate" and rollout["sampling"]["temperature"] == 1.0


@pytest.mark.vllm
def test_runs_of_a_training_are_gated_and_reported_with_their_trend(
    trained: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    result = trained("vllm")
    assert [g[0] for g in result["gates"]] == ["pass", "pass"]
    runs = sorted(str(p) for p in (result["out"] / "runs").iterdir())
    page = tmp_path / "trend.html"
    assert rpadiag(["report", *runs, "--html", str(page), "--gate", "k3_kl<=1e-2"]) == 0
    assert "aligned: rope, swiglu, rmsnorm, qk_norm" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every": 0}, "at least 1, not 0"),
        ({"every": "10"}, "at least 1, not '10'"),
        ({"gates": ["k3_kl<=1"]}, "none are written"),
        ({"runs": "runs", "stop": True}, "there is no gate"),
        ({"runs": "runs", "gates": "k3_kl<=baseline"}, "a training has none"),
        ({"runs": "runs", "gates": ["k3_kll<=1"]}, "unknown metric: k3_kll"),
        ({"align": "rope,ropes"}, "unknown region: ropes"),
        ({"align": "rope", "contract": "vllm-eagre"}, "unknown contract preset: vllm-eagre"),
    ],
)
def test_argument_that_means_nothing_is_refused_before_anything_is_aligned(
    tiny: Callable[[str], Path], arguments: dict[str, Any], told: str
) -> None:
    from rpadiag.trainers.trl import MismatchCallback

    trainer = trainer_of(tiny("qwen3"))
    with pytest.raises(UsageError) as caught:
        MismatchCallback(trainer, **arguments)
    assert told in caught.value.message and caught.value.hint
    assert all("forward" not in vars(m) for m in trainer.model.modules())


def test_reference_model_that_cannot_be_aligned_leaves_the_policy_as_it_was(tiny: Callable[[str], Path]) -> None:
    from torch import nn

    from rpadiag.trainers.trl import MismatchCallback

    trainer = trainer_of(tiny("qwen3"))
    trainer.ref_model = nn.Linear(2, 2)
    with pytest.raises(RpadiagError, match="Linear"):
        MismatchCallback(trainer, align="all")
    assert all("forward" not in vars(m) for m in trainer.model.modules())


def trainer_of(checkpoint: Path) -> Any:
    """What the callback asks of a trainer before training begins."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="bfloat16")
    accelerator = SimpleNamespace(unwrap_model=lambda m: m)
    return SimpleNamespace(_buffered_inputs=None, _metrics={}, model=model, ref_model=None, accelerator=accelerator)


def test_trainer_without_a_generated_batch_is_refused() -> None:
    from rpadiag.trainers.trl import MismatchCallback

    with pytest.raises(UsageError, match="keeps no generated batch"):
        MismatchCallback(object())
