"""Records the modes of vLLM that production uses, and what capture costs, on one GPU. Each part is a short run of its own.

    python tests/gpu/record_modes.py PART [PART ...] --out kernels/results/vllm-modes.json [--model DIR] [--work DIR]

Parts (`--list` prints them with the time they may take). A part that fails keeps its error and what it had found; parts that are not run
again stay in the file. Without --model a random checkpoint in the shape of Qwen3-0.6B is made on the device; the parts named 8b make
one of Qwen3-8B in --work, and use it again. `--device cpu --layers 2 --tokens 64 --generate 4` runs what a CPU can.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batch_sites import batch_invariance, batch_invariant_sites
from random_models import Setting

from rpadiag.engines.bundle import open_bundle
from rpadiag.runs import open_run
from rpadiag.sites import split_site
from rpadiag.workflows.compare import run_compare
from rpadiag.workflows.options import CompareOptions

# -- parts -----------------------------------------------------------------------------------------


def compared(setting: Setting, found: dict[str, Any], **options: Any) -> Any:
    """One ``rpadiag compare``; verdict, findings, metrics, floors and shares per point and source go into ``found``."""
    length = options.pop("length", setting.short)
    prompts = setting.work / "prompts.jsonl"
    shape = options.pop("shape", "0.6b")
    rows = setting.sequences(shape, options.pop("num", 4), length)
    prompts.write_text("".join(json.dumps({"token_ids": s.token_ids}) + "\n" for s in rows))
    run = Path(tempfile.mkdtemp(dir=setting.work)) / "run"
    began = time.monotonic()
    result = run_compare(
        CompareOptions(
            model=str(setting.checkpoint(shape)), prompts=prompts, run=run, device=setting.device,
            **{"control": "none", "timeout_s": 240.0, **options},
        )
    )  # fmt: skip
    finished = open_run(run)
    rollout = finished.manifest["rollout"]
    sites = finished.sites()
    grouped = sites[sites["precision"] == "model"].groupby(["source", "point"], observed=True)
    found |= {
        "verdict": result.verdict.kind,
        "sentence": result.verdict.sentence,
        "findings": {f["code"]: f["text"] for f in finished.findings},
        "metrics": {
            source: {name: m[name] for name in ("mean_abs_d", "k3_kl", "num_tokens")}
            for source, m in finished.metrics["logprob"].items()
        },
        "floors": [
            {k: f[k] for k in ("name", "mean_abs_d", "max_abs_d", "exact_share", "num_tokens")} for f in result.floors
        ],
        "local_differing": shares(grouped["local_num_differing"].sum(), grouped["local_n"].sum()),
        "differing": shares(grouped["num_differing"].sum(), grouped["n"].sum()),
        "rollout": {
            k: rollout.get(k)
            for k in ("compile_mode", "cudagraph_mode", "attention_backend", "chunked_prefill", "cache_dtype", "max_num_batched_tokens", "block_size", "model_runner")
        },
        "compare_s": round(time.monotonic() - began, 1),
    }  # fmt: skip
    shutil.rmtree(run.parent, ignore_errors=True)
    return result


def shares(differing: Any, n: Any) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for (source, point), count in n.items():
        if count and count == count:
            out.setdefault(str(source), {})[str(point)] = round(float(differing[(source, point)]) / float(count), 6)
    return out


def decode_eager(setting: Setting, found: dict[str, Any]) -> None:
    """Eager: every site of prefill and of decode steps, against the trainer; sampled against rescored logprobs."""
    compared(setting, found, generate=setting.generate)


def decode_compiled(setting: Setting, found: dict[str, Any]) -> None:
    """Compiled with graphs in pieces: attention of decode steps seen; and what the pieces change against vLLM's own full graphs."""
    compared(setting, found, generate=setting.generate, mode="compiled")
    sequences = setting.sequences("0.6b", 4, setting.short)
    length = setting.short + setting.generate
    plain = {}
    for name, extra in (("full", {}), ("piecewise", {"compilation_config": {"cudagraph_mode": "PIECEWISE"}})):
        with setting.engine("0.6b", length, enforce_eager=False, extra=extra) as engine:
            found[f"{name}_graphs"] = {"cudagraph_mode": engine.manifest()["cudagraph_mode"]}
            plain[name] = engine.plain(sequences, num_generate=setting.generate)
            if name == "piecewise":
                sites = [s for s in engine.sites if s != "logprob"]
                seen = engine.score(
                    sequences, sites=sites, bundle_dir=setting.work / "seen", num_generate=setting.generate, temperature=0.0
                )  # fmt: skip
                shutil.rmtree(setting.work / "seen")
                q = np.concatenate([r.scores.logprob for r in seen])
                found["piecewise_graphs"] |= {
                    "captured_points": sorted({split_site(s)[1] for s in sites}),
                    "logprobs_that_capturing_changed": int((q != flat(plain[name])).sum()),
                    "tokens_that_capturing_changed": sum(
                        tuple(t) != r.sequence.token_ids[setting.short :] for t, r in zip(plain[name]["sampled"], seen, strict=True)
                    ),
                    "num_tokens": len(q),
                }  # fmt: skip
    a, b = plain["full"], plain["piecewise"]
    same = [i for i in range(len(sequences)) if a["sampled"][i] == b["sampled"][i]]
    d = [
        np.subtract(a["logprobs"][i][setting.short - 1 :], b["logprobs"][i][setting.short - 1 :]) for i in same
    ]  # decode steps
    joined = np.abs(np.concatenate(d)) if d else np.empty(0)
    found["full_against_piecewise"] = {
        "sequences_with_the_same_tokens": len(same), "num_sequences": len(sequences), "num_decoded": len(joined),
        "logprobs_that_differ": int((joined > 0).sum()), "max_abs_d": float(joined.max(initial=0.0)),
    }  # fmt: skip


