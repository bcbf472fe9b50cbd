"""Short GRPO trainings with the installed TRL and rpadiag's callback, in a process of their own: ``train_with_trl.py MODEL OUT MODE ...``.

vLLM in the same process sets variables of distributed training, which a test session should not keep: it comes last. MODE: ``transformers`` (TRL generates with
transformers), ``rollout_func`` (the user's own generation, with its log-probabilities), ``vllm`` (colocated, TRL's own arguments). Writes OUT/MODE/result.json, and what a
training says on stderr into OUT/MODE/stderr.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}  # fmt: skip

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rpadiag.trainers.trl import MismatchCallback, rows_of

PROMPTS = ("The quick brown fox", "A model is trained", "Rounding to sixteen bits", "What is the capital")
NUM_TOKENS, GROUP, STEPS = 16, 4, 3


def num_kinds(completions: list[str], **_: Any) -> list[float]:
    """Reward: how many different characters a completion has."""
    return [float(len(set(c))) for c in completions]


def sampled_by_transformers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """What TRL calls a rollout_func: one sequence at a time, with the log-probabilities that it was sampled with."""
    tokenizer, model = trainer.processing_class, trainer.model
    out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    model.eval()  # generating in training mode with gradient checkpointing goes without the cache, and other logits come of it
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=NUM_TOKENS, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        completion = made.sequences[0, ids.shape[1] :]
        logprobs = torch.log_softmax(torch.stack(made.logits)[:, 0].float(), -1)
        out["prompt_ids"].append(ids[0].tolist())
        out["completion_ids"].append(completion.tolist())
        out["logprobs"].append(logprobs.gather(-1, completion[:, None])[:, 0].tolist())
    model.train()
    return out


def train(mode: str, model: str, out: Path, **how: Any) -> dict[str, Any]:
    """Train for STEPS steps; ``how`` goes to the callback."""
    args = GRPOConfig(
        output_dir=str(out / "checkpoints"), max_steps=STEPS, per_device_train_batch_size=GROUP, num_generations=GROUP, max_completion_length=NUM_TOKENS,
        steps_per_generation=2 if mode == "rollout_func" else 1,  # then TRL keeps the policy's log-probabilities without vLLM too
        use_cpu=True, bf16=True, learning_rate=1e-4, logging_steps=1, report_to=[], save_strategy="no", seed=1, model_init_kwargs={"dtype": "bfloat16"},
        use_vllm=mode == "vllm", vllm_mode="colocate", vllm_gpu_memory_utilization=0.1, vllm_max_model_length=64,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": p} for p in PROMPTS * 4])
    own = {"rollout_func": sampled_by_transformers} if mode == "rollout_func" else {}
    trainer = GRPOTrainer(model=model, reward_funcs=num_kinds, args=args, train_dataset=data, **own)
    callback = MismatchCallback(trainer, runs=out / "runs", **how)
    trainer.add_callback(callback)
    trainer.train()
    rows = [row for part in trainer._buffered_inputs for row in rows_of(part)]
    aligned = [a.to_dict() for a in callback.alignments]
    callback.undo()
    return {
        "log": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "rows": rows,
        "aligned": aligned,
        "still_aligned": [n for n, m in trainer.model.named_modules() if hasattr(m.forward, "_rpadiag_aligned")],
        "gates": [[g.status, g.text] for g in callback.gate_results],
    }


def main(model: str, out: Path, mode: str) -> None:
    how = {
        "transformers": {"align": ("rope", "swiglu")},
        "rollout_func": {"gates": ["k3_kl<=-1"], "stop": True},  # a gate that nothing passes
        "vllm": {"every": 2, "align": "all", "contract": "vllm-cpu", "gates": ["k3_kl<=1e-2", "faults==0"]},
    }[mode]
    out.mkdir(parents=True)
    before = os.dup(2)
    with (out / "stderr").open("wb") as said:
        os.dup2(said.fileno(), 2)
        try:
            result = train(mode, model, out, **how)
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    for asked in sys.argv[3:]:
        main(sys.argv[1], Path(sys.argv[2]) / asked, asked)
