"""Records tensor parallelism on two GPUs: a trainer on one device against vLLM on one and on two ranks. Needs two GPUs.

    python tests/gpu/record_tp.py --out kernels/results/vllm-tp.json

A random checkpoint in the shape of Qwen3-0.6B, since SmolLM2's heads do not divide by two. Per number of ranks: the
verdict of ``rpadiag compare`` with its FP32 control, the local and end-to-end share per point, and where ranks disagree
on what they reduced; then the two engines against each other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpadiag.runs import open_run
from rpadiag.workflows.compare import run_compare
from rpadiag.workflows.options import CompareOptions

TOKENS, PROMPTS = 128, 4


def make_checkpoint(directory: Path, num_layers: int) -> Path:
    """Qwen3-0.6B's shape with ``num_layers`` layers, bf16, random weights wide enough to tell tokens apart."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=num_layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.04,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def compared(model: Path, prompts: Path, run: Path, ranks: int) -> tuple[dict[str, Any], np.ndarray]:
    """What one comparison says, and vLLM's logprobs."""
    began = time.monotonic()
    result = run_compare(CompareOptions(model=str(model), prompts=prompts, run=run, device="cuda", tp=ranks))
    finished = open_run(run)
    sites = finished.table("sites").to_pandas()
    sites = sites[sites["precision"] == "model"].groupby("point")
    found = {
        "verdict": result.verdict.kind,
        "sentence": result.verdict.sentence,
        "mean_abs_d": result.metrics.get("mean_abs_d"),
        "k3_kl": result.metrics.get("k3_kl"),
        "findings": [f["text"] for f in finished.findings][:6],
        "local_differing": sites["local_differing"].mean().round(6).dropna().to_dict(),
        "differing": sites["differing"].mean().round(6).to_dict(),
        "wall_s": round(time.monotonic() - began, 1),
    }
    return found, finished.table("tokens").to_pandas()["q"].to_numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=28)
    args = parser.parse_args()
    content: dict[str, Any] = {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers", "vllm")},
        "command": "python tests/gpu/record_tp.py --out kernels/results/vllm-tp.json",
        "shape": f"Qwen3-0.6B, {args.layers} layers, {PROMPTS} x {TOKENS} tokens, bf16",
    }
    with tempfile.TemporaryDirectory() as tmp:
        home = Path(tmp)
        model = make_checkpoint(home / "model", args.layers)
        rng = np.random.default_rng(0)
        lines = [json.dumps({"token_ids": rng.integers(0, 151936, TOKENS).tolist()}) for _ in range(PROMPTS)]
        prompts = home / "prompts.jsonl"
        prompts.write_text("\n".join(lines) + "\n")
        q = {}
        for ranks in (2, 1):
            try:
                content[f"tp_{ranks}"], q[ranks] = compared(model, prompts, home / f"run-{ranks}", ranks)
            except Exception as error:
                content[f"tp_{ranks}"] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(json.dumps(content[f"tp_{ranks}"])[:1500], flush=True)
            args.out.write_text(json.dumps(content, indent=1) + "\n")
        if len(q) == 2:
            d = q[1].astype(np.float64) - q[2].astype(np.float64)
            content["tp_1_against_tp_2"] = {"mean_abs_d": float(np.abs(d).mean()), "max_abs_d": float(np.abs(d).max())}
            print(content["tp_1_against_tp_2"])
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
