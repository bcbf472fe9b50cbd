"""What torch.compile does to a transformers trainer: whether it scores as it trains, and which contract one layer of it follows.

    python tests/gpu/record_compiled.py --out kernels/results/compiled-trainer.json [--model DIR] [--device cpu|cuda]

Two forwards of the same weights and tokens are compared: the one without gradients, which gives log-probabilities to an objective, and the one
of a training step, uncompiled and compiled, unaligned and aligned. Differences are in nats, means over the tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from record_carry import TEXT
from record_vllm import version
from torch import Tensor

from rpadiag.regions.align import align
from rpadiag.regions.presets import Preset, find_preset
from rpadiag.workflows.smollm2 import resolve_model

ALIGNED = (None, "fp32-output")


def load(model: Path, device: str, **config: Any) -> Any:
    import transformers

    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **config).to(device)
    found.config.use_cache = False
    return found


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """fp32 [T - 1] of one sequence [1, T]."""
    return logits[0, :-1].detach().float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def passes(forward: Callable[..., Any], model: Any, ids: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        scored = logprobs(forward(input_ids=ids).logits, ids)
    out = forward(input_ids=ids, labels=ids)
    out.loss.backward()
    model.zero_grad()
    return {"score": scored, "train": logprobs(out.logits, ids)}


def both(model: Any, ids: Tensor, contract: str | None) -> dict[str, float]:
    """Mean |d| between the two passes, and between the compiled pass and the uncompiled one."""
    torch._dynamo.reset()
    with nullcontext() if contract is None else align(model, contract=contract):
        plain, compiled = passes(model, model, ids), passes(torch.compile(model), model, ids)
    pairs = {
        "uncompiled score - train": (plain["score"], plain["train"]),
        "compiled score - train": (compiled["score"], compiled["train"]),
        "score, compiled - uncompiled": (compiled["score"], plain["score"]),
        "train, compiled - uncompiled": (compiled["train"], plain["train"]),
    }
    found = {name: (a - b).abs().mean().item() for name, (a, b) in pairs.items()}
    changed = compiled["score"] != compiled["train"]
    return found | {"num_differing": int(changed.sum()), "num_logprobs": changed.numel()}


def variants() -> dict[str, Preset | str]:
    base = find_preset("fp32-output")
    rope = base.regions["rope"].replace(cache="fp32")
    found: dict[str, Preset | str] = {
        f"carry={carry}, cache=fp32": dataclasses.replace(base, carry=carry, regions={**base.regions, "rope": rope})
        for carry in ("stream", "lp")
    }
    found["carry=stream, cache=lp"] = dataclasses.replace(base, carry="stream")
    return found | {name: name for name in ("fp32-output", "hf-compiled-cpu", "hf-compiled-cuda", "hf-eager")}


def one_layer(model: Any, ids: Tensor) -> dict[str, dict[str, float]]:
    """By contract, the share of logits, and of tokens with any, in which the compiled model without gradients differs from an aligned one."""
    torch._dynamo.reset()
    found = {}
    with torch.no_grad():
        compiled = torch.compile(model)(input_ids=ids).logits
        for name, contract in variants().items():
            with align(model, contract=contract):
                wrong = model(input_ids=ids).logits != compiled
            found[name] = {"logits": wrong.float().mean().item(), "tokens": wrong.any(-1).float().mean().item()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    import transformers

    path, began = Path(resolve_model(args.model)), time.monotonic()
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"]], device=args.device)
    layer = one_layer(load(path, args.device, num_hidden_layers=1).eval(), ids)
    gc.collect()
    model = load(path, args.device).train()
    found = {contract or "not aligned": both(model, ids, contract) for contract in ALIGNED}
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    content[f"{Path(args.model).name} on {args.device}"] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": {p: version(p) for p in ("torch", "triton", "transformers")},
        "command": f"python tests/gpu/record_compiled.py --out kernels/results/compiled-trainer.json --device {args.device}",
        "num_tokens": ids.numel(),
        "wall_s": round(time.monotonic() - began, 1),
        "mean_abs_d_nats": found,
        "one_layer_share_differing": layer,
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps({"mean_abs_d_nats": found, "one_layer_share_differing": layer}, indent=1))


if __name__ == "__main__":
    main()