def flat(plain: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.array(row, np.float32) for row in plain["logprobs"]])


def batch_invariant(setting: Setting, found: dict[str, Any]) -> None:
    """VLLM_BATCH_INVARIANT=1: vLLM's own floors (batch, decode against prefill) should be zero; without it they are not."""
    for name, on in (("invariant", True), ("plain", False)):
        one: dict[str, Any] = {}
        try:
            with batch_invariance(on):
                compared(setting, one, generate=setting.generate, sites=("attn",))
        except Exception as error:
            one["error"] = f"{type(error).__name__}: {error}"[:2000]
        found[name] = one


def chunked_prefill(setting: Setting, found: dict[str, Any]) -> None:
    """A prompt cut into pieces of 256 tokens against the same prompt in one step: all sites are there, joined in order; what it moves."""
    length = setting.tokens // 4
    piece = max(16, length // 4)
    sequences = setting.sequences("0.6b", 2, length)
    bundles, scores = {}, {}
    for name, batched in (("whole", length + 1), ("pieces", piece)):
        with setting.engine("0.6b", length, max_num_batched_tokens=batched) as engine:
            found[name] = {k: engine.manifest()[k] for k in ("chunked_prefill", "max_num_batched_tokens")}
            sites = [s for s in engine.sites if split_site(s)[1] not in ("logits", "logprob")]
            scores[name] = engine.score(sequences, sites=sites, bundle_dir=setting.work / name)
            bundles[name] = open_bundle(setting.work / name)
            for index in range(len(sequences)):
                assert list(scores[name][index].positions) == list(range(length))
    q = {name: np.concatenate([r.scores.logprob for r in found_]) for name, found_ in scores.items()}
    d = np.abs(q["whole"].astype(np.float64) - q["pieces"])
    differing: dict[str, list[int]] = {}
    for index in range(len(sequences)):
        a, b = bundles["whole"].capture(index), bundles["pieces"].capture(index)
        for site in a.sites:
            x, y = a.bits(site), b.bits(site)
            count = differing.setdefault(split_site(site)[1], [0, 0])
            count[0], count[1] = count[0] + int((x != y).sum()), count[1] + x.size
    found |= {
        "num_tokens": len(d), "mean_abs_d": float(d.mean()), "max_abs_d": float(d.max()), "exact_share": float((d == 0).mean()),
        "first_layer_differing": {
            s: int((bundles["whole"].capture(0).bits(f"layers.0.{s}") != bundles["pieces"].capture(0).bits(f"layers.0.{s}")).sum())
            for s in ("input_norm", "q", "q_rope", "attn", "down")
        },
        "differing": {p: n / m for p, (n, m) in differing.items()},
    }  # fmt: skip
    for name in bundles:
        shutil.rmtree(setting.work / name)


def fp8_cache(setting: Setting, found: dict[str, Any]) -> None:
    """An FP8 KV cache: named as the cause, before any word of rounding."""
    compared(setting, found, engine_args=("kv_cache_dtype=fp8",), generate=min(8, setting.generate))
    found["recognised"] = "quantised-kv-cache" in found["findings"]


def fp8_weights(setting: Setting, found: dict[str, Any]) -> None:
    """vLLM quantises the weights to FP8 while it loads: named as the cause, before any word of rounding."""
    compared(setting, found, engine_args=("quantization=fp8",))
    found["recognised"] = "quantised-weights" in found["findings"]


def overhead(setting: Setting, found: dict[str, Any], shape: str, *, compiled: bool) -> None:
    """Seconds in vLLM's steps for one prompt: with every visible site captured, against the same with nothing observed."""
    (sequence,) = setting.sequences(shape, 1, setting.tokens)
    with setting.engine(shape, setting.tokens, enforce_eager=not compiled) as engine:
        manifest = engine.manifest()
        sites = [s for s in engine.sites if s != "logprob"]
        found |= {
            "num_sites": len(sites), "points": sorted({split_site(s)[1] for s in sites}), "num_tokens": setting.tokens,
            "load_s": manifest["load_s"], "cudagraph_mode": manifest["cudagraph_mode"], "compile_mode": manifest["compile_mode"],
            "rounds": [],
        }  # fmt: skip
        engine.plain([sequence])  # warm
        plain = engine.plain([sequence])
        num_rounds = 3 if shape == "8b" else 4  # a round of the large one writes 24 GB
        for number in range(num_rounds):
            measured = {}
            for name, scored in (("plain_scored", True), ("plain_unscored", False)):
                measured[f"{name}_s"] = engine.plain([sequence], scored=scored)["step_s"]
            (watched,) = engine.score([sequence])
            measured["no_sites_s"] = engine.measured["step_s"]
            directory = setting.work / f"capture-{number}"
            (seen,) = engine.score([sequence], sites=sites, bundle_dir=directory)
            measured |= {f"captured_{k}": v for k, v in engine.measured.items()}
            measured["bundle_bytes"] = sum(p.stat().st_size for p in directory.iterdir())
            measured["logprobs_that_capturing_changed"] = int((seen.scores.logprob != flat(plain)).sum())
            measured["ratio_to_scored"] = measured["captured_step_s"] / measured["plain_scored_s"]
            measured["ratio_to_unscored"] = measured["captured_step_s"] / measured["plain_unscored_s"]
            del watched
            found["rounds"].append(measured)
            print("round", number, json.dumps(measured), flush=True)
            if number < num_rounds - 1:
                shutil.rmtree(directory)
        peaks = [r["captured_peak_bytes"] for r in found["rounds"] if r["captured_peak_bytes"]]
        found |= {
            "plain_peak_gib": gib(plain["peak_bytes"]), "captured_peak_gib": gib(max(peaks, default=None)),
            "median_ratio_to_scored": float(np.median([r["ratio_to_scored"] for r in found["rounds"][1:]])),
            "median_ratio_to_unscored": float(np.median([r["ratio_to_unscored"] for r in found["rounds"][1:]])),
        }  # fmt: skip
        shutil.rmtree(directory)


def memory_8b(setting: Setting, found: dict[str, Any]) -> None:
    """``rpadiag compare`` of an 8B-shaped model, one prompt of --tokens tokens, every site, both stacks on this device: peak memory."""
    with watching(setting.device) as peak:
        compared(setting, found, shape="8b", num=1, length=setting.tokens)
    found |= {
        "device_peak_gib": gib(peak["bytes"]),
        "device_total_gib": gib(peak["total"]),
        "num_tokens": setting.tokens,
    }


@contextlib.contextmanager
def watching(device: str) -> Iterator[dict[str, int | None]]:
    """Most bytes in use on the whole device while the block runs, all processes, looked at every 20 ms."""
    peak: dict[str, int | None] = {"bytes": None, "total": None}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            peak["bytes"], peak["total"] = max(peak["bytes"] or 0, total - free), total

    thread = threading.Thread(target=look, daemon=True)
    if device != "cpu":
        thread.start()
    try:
        yield peak
    finally:
        ended.set()


def gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 2**30, 2)


