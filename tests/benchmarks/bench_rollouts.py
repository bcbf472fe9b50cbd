"""``rpadiag rollouts`` on ten million tokens: wall clock and peak memory, Parquet and JSON Lines.

    python tests/benchmarks/bench_rollouts.py [--tokens 10000000] [--directory DIR]

Goal: under 30 s and 2 GiB on two cores. Last measured on two AVX2 cores (load 2): Parquet 8.2 s by the clock,
377 MiB; JSON Lines 8.3 s, 286 MiB; with --run, Parquet 15.2 s, 463 MiB, JSON Lines 25.6 s, 307 MiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TOKENS_PER_SEQUENCE = 500  # of them a tenth prompt
ROWS = 1000


def batches(num_sequences: int) -> list[pa.Table]:
    """One distinct batch of records in prime-rl's columns, repeated: what is measured is reading, not writing."""
    rng = np.random.default_rng(0)
    n = ROWS * TOKENS_PER_SEQUENCE
    q = -rng.exponential(0.6, n).astype(np.float32)
    p = (q + rng.normal(0, 0.03, n)).astype(np.float32)
    offsets = np.arange(0, n + 1, TOKENS_PER_SEQUENCE, dtype=np.int32)
    mask = np.tile(np.arange(TOKENS_PER_SEQUENCE) >= TOKENS_PER_SEQUENCE // 10, ROWS)
    columns = {
        "token_ids": rng.integers(0, 150_000, n, dtype=np.int64),
        "loss_mask": mask,
        "inference_logprobs": q,
        "trainer_logprobs": p,
    }
    table = pa.table({k: pa.ListArray.from_arrays(offsets, pa.array(v)) for k, v in columns.items()})
    return [table] * (num_sequences // ROWS)


def write_parquet(path: Path, tables: list[pa.Table]) -> None:
    with pq.ParquetWriter(path, tables[0].schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def write_jsonl(path: Path, tables: list[pa.Table]) -> None:
    import json

    text = "".join(json.dumps(row) + "\n" for row in tables[0].to_pylist())
    with open(path, "w", encoding="utf-8") as file:
        for _ in tables:
            file.write(text)


def measure(arguments: list[str]) -> str:
    """Seconds by the clock and of the processor, and peak memory, of one rpadiag command."""
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "rpadiag", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(said.decode())
    wall, cpu = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    return f"{wall:.1f} s ({cpu:.1f} s of processor), peak {usage.ru_maxrss / 1024:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as made:
        directory = Path(made)
        tables = batches(given.tokens // TOKENS_PER_SEQUENCE)
        for ending, write in (("parquet", write_parquet), ("jsonl", write_jsonl)):
            path = directory / f"rollouts.{ending}"
            write(path, tables)
            size = path.stat().st_size / 2**20
            print(f"{ending}, {given.tokens:,} tokens, {size:.0f} MiB:", measure(["rollouts", str(path)]), flush=True)
            run = ["--run", str(directory / f"run-{ending}")]
            print(f"{ending}, with --run:", measure(["rollouts", str(path), *run]), flush=True)


if __name__ == "__main__":
    main()
