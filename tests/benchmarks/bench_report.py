"""``rpadiag report`` of a large run: wall clock, processor time and peak memory.

    python tests/benchmarks/bench_report.py [--tokens 1000000] [--sites 500000] [--prompts 10000]

Goal: HTML in under 20 s and 1 GiB on two cores. Last measured on two AVX2 cores, one of them busy: 7.2 s by the clock, 7.1 s of
processor, 606 MiB, a page of 4.9 MiB; two gates alone 1.7 s, 1.6 s of processor, 297 MiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rpadiag.compare.metrics import logprob_metrics
from rpadiag.findings import Finding, Verdict
from rpadiag.runs import create_run
from rpadiag.sites import POINTS, all_sites, split_site

WORDS = [" the", " model", ",", " and", " a", "\n", " of", " tokens", ".", " is", " it", " 12"]


def write_run(path: Path, *, num_tokens: int, num_sites: int, num_prompts: int) -> None:
    rng = np.random.default_rng(0)
    per_prompt = num_tokens // num_prompts
    sites = all_sites(8, qk_norm=False)[: max(1, num_sites // num_prompts)]
    with create_run(path, command="compare", options={"model": "bench", "prompts": "p.txt", "run": path.name}) as run:
        p, q = [], []
        for first in range(0, num_prompts, 500):
            size = min(500, num_prompts - first)
            prompts = np.repeat(np.arange(first, first + size), per_prompt).astype(np.int32)
            n = len(prompts)
            run.add_prompts(
                {"prompt": first + i, "num_prompt_tokens": per_prompt // 2, "text": f"Prompt {first + i}: what is the answer?", "token_ids": rng.integers(0, 1000, per_prompt).astype(np.int32)}
                for i in range(size)
            )  # fmt: skip
            position = np.tile(np.arange(1, per_prompt + 1), size).astype(np.int32)
            q_, d = -rng.exponential(1.5, n), rng.standard_t(4, n) * 0.02
            columns: dict[str, Any] = {
                "prompt": prompts, "position": position, "token": rng.integers(0, 1000, n).astype(np.int32),
                "text": [WORDS[i] for i in rng.integers(0, len(WORDS), n)],
                "source": np.where(position > per_prompt // 2, "decode", "prefill"),
                "p": (q_ + d).astype(np.float32), "q": q_.astype(np.float32), "p_entropy": np.ones(n, np.float32), "q_entropy": np.ones(n, np.float32),
                "p_rank": np.ones(n, np.int32), "q_rank": np.ones(n, np.int32), "p_argmax": np.ones(n, np.int32), "q_argmax": np.ones(n, np.int32),
            }  # fmt: skip
            run.add_tokens(columns)
            run.add_sites(site_columns(first, size, sites, rng))
            p.append(columns["p"])
            q.append(columns["q"])
        metrics = logprob_metrics(
            np.concatenate(p), np.concatenate(q), sequence_ids=np.repeat(np.arange(num_prompts), per_prompt)
        )
        floor = {"name": "trainer_padded", "stack": "trainer", "text": "alone against in a padded batch", "mean_abs_d": 0.02, "max_abs_d": 0.5, "k3_kl": 1e-3, "exact_share": 0.1, "num_tokens": 1000}  # fmt: skip
        run.set_metrics({"logprob": {"all": metrics, "prefill": metrics, "decode": metrics}, "floors": [floor]})
        run.set_manifest(trainer={"stack": "trainer", "dtype": "bfloat16"}, rollout_label="bench")
        run.add_finding(Finding(code="bench", severity="info", text="A run of random numbers."))
        run.set_verdict(Verdict(kind="rounding only", sentence="Rounding only: random numbers."))


def site_columns(first: int, size: int, sites: list[str], rng: np.random.Generator) -> dict[str, Any]:
    n = size * len(sites)
    split = [split_site(s) for s in sites]
    differing = rng.integers(0, 5000, n)
    hist = [[90_000, 10_000] + [0] * 15] * n
    ulp: dict[str, Any] = {
        "n": np.full(n, 100_000), "num_differing": differing, "differing": differing / 100_000, "max_ulp": np.full(n, 3), "mean_signed_ulp": np.zeros(n),
        "mean_magnitude_ulp": np.zeros(n), "sign_balance": np.zeros(n), "magnitude_balance": np.zeros(n), "ulp_hist": hist, "rel_l2": rng.random(n) * 1e-3,
        "cosine": np.ones(n), "num_nonfinite_trainer": np.zeros(n, int), "num_nonfinite_rollout": np.zeros(n, int), "num_nonfinite_mismatch": np.zeros(n, int),
    }  # fmt: skip
    return {
        "prompt": np.repeat(np.arange(first, first + size), len(sites)).astype(np.int32), "precision": ["model"] * n, "source": ["prefill"] * n,
        "layer": [layer for layer, _ in split] * size, "site": sites * size, "point": [point for _, point in split] * size,
        "region": [POINTS[point].region for _, point in split] * size, "pair": ["trainer|rollout"] * n,
        **ulp, **{f"local_{k}": v for k, v in ulp.items()}, "inherited_differing": np.zeros(n),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sites", type=int, default=500_000)
    parser.add_argument("--prompts", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / "run"
        write_run(run, num_tokens=given.tokens, num_sites=given.sites, num_prompts=given.prompts)
        page = Path(made) / "report.html"
        for options in (["--html", str(page)], ["--gate", "k3_kl<=1", "--gate", "local_differing.rope<=1"]):
            start = time.monotonic()
            child = subprocess.Popen(
                [sys.executable, "-m", "rpadiag", "report", str(run), *options], stdout=subprocess.DEVNULL
            )
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            wall, cpu = time.monotonic() - start, usage.ru_utime + usage.ru_stime
            told = f"{options[0]}: {wall:.1f} s ({cpu:.1f} s of processor), peak {usage.ru_maxrss / 1024:.0f} MiB"
            print(told, "" if child.returncode == 0 else f"failed with {child.returncode}", flush=True)
        print(f"page: {page.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
