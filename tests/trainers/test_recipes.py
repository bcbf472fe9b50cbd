"""The recipes of examples/: inside the installed verl, and what prime-rl does to a model that was aligned on the meta device.

verl is not in requirements.lock: 0.9.1 asks for a transformers below 5.11 and brings Ray. Where it is installed (``pip install --no-deps verl ray
tensordict ...``; docs/trainers.md has the line) these tests run it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import rpadiag
from rpadiag.runs import open_run

ROOT = Path(__file__).parents[2]
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed; docs/trainers.md says how")


def checked(which: str, model: Path, out: Path, **environment: str) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT / "examples" / "verl"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("verl_checks.py")), which, str(model), str(out)]
    env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((out / "result.json").read_text()))


@needs_verl
def test_verl_logs_rpadiags_metrics_beside_its_own_and_they_agree(tmp_path: Path) -> None:
    runs = {"RPADIAG_RUNS": str(tmp_path / "runs"), "RPADIAG_EVERY": "2"}
    found = checked("metrics", tmp_path, tmp_path, VERL_USE_EXTERNAL_MODULES="rpadiag_verl_metrics", **runs)
    whole = found["whole"]
    assert whole["rpadiag/num_faults"] == 0 and whole["rpadiag/k3_kl"] > 0
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["batch-000000"]
    run = open_run(tmp_path / "runs" / "batch-000000")
    ours = run.metrics["logprob"]["all"]
    for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_actor_probs_pearson_corr"):
        assert ours[name] == pytest.approx(whole[f"training/{name}"], rel=1e-4)
    assert run.manifest["rollouts"]["schema"] == "verl"
    assert found["responses_alone"] == pytest.approx(whole, rel=1e-9)


@needs_verl
def test_model_that_verl_builds_is_aligned_to_the_bit(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    found = checked("align", tiny("qwen3"), tmp_path, RPADIAG_ALIGN="rope,swiglu")
    assert found["aligned"] == ["Qwen3Attention", "Qwen3MLP"]
    assert found["frequencies"] == "torch.float32"  # verl itself leaves them in BF16
    assert found["equal"] and found["unlike_the_unaligned"] and found["dtype"] == "torch.bfloat16"


def test_alignment_on_the_meta_device_holds_when_weights_come_later(tiny: Callable[[str], Path]) -> None:
    """As prime-rl makes its model: on meta, aligned, layers wrapped for checkpointing, then storage and weights."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from transformers import AutoConfig, AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(tiny("qwen3"), dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(tiny("qwen3"), dtype=torch.bfloat16)
    with torch.device("meta"):
        late = AutoModelForCausalLM.from_config(config)
    rpadiag.align(late, contract="fp32-output")
    for name, layer in list(late.model.layers.named_children()):
        late.model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    late.to_empty(device="cpu")
    weights = dict(own.named_parameters())
    with torch.no_grad():
        for name, parameter in late.named_parameters():
            parameter.copy_(weights[name.replace("_checkpoint_wrapped_module.", "")])
        late.model.rotary_emb.inv_freq.copy_(own.model.rotary_emb.inv_freq)
    rpadiag.align(own, contract="fp32-output")
    ids = torch.arange(3, 35)[None]
    expected, found = own.train()(input_ids=ids, labels=ids), late.train()(input_ids=ids, labels=ids)
    assert torch.equal(expected.logits, found.logits)
    expected.loss.backward()
    found.loss.backward()
    for name, parameter in late.named_parameters():
        assert torch.equal(parameter.grad, weights[name.replace("_checkpoint_wrapped_module.", "")].grad), name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda p: p.name)
def test_recipe_parses_and_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
