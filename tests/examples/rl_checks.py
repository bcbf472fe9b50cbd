"""Trainings of examples/rl with the real vLLM, in one process of its own: ``rl_checks.py EXAMPLE CACHE OUT``. Writes OUT/result.json.

Makes the micro checkpoint, trains the control (FP32 in both stacks) with one sync left out, and the BF16 baseline: once without interruption, and
once two of its four rounds, where a sweep in OUT/sweep looks for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import train  # examples/rl; sets the environment before vLLM is imported
from models import ensure

MODEL = "qwen3-micro"
LAST_SYNCED = 1  # rounds after this one are sampled from weights that were not synced


def control(cache: Path, out: Path) -> list[dict[str, Any]]:
    """Rounds of the FP32 control; weights are not synced after round LAST_SYNCED."""
    overrides = ("learning_rate=1e-3", "parts_every=1", "rounds=3")
    spec = train.Spec(model=MODEL, arm="fp32-both", seed=0, preset="micro", overrides=overrides)
    out.mkdir()
    trainer, _ = train.make_trainer(spec, out, cache=cache)
    sync = trainer.vllm_generation.sync_weights
    trainer.vllm_generation.sync_weights = lambda: sync() if trainer.round <= LAST_SYNCED else None
    trainer.train()
    rows: list[dict[str, Any]] = trainer.rows
    return rows


def first_batch(arm: str, cache: Path, out: Path) -> dict[str, Any]:
    """Tokens and importance ratios of an arm's first round, and its loss's."""
    spec = train.Spec(model=MODEL, arm=arm, seed=0, preset="micro", overrides=("rounds=1",))
    out.mkdir()
    trainer, _ = train.make_trainer(spec, out, cache=cache)
    trainer.train()
    parts = trainer._buffered_inputs
    ratios = [part["importance_sampling_ratio"][part["completion_mask"].bool()] for part in parts]
    return {
        "tokens": [row for part in parts for row in part["completion_ids"].tolist()],
        "prompts": [row for part in parts for row in part["prompt_ids"].tolist()],
        "ratios": [value for r in ratios for value in r.tolist()],
        "reward": trainer.rows[0]["reward"],
    }


def main(cache: Path, out: Path) -> None:
    out.mkdir()
    made = json.loads((ensure(MODEL, cache) / "made.json").read_text(encoding="utf-8"))
    result = {"made": made, "control": control(cache, out / "control")}
    spec = train.Spec(model=MODEL, arm="bf16", seed=0, preset="micro")
    result["straight"] = train.run(spec, out / "straight", cache=cache)
    result["tis"], result["bf16"] = (first_batch(arm, cache, out / arm) for arm in ("tis", "bf16"))
    result["half"] = train.run(spec, out / "sweep" / f"{MODEL}-bf16-s0", cache=cache, stop_after=2)
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]))
