"""Time of a GPU function: several calls in one CUDA graph, replayed; median and spread over replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CALLS_PER_GRAPH = 10
NUM_REPLAYS = 15


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one call: median over replays, and the fastest and slowest replay."""

    median_us: float
    min_us: float
    max_us: float

    def share(self, num_bytes: int, copy_bytes_per_s: float) -> float:
        """Bytes moved per second over the copy bandwidth."""
        return num_bytes / (self.median_us * 1e-6) / copy_bytes_per_s


def time_calls(function: Callable[[], Any]) -> Timing:
    """``function`` allocates its outputs itself; inputs must be static tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            function()
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return Timing(median_us=statistics.median(times), min_us=min(times), max_us=max(times))


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by PyTorch's device-to-device copy of 1 GiB, outside a graph, where a
    copy would be left to the copy engines."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS_PER_GRAPH):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / CALLS_PER_GRAPH)
    return 2 * source.numel() * 4 / statistics.median(times)
