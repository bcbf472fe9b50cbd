"""Records what vLLM's CUDA kernels follow, and whether a trainer aligned to that reproduces its logprobs. Needs a GPU.

    python tests/gpu/record_vllm.py --out kernels/results/vllm-cuda.json [--model DIR] [--generate 64] [--steps eager,compiled]

Steps, each timed and each kept when a later one fails: (1) eager vLLM samples a continuation of the demo prompts and rescores it as
prompts, every site captured; (2) the contract of every region and layer is fingerprinted from that capture; (3) the trainer
is aligned to the fingerprint, with merged projections and vLLM's own attention, and held against vLLM's prompt logprobs;
(4) one region at a time is left out; (5) compiled vLLM scores the same tokens and the aligned trainer is held against it;
(6) its contracts are told from the attention inputs of layers 0 and 1, the only points of a compiled layer that are seen;
(layer0, only if named) the same for layer 0 alone, which needs one engine, and whether capturing changes a logprob.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.borrowed import borrowed_attention
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.merged import merged_projections
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.regions.align import align
from rpadiag.regions.presets import find_preset, load_preset
from rpadiag.sites import region_of
from rpadiag.structure import num_mismatches
from rpadiag.workflows.fingerprint import run_fingerprint
from rpadiag.workflows.options import FingerprintOptions
from rpadiag.workflows.smollm2 import resolve_model

REGIONS = ("rope", "swiglu", "rmsnorm")
PACKAGES = ("torch", "triton", "transformers", "vllm")


def statistics(p: np.ndarray, q: np.ndarray) -> dict[str, float]:
    """Of d = p - q in nats, float64: mean and largest |d|, share of exact tokens, k3 = mean(exp(d) - 1 - d)."""
    d = p.astype(np.float64) - q.astype(np.float64)
    return {
        "mean_abs_d": float(np.abs(d).mean()),
        "max_abs_d": float(np.abs(d).max()),
        "exact_share": float((d == 0).mean()),
        "k3_kl": float((np.expm1(d) - d).mean()),
        "num_tokens": len(d),
    }


class Recorder:
    """The results file, written after every step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": {p: version(p) for p in PACKAGES} | {"cuda": torch.version.cuda},
            "command": "python tests/gpu/record_vllm.py --out kernels/results/vllm-cuda.json",
        }
        if path.exists():  # steps that are not run again stay
            self.content = json.loads(path.read_text()) | self.content

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {}
        began = time.monotonic()
        try:
            yield found
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        found["wall_s"] = round(time.monotonic() - began, 1)
        self.content[name] = found
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        print(name, json.dumps(found)[:1500], flush=True)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def trainer_scores(
    trainer: TrainerEngine,
    engine: VllmEngine | None,
    bundle: Any,
    *,
    contract: Any,
    regions: Sequence[str],
    own_attention: bool,
) -> tuple[np.ndarray, str | None]:
    """Trainer logprobs over all sequences, and the first site that differs from the capture."""
    out, first = [], None
    for index, sequence in enumerate(bundle.sequences):
        capture = bundle.capture(index)
        differing: list[str] = []

        def on_site(site: str, tensor: torch.Tensor, capture: Any = capture, differing: list[str] = differing) -> None:
            if not differing and not torch.equal(tensor.cpu(), capture.read(site)[: len(tensor)]):
                differing.append(site)

        with contextlib.ExitStack() as stack:
            stack.enter_context(merged_projections(trainer.model))
            if engine is not None and not own_attention:
                attend = stack.enter_context(engine.attention(len(sequence.token_ids)))
                stack.enter_context(borrowed_attention(trainer.model, attend))
            if regions:
                stack.enter_context(align(trainer.model, regions=regions, contract=contract))
            sites = [s for s in capture.sites if s in trainer.facts.sites and s != "logprob"]
            out.append(trainer.forward(sequence.token_ids, sites=sites, on_site=on_site).logprob)
        first = first or (differing[0] if differing else None)
    return np.concatenate(out), first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--compiled-contract", default="vllm-compiled")
    parser.add_argument(
        "--steps",
        default="eager,compiled",
        help="eager, compiled, both, or layer0 alone; a step not named stays in FILE",
    )
    args = parser.parse_args()
    record = Recorder(args.out)
    model = resolve_model(args.model)
    trainer = TrainerEngine.load(model, dtype="bfloat16", device=args.device)
    prompts = [json.loads(line) for line in (files("rpadiag") / "data" / "demo_prompts.jsonl").read_text().splitlines()]
    texts = [p.get("prompt") or " ".join(m["content"] for m in p["messages"]) for p in prompts]
    ids = [tuple(trainer.tokenizer(t)["input_ids"]) for t in texts]
    sequences = [TokenSequence(prompt=i, token_ids=x, num_prompt_tokens=len(x)) for i, x in enumerate(ids)]
    length = max(len(x) for x in ids) + args.generate + 8
    sites = [s for s in trainer.facts.sites if s != "logprob"]
    with tempfile.TemporaryDirectory() as tmp:
        home = Path(tmp)
        if args.steps == "layer0":
            compiled_layer0(record, args, model, trainer, sequences, home)
            return
        with VllmEngine.start(
            model, dtype="bfloat16", device=args.device, log_path=home / "eager.log", max_model_len=length
        ) as engine:
            q = eager_capture(record, args, engine, trainer, sequences, sites, home)
            if "eager" in args.steps:
                eager(record, args, engine, trainer, home, q)
        if "compiled" in args.steps:
            compiled(record, args, model, trainer, home, length)


