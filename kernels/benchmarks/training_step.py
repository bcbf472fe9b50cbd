"""One training step of a Qwen3-0.6B-shaped model: transformers eager against the same model aligned to fp32-output.

    PYTHONPATH=.:kernels python kernels/benchmarks/training_step.py [--out training_step.json] [--rounds 20]

Random weights, bf16, batch 4 x 2048 tokens, SDPA attention, forward + backward + AdamW, in rounds: two steps as
transformers has it, two steps aligned, and the other way round in the next. The first of two steps is not counted. Times are
medians over the rounds, and the median of the ratios of a round; launch is the time until Python has nothing left to launch (the
step waits for it where it is as long as the step). Memory is the peak that PyTorch allocated in the counted steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from speed import environment

BATCH, TOKENS = 4, 2048
EAGER, ALIGNED = "transformers eager", "aligned fp32-output"


def make_model() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def aligned(model: Any) -> AbstractContextManager[Any]:
    from rpadiag import align

    return align(model, regions=("rope", "swiglu", "rmsnorm"), contract="fp32-output")


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> dict[str, float]:
    """One step; times in milliseconds, memory in GiB."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return {
        "step_ms": 1000 * (end - start), "launch_ms": 1000 * (launched - start),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": loss.item(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(0, 151936, (BATCH, TOKENS), device="cuda")
    found: dict[str, list[dict[str, float]]] = {EAGER: [], ALIGNED: []}
    for count in range(options.rounds + 1):
        for name in (EAGER, ALIGNED) if count % 2 else (ALIGNED, EAGER):
            with aligned(model) if name == ALIGNED else nullcontext():
                step(model, optimizer, tokens)
                counted = step(model, optimizer, tokens)
            if count:  # the first round compiles
                found[name].append(counted)
    rows = []
    for name, steps in found.items():
        times = [s["step_ms"] for s in steps]
        rows.append(
            {
                "name": name, "step_ms": statistics.median(times), "min_step_ms": min(times), "max_step_ms": max(times),
                "launch_ms": statistics.median(s["launch_ms"] for s in steps), "steps_ms": [round(t, 1) for t in times],
                "peak_gib": max(s["peak_gib"] for s in steps), "first_loss": steps[0]["loss"],
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    ratios = [b["step_ms"] / a["step_ms"] for a, b in zip(found[EAGER], found[ALIGNED], strict=True)]
    ratio = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    print("aligned / eager", ratio, flush=True)
    if options.out:
        result = {"environment": environment(), "rounds": options.rounds, "rows": rows, "aligned_over_eager": ratio}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
