"""How long the command line takes to start: the median of ten runs of ``rpadiag --help`` and ``--version``.

Goal: under 0.5 s. Wall time is what a user waits; processor time is what the program costs, whatever else the machine
is doing. Run: ``python tests/benchmarks/bench_startup.py``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

NUM_RUNS = 10
COMMANDS = (["--help"], ["--version"], ["compare", "--help"])


def timed(arguments: list[str]) -> tuple[float, float]:
    """(wall, processor) seconds of one start."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "rpadiag", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"rpadiag {' '.join(arguments)} left with {child.returncode}")
    return wall_s, usage.ru_utime + usage.ru_stime


def main() -> None:
    for arguments in COMMANDS:
        timed(arguments)  # bytecode is written once
        wall, processor = zip(*(timed(arguments) for _ in range(NUM_RUNS)), strict=True)
        print(
            f"rpadiag {' '.join(arguments)}: median of {NUM_RUNS}: wall {statistics.median(wall):.3f} s, "
            f"processor {statistics.median(processor):.3f} s (least {min(processor):.3f} s)"
        )


if __name__ == "__main__":
    main()
