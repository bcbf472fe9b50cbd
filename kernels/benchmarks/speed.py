"""Speed of the kernels beside other implementations, as a share of the copy bandwidth measured in the same run.

    PYTHONPATH=kernels python kernels/benchmarks/speed.py [--out results.json] [--only rmsnorm,swiglu,rope,ulp]

bf16, 16,384 tokens; hidden 4096; intermediate 12288; 32 query and 8 key heads of 128. Peers that are not installed are
listed as absent with the reason. Bytes are the fewest that the operation can move: every input read once, every output
written once. An implementation that moves more shows a smaller share. All are timed in turn, ROUNDS times over, in another order and
at other addresses in each round: where tensors lie moves a time by 1 %, which is more than the best of them differ by. A number is the
median of the rounds; ``ratio`` is the median of a round's time over that of the first row in the same round. The rounds are written out.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from peers import PEERS
from timing import copy_bandwidth, time_calls

TOKENS, HIDDEN, INTERMEDIATE, Q_HEADS, K_HEADS, HEAD_SIZE = 16384, 4096, 12288, 32, 8, 128
EPS = 1e-6
ROUNDS = 9


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def inputs_of(region: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int, int]:
    """(inputs, gradients of the outputs, bytes of the forward, bytes of the backward)."""
    if region == "rmsnorm":
        x, r, w = randn(TOKENS, HIDDEN, grad=True), randn(TOKENS, HIDDEN, grad=True), randn(HIDDEN, grad=True)
        size = x.numel() * 2
        return (x, r, w), (randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN)), 4 * size, 4 * size
    if region == "swiglu":
        gate, up = randn(TOKENS, INTERMEDIATE, grad=True), randn(TOKENS, INTERMEDIATE, grad=True)
        size = gate.numel() * 2
        return (gate, up), (randn(TOKENS, INTERMEDIATE),), 3 * size, 5 * size
    heads = [randn(1, TOKENS, h, HEAD_SIZE).transpose(1, 2).requires_grad_() for h in (Q_HEADS, K_HEADS)]
    angle = torch.arange(TOKENS, device="cuda")[:, None] * 10000.0 ** (-torch.arange(64, device="cuda") / 64)
    tables = [torch.cat((t, t), dim=-1)[None].bfloat16() for t in (angle.cos(), angle.sin())]
    grads = tuple(randn(1, TOKENS, h, HEAD_SIZE).transpose(1, 2) for h in (Q_HEADS, K_HEADS))
    size = 2 * 2 * sum(t.numel() for t in heads) + 2 * TOKENS * HEAD_SIZE
    return (*heads, *tables), grads, size, size


def forward_and_backward(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Callable[[], Any]:
    wanted = [t for t in inputs if t.requires_grad]

    def call() -> Any:
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad(outputs, wanted, grads)

    return call


def measure(function: Callable[..., Any], data: Any, has_backward: bool) -> dict[str, float]:
    """Microseconds of the forward, and of forward and backward."""
    inputs, grads, _, _ = data
    with torch.no_grad():
        found = {"forward": time_calls(lambda: function(*inputs)).median_us}
    if has_backward:
        found["forward_backward"] = time_calls(forward_and_backward(function, inputs, grads)).median_us
    return found


def scattered_inputs(region: str, rng: random.Random) -> tuple[Any, list[Tensor]]:
    """Inputs of a region at addresses of their own, and what keeps the addresses apart."""
    torch.cuda.empty_cache()
    spacers = [torch.empty(rng.randrange(1, 64) << 20, device="cuda", dtype=torch.uint8) for _ in range(3)]
    del spacers[1]  # a hole for the allocator to fill or not
    return inputs_of(region), spacers


def measure_region(region: str, copy: float) -> list[dict[str, Any]]:
    """A row for each implementation of a region."""
    rows: list[dict[str, Any]] = []
    ready = []
    for peer in PEERS[region]:
        row: dict[str, Any] = {"region": region, "name": peer.name}
        rows.append(row)
        try:
            function, data = peer.load(), inputs_of(region)
            measure(function, data, peer.has_backward)
            ready.append((row, function, peer.has_backward))
        except Exception as error:  # noqa: BLE001  one peer that fails must not hide the others
            row["absent"] = f"{type(error).__name__}: {error}"[:300]
    found: list[list[dict[str, float]]] = [[] for _ in ready]
    rng = random.Random(0)
    for _ in range(ROUNDS):
        for index in rng.sample(range(len(ready)), len(ready)):
            _, function, both = ready[index]
            data, spacers = scattered_inputs(region, rng)
            found[index].append(measure(function, data, both))
            del spacers
    forward_bytes, backward_bytes = inputs_of(region)[2:]
    for (row, _, _), rounds in zip(ready, found, strict=True):
        for kind, num_bytes in (("forward", forward_bytes), ("forward_backward", forward_bytes + backward_bytes)):
            if kind in rounds[0]:
                times = [one[kind] for one in rounds]
                ratios = [time / ours[kind] for ours, time in zip(found[0], times, strict=True)]
                median = statistics.median(times)
                row[kind] = {
                    "median_us": median, "rounds_us": times, "share": num_bytes / (median * 1e-6) / copy,
                    "ratio": statistics.median(ratios),
                }  # fmt: skip
    return rows


def print_row(row: dict[str, Any]) -> None:
    if "absent" in row:
        print(f"{row['region']:8s} {row['name']:28s} absent: {row['absent']}", flush=True)
        return
    both = row.get("forward_backward")
    forward = row["forward"]
    text = f"{forward['median_us']:8.1f} us {100 * forward['share']:6.1f} %"
    if "ratio" in forward:
        text += f" x{forward['ratio']:.3f}"
    if both:
        text += f" | {both['median_us']:8.1f} us {100 * both['share']:6.1f} %"
    print(f"{row['region']:8s} {row['name']:28s} {text}", flush=True)


def environment() -> dict[str, str]:
    import triton

    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": str(torch.version.cuda), "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="rmsnorm,swiglu,rope,ulp")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"copy {copy / 1e12:.2f} TB/s; columns: forward | forward + backward", flush=True)
    rows = []
    for region in options.only.split(","):
        if region == "ulp":
            from ulp_speed import measure_ulp

            found = measure_ulp(copy)
        else:
            found = measure_region(region, copy)
        for row in found:
            print_row(row)
        rows += found
    if options.out:
        result = {"environment": environment(), "copy_bytes_per_s": copy, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