def eager_capture(
    record: Recorder, args: Any, engine: VllmEngine, trainer: TrainerEngine, sequences: Any, sites: Any, home: Path
) -> np.ndarray:
    """Step 1: a bundle in ``home``/eager; returns vLLM's prompt logprobs."""
    with record.step("eager_capture") as found:
        sampled = engine.score(sequences, num_generate=args.generate)
        whole = [
            TokenSequence(
                prompt=r.sequence.prompt, token_ids=r.sequence.token_ids, num_prompt_tokens=len(r.sequence.token_ids)
            )
            for r in sampled
        ]
        rescored = engine.score(whole, sites=sites, bundle_dir=home / "eager")
        q = np.concatenate([r.scores.logprob for r in rescored])
        found["num_sites"] = len(sites)
        found["weights_equal"] = engine.weight_digests() == trainer.weight_digests()
        manifest = engine.manifest()
        found["engine"] = {
            k: manifest.get(k) for k in ("vllm_version", "attention_backend", "compile_mode", "arguments", "env")
        }
        starts = [s.num_prompt_tokens - 1 for s in sequences]
        a = np.concatenate([r.scores.logprob[n:] for r, n in zip(sampled, starts, strict=True)])
        b = np.concatenate([r.scores.logprob[n:] for r, n in zip(rescored, starts, strict=True)])
        found["sampled_against_rescored"] = statistics(a, b)
    np.save(home / "eager_q.npy", q)
    return q


def eager(record: Recorder, args: Any, engine: VllmEngine, trainer: TrainerEngine, home: Path, q: np.ndarray) -> None:
    """Steps 2 to 4."""
    bundle = open_bundle(home / "eager")
    with record.step("eager_unaligned") as found:
        p, first = trainer_scores(trainer, None, bundle, contract=None, regions=(), own_attention=True)
        found |= statistics(p, q) | {"first_divergent": first}
    with record.step("eager_fingerprint") as found:
        options = FingerprintOptions(target=str(home / "eager"), device=args.device, output=home / "fingerprint.json")
        result = run_fingerprint(options)
        found["findings"] = [f.text for f in result.findings]
        found["regions"] = result.content.get("regions")
    contracts = contracts_on_device(home / "fingerprint.json")
    best, contract = None, next(iter(contracts.values()))
    for name, candidate in contracts.items():
        with record.step(f"eager_aligned {name}") as found:
            p, first = trainer_scores(trainer, engine, bundle, contract=candidate, regions=REGIONS, own_attention=False)
            found |= statistics(p, q) | {"first_divergent": first}
            if best is None or found["mean_abs_d"] < best:
                best, contract = found["mean_abs_d"], candidate
    for left_out in (*REGIONS, "attention"):
        with record.step(f"eager_without_{left_out}") as found:
            regions = tuple(r for r in REGIONS if r != left_out)
            p, first = trainer_scores(
                trainer, engine, bundle, contract=contract, regions=regions, own_attention=left_out == "attention"
            )
            found |= statistics(p, q) | {"first_divergent": first, "first_region": region_of(first) if first else None}


def contracts_on_device(path: Path) -> dict[str, Any]:
    """The fingerprinted contract with each order of the sum of squares and each mean.

    Captures are fingerprinted on the CPU, whose rsqrt is not the GPU's, so level two is settled here, on the GPU.
    """
    base = load_preset(path)
    norm = base.regions["rmsnorm"]
    return {
        f"reduction={r} mean={m}": replace(base, regions={**base.regions, "rmsnorm": norm.replace(reduction=r, mean=m)})
        for r in ("warps8", "native")
        for m in ("sum/n", "sum*(1/n)")
    }


def compiled(record: Recorder, args: Any, model: str, trainer: TrainerEngine, home: Path, length: int) -> None:
    """Step 5: attention is eager vLLM's, since a compiled engine cannot lend it."""
    whole = list(open_bundle(home / "eager").sequences)
    with record.step("compiled_capture") as found:
        with VllmEngine.start(
            model,
            dtype="bfloat16",
            device=args.device,
            log_path=home / "c.log",
            max_model_len=length,
            enforce_eager=False,
        ) as engine:
            manifest = engine.manifest()
            seen = manifest.get("observable_points") or ["q_rope", "k_rope", "v", "attn"]
            sites = [s for s in trainer.facts.sites if s.rsplit(".", 1)[-1] in seen and s != "logprob"]
            scored = engine.score(whole, sites=sites, bundle_dir=home / "compiled")
            found["engine"] = {k: manifest.get(k) for k in ("compile_mode", "cudagraph_mode", "attention_backend")}
        q = np.concatenate([r.scores.logprob for r in scored])
        found["against_eager"] = statistics(np.load(home / "eager_q.npy"), q)
    bundle = open_bundle(home / "compiled")
    with VllmEngine.start(
        model, dtype="bfloat16", device=args.device, log_path=home / "e2.log", max_model_len=length
    ) as engine:
        with record.step("compiled_fingerprint") as found:
            found |= compiled_fingerprint(trainer, engine, bundle)
        for name in (args.compiled_contract, "vllm-eager", "hf-eager"):
            with record.step(f"compiled_aligned_to_{name}") as found:
                p, first = trainer_scores(trainer, engine, bundle, contract=name, regions=REGIONS, own_attention=False)
                found |= statistics(p, q) | {"first_divergent": first}


