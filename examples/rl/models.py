"""Small Qwen2 and Qwen3 checkpoints, pretrained on written-out sums until about 40 % of the sampled answers are right.

    python examples/rl/models.py qwen3-s                  # into the cache; prints its directory
    python examples/rl/models.py --list

A checkpoint depends on its recipe, and on the kind of device and torch that made it; the digest of the recipe is part of its
directory's name. BF16 arithmetic with FP32 weights, stored in BF16. Deterministic: the same device makes the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from tasks import END_ID, PAD_ID, VOCAB_SIZE, Problem, Task, decode, encode, is_right, problems, save_tokenizer

SMOLLM2 = "smollm2-135m"
VERSION = 1  # raise when the same recipe makes another checkpoint


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Architecture, text and training of one checkpoint. Seeds are part of it."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    digits: int = 2
    terms: tuple[int, int] = (2, 12)  # lists of the pretraining text, shortest and longest
    short: int = 6  # terms of the short and the long task of reinforcement learning
    long: int = 12
    batch: int = 256
    max_steps: int = 6000
    eval_every: int = 100
    learning_rate: float = 1e-3
    target: float = 0.4  # stop when so many sampled answers of the middle task are right
    num_eval: int = 128  # sampled answers
    pool: int = 40_000  # problems of the pretraining text
    seed: int = 1
    head_dim: int = 64

    def digest(self) -> str:
        text = json.dumps([VERSION, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def middle(self) -> Task:
        """The task whose sampled accuracy ends the pretraining."""
        return Task(terms=(self.short + self.long) // 2, digits=self.digits)


_SMALL: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 768}
_MEDIUM: dict[str, Any] = {"hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536}
_MICRO: dict[str, Any] = {
    "hidden": 128, "heads": 2, "kv_heads": 1, "intermediate": 256, "layers": 2, "digits": 1, "terms": (2, 3), "short": 2, "long": 2,
    "batch": 32, "max_steps": 300, "eval_every": 100, "learning_rate": 3e-3, "pool": 4000, "target": 0.2, "num_eval": 64,
}  # fmt: skip
RECIPES: dict[str, Recipe] = {
    "qwen2-s": Recipe(family="qwen2", layers=12, **_SMALL),
    "qwen2-m": Recipe(family="qwen2", layers=14, **_MEDIUM),
    "qwen3-s": Recipe(family="qwen3", layers=16, **_SMALL),
    "qwen3-m": Recipe(family="qwen3", layers=16, **_MEDIUM),
    "qwen2-micro": Recipe(family="qwen2", **_MICRO),
    "qwen3-micro": Recipe(family="qwen3", **_MICRO),
}
NAMES = (*RECIPES, SMOLLM2)


def task_of(name: str, length: str) -> Task:
    """The sums that a model is trained on; length: ``short`` or ``long``."""
    if length not in ("short", "long"):
        raise SystemExit(f"error: unknown length {length!r}\nhint: one of short, long")
    if name == SMOLLM2:
        return Task(terms=2 if length == "short" else 3, digits=1, words=True)
    recipe = recipe_of(name)
    return Task(terms=recipe.short if length == "short" else recipe.long, digits=recipe.digits)


def recipe_of(name: str) -> Recipe:
    if name not in RECIPES:
        raise SystemExit(f"error: unknown model {name!r}\nhint: one of {', '.join(NAMES)}")
    return RECIPES[name]


def ensure(name: str, cache: Path | None = None) -> Path:
    """Directory of the checkpoint; makes it on the first call."""
    if name == SMOLLM2:
        from rpadiag.workflows.smollm2 import ensure_model

        return Path(ensure_model())
    recipe = recipe_of(name)
    if cache is None:
        from rpadiag.workflows.smollm2 import cache_dir

        cache = cache_dir() / "rl"
    directory = cache / f"{name}-{recipe.digest()}"
    if not (directory / "made.json").exists():
        make(recipe, directory)
    check_checkpoint(directory)
    return directory


def check_checkpoint(directory: Path) -> None:
    """Raises SystemExit for a checkpoint whose files are missing or cut short."""
    from safetensors import SafetensorError, safe_open

    try:
        for name in ("made.json", "config.json", "tokenizer.json", "tokenizer_config.json"):
            json.loads((directory / name).read_text(encoding="utf-8"))
        with safe_open(directory / "model.safetensors", framework="np") as file:
            file.keys()
    except (OSError, ValueError, SafetensorError) as error:
        raise SystemExit(
            f"error: the checkpoint {directory} is broken: {error}\nhint: delete it, and it is made again"
        ) from None


def make(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """Pretrain, and write the checkpoint: complete or not at all. Returns what ``made.json`` says."""
    import torch

    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        model, made = pretrain(recipe)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
        model.save_pretrained(work)
        save_tokenizer(work)
        (work / "made.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
        if directory.exists():  # half a checkpoint, or another process was faster
            shutil.rmtree(directory)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def build(recipe: Recipe) -> Any:
    """A fresh model in FP32, initialised from the recipe's seed."""
    import torch
    import transformers

    config_class, model_class = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[recipe.family]
    torch.manual_seed(recipe.seed)
    return model_class(
        config_class(
            vocab_size=VOCAB_SIZE, hidden_size=recipe.hidden, intermediate_size=recipe.intermediate, num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads, head_dim=recipe.head_dim, max_position_embeddings=512,
            tie_word_embeddings=False, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID, dtype=torch.float32,
        )
    )  # fmt: skip


