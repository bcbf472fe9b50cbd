"""``rpadiag capture --engine vllm``: killed and gone on with, and compared with a trainer's bundle as with both engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import children

from rpadiag.cli.app import run
from rpadiag.engines.bundle import open_bundle
from rpadiag.runs import open_run
from rpadiag.sites import split_site
from rpadiag.workflows.compare import run_compare
from rpadiag.workflows.options import CompareOptions

NUM_PROMPTS = 40
TEXT = "Rounding once at the end is not the same as rounding after every step"


@pytest.mark.vllm
def test_a_capture_of_vllm_killed_and_resumed_compares_as_a_direct_comparison(
    tiny: Callable[[str], Path], vllm_on: Callable[..., Any], tmp_path: Path
) -> None:
    model, prompts, rollout = str(tiny("llama")), tmp_path / "p.txt", tmp_path / "rollout"
    prompts.write_text("".join(f"{TEXT} {i}\n" for i in range(NUM_PROMPTS)), encoding="utf-8")
    command = ["capture", model, str(prompts), "--engine", "vllm", "--bundle", str(rollout)]
    process = subprocess.Popen([sys.executable, "-m", "rpadiag", *command], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while not (rollout / "sequence-00002.safetensors").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.001)
    (engine,) = children(process.pid)
    process.kill()
    process.wait()
    while Path(f"/proc/{engine}").exists():  # it sees within half a second that its parent is gone
        assert time.monotonic() < end
        time.sleep(0.05)
    kept = {p.name: p.read_bytes() for p in rollout.glob("*.safetensors")}
    assert json.loads((rollout / "bundle.json").read_text())["status"] == "writing"
    assert 3 <= len(kept) < NUM_PROMPTS, "it was faster than the kill; give it more prompts"

    assert run([*command, "--resume"]) == 0
    assert not children(os.getpid())
    assert all((rollout / name).read_bytes() == content for name, content in kept.items())
    bundle = open_bundle(rollout)
    assert len(bundle.sequences) == NUM_PROMPTS
    assert bundle.meta["cache_dtype"] == "auto" and bundle.meta["quantization"] is None

    assert run(["capture", model, str(rollout), "--engine", "trainer", "--bundle", str(tmp_path / "trainer")]) == 0
    pair = ["--trainer", str(tmp_path / "trainer"), "--rollout", str(rollout)]
    assert run(["compare", *pair, "--run", str(tmp_path / "apart")]) == 2  # no model, no control: inconclusive
    # the engine that other tests use: what it scores does not depend on who started it
    direct = CompareOptions(model=model, prompts=prompts, run=tmp_path / "direct", control="none")
    run_compare(direct, running=vllm_on(tiny("llama"), max_model_len=64))
    ours, theirs = open_run(tmp_path / "apart"), open_run(tmp_path / "direct")
    totals = [c for c in ours.table("sites").column_names if not c.startswith("local_") and c != "inherited_differing"]
    rows = ours.table("sites", totals).to_pylist()
    assert rows == theirs.table("sites", totals).to_pylist()
    assert {split_site(r["site"])[1] for r in rows} >= {"embed", "q_rope", "attn", "logits", "logprob"}
    assert ours.table("tokens").to_pylist() == theirs.table("tokens").to_pylist()
    assert ours.table("prompts").to_pylist() == theirs.table("prompts").to_pylist()
    assert ours.metrics["logprob"] == theirs.metrics["logprob"]
    assert ours.weights == theirs.weights
    assert ours.manifest["rollout"]["config"] == theirs.manifest["rollout"]["config"]
