"""Records several processes on several GPUs: the trainer cut by FSDP2 and by tensor parallelism, and prompts divided. Needs two GPUs.

    python tests/gpu/record_ranks.py --out kernels/results/ranks.json [--steps fsdp,tp,prompts] [--layers 28]

A random checkpoint in the shape of Qwen3-0.6B. (1) one process captures the trainer; (2) two processes capture it with --shard fsdp (expected:
the same bits) and --shard tp (first different where it sums over ranks); (3) `compare` by one process and by two that divide the
prompts: metrics, and wall time of both. A step that fails keeps its error.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record_tp import PROMPTS, TOKENS, make_checkpoint

from rpadiag.engines.bundle import open_bundle
from rpadiag.runs import open_run
from rpadiag.sites import split_site

LIMIT_S = 280


def rpadiag(*arguments: Any, ranks: int = 1) -> float:
    """Run a command, under torchrun for several ranks; returns seconds. Its last words are the error of one that fails."""
    words = [str(a) for a in arguments]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "--", "rpadiag"]
    command = [sys.executable, *(launcher if ranks > 1 else ["-m", "rpadiag"]), *words]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ), check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower() or line.startswith("hint")]
        raise RuntimeError(f"exit code {done.returncode}: " + " | ".join(errors[:6] or done.stderr.splitlines()[-6:]))
    return round(time.monotonic() - began, 1)


def captured(home: Path, name: str, *how: Any, ranks: int, device: str) -> tuple[Any, float]:
    arguments = ("capture", home / "model", home / "prompts.jsonl", "--engine", "trainer", "--device", device)
    took = rpadiag(*arguments, "--bundle", home / name, *how, ranks=ranks)
    return open_bundle(home / name), took


def bits(one: Any, two: Any) -> dict[str, Any]:
    """Which points differ, the first site that does, and by how many elements."""
    counts: dict[str, list[int]] = {}
    first = None
    for index in range(len(one)):
        a, b = one.capture(index), two.capture(index)
        for site in a.sites:
            x, y = a.bits(site), b.bits(site)
            count = counts.setdefault(split_site(site)[1], [0, 0])
            differing = int((x != y).sum())
            count[0], count[1] = count[0] + differing, count[1] + x.size
            if differing and first is None:
                first = site
    p, q = (np.concatenate([b.capture(i).scores.logprob for i in range(len(b))]) for b in (one, two))
    d = np.abs(p.astype(np.float64) - q)
    return {
        "first_site_that_differs": first, "mean_abs_d": float(d.mean()), "max_abs_d": float(d.max()), "num_tokens": len(d),
        "differing": {point: n / m for point, (n, m) in counts.items() if n}, "num_elements": sum(m for _, m in counts.values()),
        "weights_equal": one.meta["weights"] == two.meta["weights"], "sharding": two.meta.get("sharding"),
    }  # fmt: skip


def sharded(home: Path, args: Any, how: str) -> dict[str, Any]:
    one, alone_s = captured(home, f"alone-{how}", ranks=1, device=args.device)
    two, ranks_s = captured(home, how, "--shard", how, ranks=args.ranks, device=args.device)
    return {**bits(one, two), "one_process_s": alone_s, "ranks_s": ranks_s}


def divided(home: Path, args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    runs = {}
    for name, ranks in (("one", 1), ("ranks", args.ranks)):
        extra = ("--rollout", "emulated") if args.device == "cpu" else ()
        found[f"{name}_s"] = rpadiag(
            "compare", home / "model", home / "prompts.jsonl", "--run", home / f"run-{name}", "--device", args.device,
            "--control", "none", *extra, ranks=ranks,
        )  # fmt: skip
        runs[name] = open_run(home / f"run-{name}")
    a, b = runs["one"], runs["ranks"]
    return {
        **found,
        "metrics_equal": a.metrics["logprob"] == b.metrics["logprob"],
        "mean_abs_d": [r.metrics["logprob"]["all"]["mean_abs_d"] for r in (a, b)],
        "tables_equal": {t: bool(a.table(t).equals(b.table(t))) for t in ("prompts", "tokens", "sites")},
        "verdicts": [a.verdict["kind"], b.verdict["kind"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default="fsdp,tp,prompts")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", type=Path, help="checkpoint in place of the random one")
    args = parser.parse_args()
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    content |= {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if args.device == "cuda" else "cpu",
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers")},
        "command": "python tests/gpu/record_ranks.py --out kernels/results/ranks.json",
        "shape": f"Qwen3-0.6B, {args.layers} layers, {PROMPTS} x {TOKENS} tokens, bf16"
        if args.model is None
        else "given",
    }
    with tempfile.TemporaryDirectory() as tmp:
        home = Path(tmp)
        if args.model is None:
            make_checkpoint(home / "model", args.layers)
        else:
            (home / "model").symlink_to(args.model.resolve())
        size = json.loads((home / "model" / "config.json").read_text())["vocab_size"]
        rng = np.random.default_rng(0)
        lines = [json.dumps({"token_ids": rng.integers(10, size, TOKENS).tolist()}) for _ in range(PROMPTS)]
        (home / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        for step in args.steps.split(","):
            try:
                content[step] = divided(home, args) if step == "prompts" else sharded(home, args, step)
            except Exception as error:
                content[step] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(step, json.dumps(content[step])[:1500], flush=True)
            args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
