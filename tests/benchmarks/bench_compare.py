"""Cost of capturing and comparing every site, as a ratio to the two plain forwards of the same tokens.

    python tests/benchmarks/bench_compare.py [--model smollm2-135m] [--tokens 4096] [--length 512] [--rounds 5]

Rounds alternate plain and compared, so that a machine whose speed drifts moves both. Engine start is excluded. Goals:
time ratio at most 2.0, peak memory of both processes at most 1.5 GiB over the two loaded models, and a peak that does not
grow with the number of prompts (see --length: 4096 is one long prompt, 512 is eight). With --rounds 0 only memory is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np


def resident_bytes(pids: list[int]) -> int:
    """Private and shared resident bytes of the processes; file pages mapped by neither are not counted."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except FileNotFoundError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS"))
    return total


def family_of(pid: int) -> list[int]:
    """The process and everything it started."""
    out = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) in out:
            out.append(int(path.parent.name))
    return out


class PeakWatch:
    """Samples the resident memory of this process and its children every 20 ms."""

    def __init__(self) -> None:
        self.peak = 0
        self._pids = family_of(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, resident_bytes(self._pids))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    from rpadiag.compare.pairing import Pairing, SequencePair
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.engines.vllm import VllmEngine
    from rpadiag.workflows.compare import captured_one_by_one
    from rpadiag.workflows.rollout import Rollout
    from rpadiag.workflows.smollm2 import resolve_model

    model = resolve_model(args.model)
    trainer = TrainerEngine.load(model, dtype="bfloat16")
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(
            prompt=i,
            token_ids=tuple(int(t) for t in rng.integers(3, trainer.facts.vocab_size, args.length)),
            num_prompt_tokens=args.length,
        )
        for i in range(args.tokens // args.length)
    ]
    sites = list(trainer.facts.sites)
    with tempfile.TemporaryDirectory() as tmp:
        with VllmEngine.start(
            model, dtype="bfloat16", log_path=Path(tmp) / "vllm.log", max_model_len=args.length + 1
        ) as engine:
            rollout = Rollout(engine=engine, label="vLLM", real=True)
            baseline = resident_bytes(family_of(os.getpid()))

            def plain() -> None:
                for sequence in sequences:
                    engine.score([sequence], sites=(), bundle_dir=None)
                    trainer.forward(sequence.token_ids)

            def compared() -> None:
                pairing = Pairing(trainer, sites=sites, precision="model")
                captured = [s for s in sites if s != "logprob"]
                scratch = Path(tmp) / "scratch"
                for result, capture in captured_one_by_one(
                    rollout, sequences, sites=captured, scratch=scratch, num_generate=0
                ):
                    pairing.compare(
                        SequencePair(
                            prompt=result.sequence.prompt,
                            token_ids=result.sequence.token_ids,
                            num_prompt_tokens=result.sequence.num_prompt_tokens,
                            scores=result.scores,
                            capture=capture,
                        )
                    )

            def timed(run) -> float:  # type: ignore[no-untyped-def]
                start = time.perf_counter()
                run()
                return time.perf_counter() - start

            plain()
            with PeakWatch() as watch:
                compared()
            pairs = [(timed(plain), timed(compared)) for _ in range(args.rounds)]
    ratios = [b / a for a, b in pairs]
    times = {
        "plain_s_median": round(statistics.median(a for a, _ in pairs), 2),
        "compared_s_median": round(statistics.median(b for _, b in pairs), 2),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    } if pairs else {}  # fmt: skip
    print(
        json.dumps(
            {
                "tokens": len(sequences) * args.length,
                "length": args.length,
                "rounds": args.rounds,
                **times,
                "peak_growth_gib": round((watch.peak - baseline) / 2**30, 3),
                "baseline_gib": round(baseline / 2**30, 3),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
