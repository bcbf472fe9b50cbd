"""examples/rl with the real GRPOTrainer and vLLM on a CPU: it learns its text, syncs its weights, and goes on to the bit where it stopped."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rpadiag.cli.app import run as rpadiag

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl"
MODEL, RUN = "qwen3-micro", "qwen3-micro-bf16-s0"
SWEEP = (
    "--models", MODEL, "--arms", "bf16", "--seeds", "0", "--preset", "micro", "--processes", "1", "--seconds", "400",
)  # fmt: skip

pytestmark = pytest.mark.vllm


def command(script: Path, *arguments: str | Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rl")


@pytest.fixture(scope="module")
def checked(root: Path) -> dict[str, Any]:
    command(Path(__file__).with_name("rl_checks.py"), EXAMPLE, root / "models", root / "checks")
    return json.loads((root / "checks" / "result.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def swept(root: Path, checked: dict[str, Any]) -> Path:
    """A sweep that found its run stopped after two of four rounds, by another process."""
    out = root / "checks" / "sweep"
    where = ("--cache", str(root / "models"), "--out", str(out))
    assert checked["half"]["status"] == "paused"
    assert f"{RUN}  paused  2 of 4 rounds" in command(EXAMPLE / "sweep.py", *SWEEP, *where, "--list")
    command(EXAMPLE / "sweep.py", *SWEEP, *where)
    return out


def test_pretraining_lowers_the_loss_and_stops_where_reinforcement_learning_has_room(checked: dict[str, Any]) -> None:
    made = checked["made"]
    losses = [loss for _, loss in made["losses"]]
    assert losses[-1] < 0.5 * losses[0]
    assert 0.05 < made["accuracy"] < 0.8


def test_sync_is_proven_by_log_probabilities_that_agree_in_fp32_and_a_missing_one_is_noticed(
    checked: dict[str, Any],
) -> None:
    synced, stale = checked["control"][:2], checked["control"][2]
    assert all(row["mean_abs_d"] < 1e-5 and row["weights_equal"] for row in synced)  # FP32's own rounding was 3e-7
    assert stale["mean_abs_d"] > 1e-3 and not stale["weights_equal"]
    assert all(abs(row["systematic_sq"]) < 1e-9 for row in synced) and stale["systematic_sq"] > 1e-4
    assert synced[1]["updates"] == 2  # the second round is sampled after updates, so agreement there is the sync's


def test_arms_of_a_seed_sample_the_same_and_only_one_weighs_by_importance(checked: dict[str, Any]) -> None:
    tis, bf16 = checked["tis"], checked["bf16"]
    assert [tis[n] for n in ("tokens", "prompts", "reward")] == [bf16[n] for n in ("tokens", "prompts", "reward")]
    assert set(bf16["ratios"]) == {1.0}
    assert len(set(tis["ratios"])) > 10 and max(tis["ratios"]) <= 2.0
    assert len({tuple(row) for row in bf16["tokens"]}) > 2  # completions of one prompt do not share a seed


def test_directory_of_another_run_is_refused(swept: Path) -> None:
    script = [sys.executable, str(EXAMPLE / "train.py"), "--model", MODEL, "--arm", "bf16", "--preset", "micro"]
    done = subprocess.run([*script, "--seed", "1", "--out", str(swept / RUN)], capture_output=True, text=True)
    assert done.returncode == 1 and "holds another run" in done.stderr and "'seed': (0, 1)" in done.stderr


def test_interrupted_run_ends_with_the_bits_of_one_that_was_not(checked: dict[str, Any], swept: Path) -> None:
    ended = json.loads((swept / "sweep.json").read_text(encoding="utf-8"))[RUN]
    assert ended == checked["straight"] and ended["status"] == "complete"
    resumed = pd.read_parquet(swept / "steps.parquet")
    straight = pd.read_parquet(swept.parent / "straight" / "steps.parquet")
    measured = [c for c in straight if not c.startswith("seconds_")]
    assert len(straight) == 4
    pd.testing.assert_frame_equal(resumed[measured], straight[measured], check_exact=True)


def test_every_round_is_measured_and_finite(swept: Path) -> None:
    rows = pd.read_parquet(swept / "steps.parquet")
    assert rows["round"].tolist() == [0, 1, 2, 3] and rows["updates"].tolist() == [0, 2, 4, 6]
    for name in (
        "reward",
        "loss",
        "k3_kl",
        "chi2_token",
        "chi2_seq",
        "ess",
        "ratio_min",
        "ratio_max",
        "grad_norm",
        "entropy",
        "completion_length",
    ):
        assert all(map(math.isfinite, rows[name])), name
    assert (rows["k3_kl"] > 0).all() and (rows["entropy"] > 0).all() and rows["reward"].between(0, 1).all()
    assert rows["systematic_sq"].notna().tolist() == [True, False, True, False]  # parts_every = 2
    assert rows["weights_equal"].dropna().all()


def test_runs_of_a_training_are_reported_with_their_trend(swept: Path, tmp_path: Path) -> None:
    runs = sorted(str(p) for p in (swept / RUN / "runs").iterdir())
    assert len(runs) == 2
    assert rpadiag(["report", *runs, "--html", str(tmp_path / "trend.html"), "--gate", "k3_kl<=1"]) == 0


def test_complete_sweep_starts_nothing_and_keeps_its_table(swept: Path, root: Path) -> None:
    before = (swept / "steps.parquet").read_bytes()
    said = command(EXAMPLE / "sweep.py", *SWEEP, "--cache", root / "models", "--out", swept)
    assert said == "4 rounds of 1 runs: 1 complete\n" and (swept / "steps.parquet").read_bytes() == before