def compiled_fingerprint(trainer: TrainerEngine, engine: VllmEngine, bundle: Any) -> dict[str, Any]:
    """Share of elements that differ at v, q_rope and k_rope of layers 0 and 1, per combination of rounding points.

    Layer 0 tells the plain norm (v) and RoPE; v of layer 1 has passed the residual norms and SwiGLU as well. A combination
    is told by having far fewer differing elements than the others: an order of addition alone moves about one in 1e4.
    """
    base = find_preset("fp32-output").regions
    points = [
        {"rope": {"products": a}, "swiglu": {"silu": b}, "rmsnorm": {"scale": c, "sum": d, "variance": e}}
        for a in ("fp32", "lp")
        for b in ("fp32", "lp")
        for c in ("fp32", "lp")
        for d, e in (("fp32", "unrounded"), ("lp", "rounded"), ("lp", "unrounded"))
    ]
    rows = []
    for point in points:
        contract = replace(
            find_preset("fp32-output"), regions={r: base[r].replace(**axes) for r, axes in point.items()}
        )
        rows.append({**point, "differing": differing_shares(trainer, engine, bundle, contract)})
    rows.sort(key=lambda row: (row["differing"]["layers.1.v"], row["differing"]["layers.0.q_rope"]))
    return {"combinations": rows}


def compiled_layer0(
    record: Recorder, args: Any, model: str, trainer: TrainerEngine, sequences: Any, home: Path
) -> None:
    """Attention inputs of layer 0 under each rounding of the plain norm's scale and of RoPE's products."""
    sites = [f"layers.0.{point}" for point in ("v", "q_rope", "k_rope")]
    length = max(len(s.token_ids) for s in sequences) + 8
    with record.step("compiled_layer0") as found:
        with VllmEngine.start(
            model, dtype="bfloat16", device=args.device, log_path=home / "c.log", max_model_len=length,
            enforce_eager=False,
        ) as engine:  # fmt: skip
            plain = np.concatenate([r.scores.logprob for r in engine.score(sequences)])
            every = [s for s in engine.sites if s != "logprob"]
            seen = np.concatenate(
                [r.scores.logprob for r in engine.score(sequences, sites=every, bundle_dir=home / "all")]
            )
            engine.score(sequences, sites=sites, bundle_dir=home / "layer0")
            found["captured_points"] = sorted({s.rsplit(".", 1)[-1] for s in every})
            found["logprobs_that_capturing_changed"] = int((plain != seen).sum())
            found["num_tokens"] = len(plain)
        bundle = open_bundle(home / "layer0")
        base = find_preset("fp32-output")
        rows = []
        for products in ("fp32", "lp"):
            for scale in ("fp32", "lp"):
                axes = {"rope": {"products": products}, "rmsnorm": {"scale": scale}}
                contract = replace(base, regions={r: c.replace(**axes.get(r, {})) for r, c in base.regions.items()})
                shares = differing_shares(trainer, None, bundle, contract, layers=(0,))
                rows.append({"rope_products": products, "norm_scale": scale, "differing": shares})
        found["combinations"] = sorted(rows, key=lambda row: sum(row["differing"].values()))


def differing_shares(
    trainer: TrainerEngine, engine: VllmEngine | None, bundle: Any, contract: Any, layers: Sequence[int] = (0, 1)
) -> dict[str, float]:
    """Share of differing elements of the first two sequences, at the attention inputs of the layers.

    engine: lends its attention, which every layer but the first needs.
    """
    seen = {f"layers.{n}.{point}": [0, 0] for n in layers for point in ("v", "q_rope", "k_rope")}
    for index, sequence in enumerate(bundle.sequences[:2]):
        capture = bundle.capture(index)

        def on_site(site: str, tensor: torch.Tensor, capture: Any = capture) -> None:
            seen[site][0] += num_mismatches(tensor.cpu(), capture.read(site)[: len(tensor)])
            seen[site][1] += tensor.numel()

        with contextlib.ExitStack() as stack:
            stack.enter_context(merged_projections(trainer.model))
            if engine is not None:
                attend = stack.enter_context(engine.attention(len(sequence.token_ids)))
                stack.enter_context(borrowed_attention(trainer.model, attend))
            stack.enter_context(align(trainer.model, regions=REGIONS, contract=contract))
            trainer.forward(sequence.token_ids, sites=list(seen), on_site=on_site)
    return {site: wrong / total for site, (wrong, total) in seen.items()}


if __name__ == "__main__":
    main()
