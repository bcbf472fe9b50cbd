"""Rollouts of a toy language model with a fault planted in them, as records of each trainer's schema.

The model draws logits for every position: a vocabulary of 400, sharp at some positions and flat at others, as a language model is. The
rollout's log-probabilities come from these, the trainer's from the same logits with noise of the size that rounding has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 400
ROUNDING = 0.05  # nats on each logit


@dataclass(kw_only=True)
class Recorded:
    """prompts and responses as lists of token ids; p and q of the response tokens; extra columns by name."""

    prompts: list[list[int]]
    responses: list[list[int]]
    p: list[np.ndarray]
    q: list[np.ndarray]
    extra: dict[str, list[Any]] = field(default_factory=dict)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def top_p(logits: np.ndarray, mass: float) -> np.ndarray:
    """Logits with everything outside the smallest set of that mass removed."""
    probs = np.exp(log_softmax(logits))
    order = np.argsort(-probs, -1)
    ranked = np.take_along_axis(probs, order, -1)
    keep = np.zeros(probs.shape, bool)
    np.put_along_axis(keep, order, ranked.cumsum(-1) - ranked < mass, -1)
    return np.where(keep, logits, -np.inf)


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    return np.where(logits >= np.partition(logits, -k, -1)[..., [-k]], logits, -np.inf)


def record(
    *,
    num_sequences: int = 24,
    num_tokens: int = 100,
    seed: int = 0,
    t_trainer: float = 1.0,
    t_rollout: float = 1.0,
    t_sampling: float | None = None,
    keep: Any = None,
    noise: float = ROUNDING,
    drift: float = 0.0,
    same_prompt: int = 1,
) -> Recorded:
    """keep: what sampling and the rollout's log-probabilities are truncated by. drift: how far the trainer's weights moved, in nats of a
    logit for a typical sequence. same_prompt: sequences in a row that share a prompt.
    """
    rng = np.random.default_rng(seed)
    out = Recorded(prompts=[], responses=[], p=[], q=[])
    for i in range(num_sequences):
        if i % same_prompt == 0:
            prompt = rng.integers(5, VOCAB, rng.integers(4, 12)).tolist()
        n = int(rng.integers(num_tokens // 2, num_tokens + 1))
        sharp = rng.choice([1.0, 2.0, 4.0, 7.0, 10.0], (n, 1), p=[0.1, 0.2, 0.3, 0.2, 0.2])
        logits = sharp * rng.gumbel(size=(n, VOCAB)) * 0.7
        moved = logits + rng.normal(0, noise, logits.shape)
        if drift:  # what a sequence was rewarded or punished for moves all its tokens one way
            sampled = rng.normal(0, drift)
        kept = logits if keep is None else keep(logits)
        sampling = log_softmax(kept / (t_rollout if t_sampling is None else t_sampling))
        tokens = (sampling + rng.gumbel(size=sampling.shape)).argmax(-1)
        if drift:
            moved[np.arange(n), tokens] += sampled
        out.prompts.append(list(prompt))
        out.responses.append(tokens.tolist())
        out.p.append(log_softmax(moved / t_trainer)[np.arange(n), tokens].astype(np.float32))
        out.q.append(log_softmax(kept / t_rollout)[np.arange(n), tokens].astype(np.float32))
    return out


def floats(x: np.ndarray) -> list[float]:
    return [float(v) for v in x]


def rows(recorded: Recorded, schema: str) -> list[dict[str, Any]]:
    """Records as the trainer of that name would write them, its own extra columns included."""
    made = globals()[f"_{schema.replace('-', '_')}"]
    out = [made(recorded, i) for i in range(len(recorded.prompts))]
    for i, row in enumerate(out):
        row.update({name: values[i] for name, values in recorded.extra.items()})
    return out


def _prime_rl(r: Recorded, i: int) -> dict[str, Any]:
    m, n = len(r.prompts[i]), len(r.responses[i])
    uniform = float(np.log(1 / VOCAB))
    return {
        "schema_version": 1, "step": 3, "rank": 0, "micro_step": 0, "export_sequence_idx": i, "env_name": "math",
        "token_ids": r.prompts[i] + r.responses[i], "position_ids": list(range(m + n)), "loss_mask": [False] * m + [True] * n,
        "inference_logprobs": [0.0] * m + floats(r.q[i]), "trainer_logprobs": [uniform] * m + floats(r.p[i]), "entropy": [None] * (m + n),
    }  # fmt: skip


def _nemo_rl(r: Recorded, i: int) -> dict[str, Any]:
    m, n = len(r.prompts[i]), len(r.responses[i])
    pad = 7
    return {
        "content": ["text"], "rewards": [1.0], "input_lengths": [m + n], "token_ids": [r.prompts[i] + r.responses[i] + [0] * pad],
        "token_loss_mask": [[0] * m + [1] * n + [0] * pad], "sample_loss_mask": [1.0],
        "generation_logprobs": [[0.0] * m + floats(r.q[i]) + [0.0] * pad], "prev_logprobs": [[0.0] * m + floats(r.p[i]) + [0.0] * pad], "idx": i,
    }  # fmt: skip


def _verl(r: Recorded, i: int) -> dict[str, Any]:
    m, n, left, right = len(r.prompts[i]), len(r.responses[i]), 16 - len(r.prompts[i]), 5
    return {
        "uid": f"u{i}", "prompts": [0] * left + r.prompts[i], "responses": r.responses[i] + [0] * right,
        "attention_mask": [0] * left + [1] * (m + n) + [0] * right, "response_mask": [1] * n + [0] * right,
        "position_ids": [0] * left + list(range(m + n)) + [m + n - 1] * right,
        "rollout_log_probs": floats(r.q[i]) + [0.0] * right, "old_log_probs": floats(r.p[i]) + [0.0] * right,
    }  # fmt: skip


def _trl(r: Recorded, i: int) -> dict[str, Any]:
    m, n, left, right = len(r.prompts[i]), len(r.responses[i]), 16 - len(r.prompts[i]), 5
    return {
        "prompt_ids": [0] * left + r.prompts[i], "prompt_mask": [0] * left + [1] * m, "completion_ids": r.responses[i] + [0] * right,
        "completion_mask": [1] * n + [0] * right, "tool_mask": [1] * (n + right), "advantages": 0.5,
        "old_per_token_logps": floats(r.p[i]) + [-9.0] * right, "sampling_per_token_logps": floats(r.q[i]) + [0.0] * right,
    }  # fmt: skip


def _skyrl(r: Recorded, i: int) -> dict[str, Any]:
    m, n, left, width = len(r.prompts[i]), len(r.responses[i]), 4, 5
    return {
        "sequences": [0] * left + r.prompts[i] + r.responses[i], "attention_mask": [0] * left + [1] * (m + n),
        "loss_mask": [0.0] * width + [1.0] * n, "response_mask": [0] * width + [1] * n,
        "rollout_logprobs": [0.0] * width + floats(r.q[i]), "action_log_probs": [-3.0] * width + floats(r.p[i]),
    }  # fmt: skip


def _openrlhf(r: Recorded, i: int) -> dict[str, Any]:
    m, n, right = len(r.prompts[i]), len(r.responses[i]), 3
    return {
        "sequences": r.prompts[i] + r.responses[i] + [0] * right, "attention_mask": [1] * (m + n) + [0] * right,
        "action_mask": [False] * (m - 1) + [True] * n + [False] * right,
        "action_log_probs": [-2.0] * (m - 1) + floats(r.p[i]) + [-5.0] * right, "rollout_log_probs": [0.0] * (m - 1) + floats(r.q[i]) + [0.0] * right,
    }  # fmt: skip


def _slime(r: Recorded, i: int) -> dict[str, Any]:
    n = len(r.responses[i])
    return {
        "index": i, "tokens": r.prompts[i] + r.responses[i], "response": "text", "response_length": n, "loss_mask": [1] * n, "status": "completed",
        "rollout_log_probs": floats(r.q[i]), "log_probs": floats(r.p[i]),
    }  # fmt: skip


def _rpadiag(r: Recorded, i: int) -> dict[str, Any]:
    return {
        "token_ids": r.prompts[i] + r.responses[i], "trainer_logprobs": floats(r.p[i]), "rollout_logprobs": floats(r.q[i]),
    }  # fmt: skip


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """The records as JSON Lines or Parquet, by the name's ending."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path
