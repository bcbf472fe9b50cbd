"""Add and RMSNorm over hidden sizes: this package beside the fastest peers, 64 Mi elements a tensor, forward.

    PYTHONPATH=kernels python kernels/benchmarks/norm_widths.py [--out widths.json] [--hidden 1024,4096]

Each round times all in another order and at other addresses; ``x`` is the median over the rounds of a peer's time over
this package's in the same round: above 1 the peer is slower.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from peers import PEERS
from speed import environment, randn
from timing import copy_bandwidth, time_calls

HIDDEN = (576, 896, 1024, 1536, 2048, 2560, 3584, 4096, 5120, 7168, 8192)
ELEMENTS = 1 << 26
ROUNDS = 8
TIMED = ("rpadiag fp32-output", "rpadiag hf-eager", "liger", "vllm cuda", "quack")


def loaded() -> dict[str, Any]:
    """The implementations that are installed, by name."""
    found = {}
    for peer in PEERS["rmsnorm"]:
        try:
            if peer.name in TIMED:
                found[peer.name] = peer.load()
        except (ImportError, AttributeError, OSError) as error:
            print(f"{peer.name} absent: {error}", flush=True)
    return found


def measure_width(functions: dict[str, Any], hidden: int, copy: float, rng: random.Random) -> dict[str, Any]:
    """Median microseconds, share of the copy bandwidth and ratio to the first implementation, by name."""
    tokens = ELEMENTS // hidden
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        torch.cuda.empty_cache()
        spacers = []
        for name in rng.sample(list(functions), len(functions)):
            inputs = []
            for shape in ((tokens, hidden), (tokens, hidden), (hidden,)):
                inputs.append(randn(*shape))
                spacers.append(torch.empty(rng.randrange(1, 40) << 20, device="cuda", dtype=torch.uint8))
            with torch.no_grad():
                times[name].append(time_calls(lambda f=functions[name], i=inputs: f(*i)).median_us)
    first = next(iter(times.values()))
    row: dict[str, Any] = {"hidden": hidden, "tokens": tokens}
    for name, found in times.items():
        median = statistics.median(found)
        row[name] = {
            "median_us": median, "share": 8 * tokens * hidden / (median * 1e-6) / copy,
            "ratio": statistics.median(b / a for a, b in zip(first, found, strict=True)), "rounds_us": found,
        }  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--hidden", default=",".join(map(str, HIDDEN)))
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, functions, rng, rows = copy_bandwidth(), loaded(), random.Random(0), []
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    for hidden in map(int, options.hidden.split(",")):
        rows.append(measure_width(functions, hidden, copy, rng))
        parts = [
            f"{name} {row['median_us']:.1f} us {100 * row['share']:.1f} % x{row['ratio']:.3f}"
            for name, row in rows[-1].items()
            if isinstance(row, dict)
        ]
        print(f"{hidden:6d} " + " | ".join(parts), flush=True)
        if options.out:
            result = {"environment": environment(), "copy_bytes_per_s": copy, "rows": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
