"""Layer evaluations and wall time of a bisection's replicates, shared between variants and whole.

    python tests/benchmarks/bench_bisect.py                             # the size of the demo: 8 sequences of 24 tokens
    python tests/benchmarks/bench_bisect.py --device cuda --tokens 2700 --replicates 32 --regions rope,swiglu,rmsnorm,attention

Prints one JSON object per question (``--by``): forwards, layer evaluations run, of whole forwards, and of whole pairs; seconds of
the shared scoring and, with ``--whole``, of scoring every variant by itself in the same batches. Sequences are random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

import numpy as np

SEQUENCES = 8
MODES = {"region": ("region",), "layer": ("layer",), "region,layer": ("region", "layer")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=192, help="scored and unscored, over all sequences")
    parser.add_argument("--replicates", type=int, default=4)
    parser.add_argument("--regions", default="rope,swiglu,rmsnorm")
    parser.add_argument("--by", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--designs", default="reference,each,only,all,self")
    parser.add_argument("--whole", action="store_true", help="time every variant by itself too")
    args = parser.parse_args()

    import torch

    from rpadiag.attribution.design import Replicate, parts_of, replicates_of, variants_of
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.products import fp32_products, has_slow_products
    from rpadiag.engines.switches import TrainerSwitches
    from rpadiag.engines.trainer import TrainerEngine
    from rpadiag.workflows.bisect_score import PrefixScorer
    from rpadiag.workflows.inputs import resolve_model
    from rpadiag.workflows.progress import SILENT
    from rpadiag.workflows.rollout import default_preset

    trainer = TrainerEngine.load(resolve_model(args.model, SILENT), device=args.device)
    drawn = np.random.default_rng(0).integers(0, trainer.facts.vocab_size, size=(SEQUENCES, args.tokens // SEQUENCES))
    sequences = [
        TokenSequence(prompt=i, token_ids=tuple(row.tolist()), num_prompt_tokens=len(row))
        for i, row in enumerate(drawn)
    ]
    wide = has_slow_products(trainer.model)
    contract = default_preset(args.device, "bfloat16")

    def seconds(score: PrefixScorer, batches: list[list[Replicate]]) -> float:
        if args.device != "cpu":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for some in batches:
            list(score(some))
        if args.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    with fp32_products(trainer.model) if wide else contextlib.nullcontext():
        switches = TrainerSwitches(trainer.model, contract=contract, wide_products=wide)
        for mode in args.by:
            parts = parts_of(args.regions.split(","), by=MODES[mode], num_layers=trainer.facts.num_layers)
            variants = [v for v in variants_of(parts) if v.design in args.designs.split(",")]
            asked = list(replicates_of(variants, range(args.replicates), seed=0))
            shared, whole = (PrefixScorer(trainer, sequences, switches) for _ in range(2))
            list(shared(asked[:1]))  # warm up
            shared.cost = type(shared.cost)()
            row = {
                "by": mode,
                "num_parts": len(parts),
                "num_variants": len(variants),
                "num_replicates": args.replicates,
            }
            row |= {"num_tokens": args.tokens, "device": args.device, "threads": torch.get_num_threads()}
            row["shared_s"] = seconds(shared, [asked])
            row |= shared.cost.to_dict()
            if args.whole:
                by_variant = [[r for r in asked if r.variant == v] for v in variants]
                row["whole_s"] = seconds(whole, by_variant)
            sys.stdout.write(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
