"""One training step of a Qwen3-0.6B-shaped model: transformers eager against the same model aligned to fp32-output.

    PYTHONPATH=.:kernels python kernels/benchmarks/training_step.py [--out training_step.json]

Random weights, bf16, batch 4 x 2048 tokens, SDPA attention, forward + backward + AdamW. Time is the median of ten steps
between device synchronisations; memory is the peak that PyTorch allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from speed import environment

BATCH, TOKENS, NUM_STEPS = 4, 2048, 10


def make_model() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def measure(aligned: bool) -> dict[str, Any]:
    from rpadiag import align

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(0, 151936, (BATCH, TOKENS), device="cuda")
    times, losses = [], []
    with align(model, regions=("rope", "swiglu", "rmsnorm"), contract="fp32-output") if aligned else nullcontext():
        for step in range(NUM_STEPS + 3):
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            losses.append(loss.item())
    return {
        "name": "aligned fp32-output" if aligned else "transformers eager",
        "step_ms": 1000 * statistics.median(times[3:]), "min_step_ms": 1000 * min(times[3:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "first_loss": losses[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for aligned in (False, True):
        rows.append(measure(aligned))
        torch.cuda.empty_cache()
        row = rows[-1]
        print(
            f"{row['name']:22s} {row['step_ms']:8.1f} ms  peak {row['peak_gib']:6.2f} GiB  loss {row['first_loss']:.4f}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