Part = Callable[[Setting, dict[str, Any]], None]
# name -> (seconds it may take on an H200, what it does)
PARTS: dict[str, tuple[int, Part]] = {
    "decode-eager": (70, decode_eager),
    "decode-compiled": (240, decode_compiled),
    "batch-invariant": (130, batch_invariant),
    "batch-invariant-sites": (60, batch_invariant_sites),
    "chunked-prefill": (90, chunked_prefill),
    "fp8-kv-cache": (60, fp8_cache),
    "fp8-weights": (60, fp8_weights),
    "overhead-eager": (60, lambda s, f: overhead(s, f, "0.6b", compiled=False)),
    "overhead-compiled": (100, lambda s, f: overhead(s, f, "0.6b", compiled=True)),
    "8b-overhead-eager": (180, lambda s, f: overhead(s, f, "8b", compiled=False)),
    "8b-overhead-compiled": (180, lambda s, f: overhead(s, f, "8b", compiled=True)),
    "8b-memory": (240, memory_8b),
}


def record(path: Path, name: str, part: Part, setting: Setting) -> bool:
    """Run a part and write what it found, an error included, into the results file."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= {
        "device": torch.cuda.get_device_name() if setting.device != "cpu" else "cpu",
        "versions": {p: version(p) for p in ("torch", "triton", "transformers", "vllm")},
        "command": "python tests/gpu/record_modes.py PART --out kernels/results/vllm-modes.json",
    }
    found: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    began = time.monotonic()
    try:
        part(setting, found)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
        traceback.print_exc()
        if not isinstance(error, Exception):
            raise
    finally:
        found["wall_s"] = round(time.monotonic() - began, 1)
        content[name] = found
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)
        print(name, json.dumps(found)[:2500], flush=True)
    return "error" not in found


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("kernels/results/vllm-modes.json"))
    parser.add_argument("--model", type=Path, help="checkpoint in place of the random 0.6B one")
    parser.add_argument(
        "--work", type=Path, help="scratch directory that stays, for the 8B checkpoint; default: a new one"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, help="decoder layers of random checkpoints; default: the shape's")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list or not args.parts:
        for name, (seconds, part) in PARTS.items():
            print(f"{name:22} {seconds:4} s  {(part.__doc__ or overhead.__doc__ or '').strip()}")
        return
    unknown = [p for p in args.parts if p not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}; parts are {', '.join(PARTS)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            device=args.device, model=args.model, work=work, layers=args.layers, tokens=args.tokens, generate=args.generate, vocab=args.vocab,
        )  # fmt: skip
        good = [record(args.out, name, PARTS[name][1], setting) for name in args.parts]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