def pretrain(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """Next-token training on solutions; the loss counts the solution and not the numbers that it is given."""
    import torch
    import torch.utils.deterministic

    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, losses, accuracies = time.monotonic(), [], []
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its attention has no deterministic form while warn_only is set
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        model = build(recipe).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
        tokens, labels = (t.to(device) for t in text_of(recipe))
        picks = torch.Generator().manual_seed(recipe.seed)
        every, step = recipe.eval_every, 0
        for step in range(1, recipe.max_steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, step / 100)
            rows = torch.randint(len(tokens), (recipe.batch,), generator=picks).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(tokens[rows], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[rows][:, 1:].flatten(), ignore_index=-100
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0:
                losses.append([step, float(loss.detach())])
            if step % every == 0:
                accuracies.append(
                    [step, sampled_accuracy(model, recipe.middle(), seed=recipe.seed, num=recipe.num_eval)]
                )
                print(f"step {step}: loss {losses[-1][1]:.3f}, right {accuracies[-1][1]:.2f}, {time.monotonic() - start:.0f} s", file=sys.stderr)  # fmt: skip
                if accuracies[-1][1] >= recipe.target:
                    break
                every = max(1, recipe.eval_every // 4) if accuracies[-1][1] > recipe.target / 10 else recipe.eval_every
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.utils.deterministic.fill_uninitialized_memory = True
    made = {
        "recipe": dataclasses.asdict(recipe), "version": VERSION, "steps": step, "accuracy": accuracies[-1][1] if accuracies else math.nan,
        "losses": losses, "accuracies": accuracies, "seconds": time.monotonic() - start, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__, "num_parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    return model, made


def text_of(recipe: Recipe) -> tuple[Any, Any]:
    """Token ids and labels, int64 [pool, longest]: prompt, solution, end. Labels are -100 on prompts and padding."""
    import torch

    rng = random.Random(recipe.seed)
    rows: list[tuple[list[int], int]] = []
    shortest, longest = recipe.terms
    for terms in range(shortest, longest + 1):
        share = recipe.pool // (longest - shortest + 1)
        for problem in problems(Task(terms=terms, digits=recipe.digits), share, seed=-recipe.seed):
            prompt = encode(problem.prompt())
            rows.append((prompt + encode(problem.solution(rng)) + [END_ID], len(prompt)))
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), PAD_ID)
    labels = torch.full((len(rows), width), -100)
    for i, (ids, num_prompt) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        labels[i, num_prompt : len(ids)] = torch.tensor(ids[num_prompt:])
    return tokens, labels


def sampled_accuracy(model: Any, task: Task, *, seed: int, num: int) -> float:
    """Share of right answers of completions sampled at temperature 1; problems that no other part of this example uses."""
    import torch

    asked = problems(task, num, seed=1_000_000 + seed)
    device = next(model.parameters()).device
    ids = torch.tensor([encode(p.prompt()) for p in asked], device=device)
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None
    torch.manual_seed(seed)
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=task.max_completion_tokens(),
        )
    model.train()
    torch.random.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    return sum(map(_right, asked, out[:, ids.shape[1] :].tolist())) / num


def _right(problem: Problem, ids: list[int]) -> bool:
    kept = ids[: ids.index(END_ID)] if END_ID in ids else ids
    return is_right(decode(kept), problem.answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--cache", type=Path, help="directory of checkpoints (default: rpadiag's cache)")
    parser.add_argument("--list", action="store_true", help="print names and digests of the recipes")
    given = parser.parse_args()
    if not given.list and not given.names:
        parser.error("give the NAME of a checkpoint, or --list")
    if given.list:
        for name, recipe in RECIPES.items():
            print(f"{name}  {recipe.digest()}")
    for name in given.names:
        print(ensure(name, given.cache))


if __name__ == "__main__":
    main()
