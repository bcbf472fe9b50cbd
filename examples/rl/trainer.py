"""TRL's GRPOTrainer with three hooks: rounds are seeded and measured, the importance ratio is 1 but in one arm, masters are FP32.

Read in TRL 1.16.0, trl/trainer/grpo_trainer.py: `_generate_and_score_completions` syncs the weights, samples, scores with the policy and returns
the batch, with the ratio of policy to vLLM under ``importance_sampling_ratio``, by which `_compute_loss` multiplies. The objective is otherwise TRL's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Arm
from masters import MasterAdamW, scaled
from parts import mismatch_parts, sequence_labels, weights_equal
from regime import Regime
from table import write_table
from transformers import TrainerCallback
from trl import GRPOTrainer

from rpadiag.compare.metrics import logprob_metrics

FIRST_LOSS_SCALE = 2.0**12
METRICS = {
    "mean_abs_d": "mean_abs_d", "max_abs_d": "max_abs_d", "kl": "kl", "k3_kl": "k3_kl", "chi2_token": "chi2_token", "chi2_seq": "chi2_seq",
    "rollout_is_eff_sample_size": "ess", "rollout_is_min": "ratio_min", "rollout_is_max": "ratio_max",
    "outside_ratio_share": "outside_ratio_share", "num_nonfinite": "num_nonfinite", "num_tokens": "num_tokens",
}  # fmt: skip


def seed_of(seed: int, number: int) -> int:
    """Seed of everything random in one round: sampled row i uses this plus i, so rounds are far apart."""
    return (seed * 1_000_003 + number) * 65_536 % 2**62


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Backward passes that add in one order, so that a resumed run has the bits of one that was not interrupted.

    Strict: with ``warn_only`` PyTorch's flash and memory-efficient attention warn, and add in any order.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.use_deterministic_algorithms(on)
        torch.backends.cuda.enable_cudnn_sdp(
            cudnn and not on
        )  # off inside as well, so that one attention scores and trains
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


class RlTrainer(GRPOTrainer):
    """arm, regime, seed: what this run is. keys: the first columns of its rows. rows: one a finished round."""

    def __init__(self, *args: Any, arm: Arm, regime: Regime, seed: int, keys: dict[str, Any], **kwargs: Any) -> None:
        self.arm, self.regime, self.seed, self.keys = arm, regime, seed, keys
        self.rows: list[dict[str, Any]] = []
        self._row: dict[str, Any] = {}
        self._updates: list[dict[str, float]] = []
        self._measured_s = self._synced_s = self._began = 0.0
        super().__init__(*args, **kwargs)
        self.add_callback(_Rounds(self))
        self._time_syncs()

    # -- what TRL and transformers call ---------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            r = self.regime
            self.optimizer = MasterAdamW(
                [p for p in self.model.parameters() if p.requires_grad], lr=r.learning_rate, betas=(r.adam_beta1, r.adam_beta2), eps=r.adam_eps,
                max_grad_norm=r.max_grad_norm, stored=getattr(torch, self.arm.engine_dtype),
                loss_scale=FIRST_LOSS_SCALE if self.arm.trainer_dtype == "float16" else None,
            )  # fmt: skip
        return self.optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return scaled(super().compute_loss(*args, **kwargs), self.masters.scale)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with deterministic(True):
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        with deterministic(False):  # vLLM is in this process, and its operators need not have such a form
            self._begin_round()
            output = super()._generate_and_score_completions(inputs)
            if not self.arm.truncated:
                output["importance_sampling_ratio"] = torch.ones_like(output["importance_sampling_ratio"])
            self._measure(output)
        return output

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint on the way needs none."""

    # -- rounds ---------------------------------------------------------------------------------------

    @property
    def masters(self) -> MasterAdamW:
        optimizer = self.optimizer
        found = getattr(optimizer, "optimizer", optimizer)
        assert isinstance(found, MasterAdamW)
        return found

    @property
    def round(self) -> int:
        return int(self.state.global_step) // self.regime.updates

    @property
    def is_due(self) -> bool:
        """Whether this round gets the costly measurements."""
        return self.round % self.regime.parts_every == 0

    def _begin_round(self) -> None:
        seed = seed_of(self.seed, self.round)
        torch.manual_seed(seed)
        llm = self.vllm_generation.llm
        llm.call_seed, llm.seconds = seed, 0.0
        self._measured_s = self._synced_s = 0.0
        self._updates = []
        self.masters.take_norms()
        self._began = time.perf_counter()

    def _measure(self, batch: dict[str, Any]) -> None:
        """What is known before the round's first update."""
        generated_s = self.vllm_generation.llm.seconds
        start = self._clock()
        mask = batch["completion_mask"].bool()
        p, q = (
            batch[name][mask].double().cpu().numpy() for name in ("old_per_token_logps", "sampling_per_token_logps")
        )
        metrics = logprob_metrics(p, q, sequence_ids=np.asarray(sequence_labels(mask)))
        self._row = {
            **self.keys,
            "round": self.round,
            "updates": int(self.state.global_step),
            **{column: metrics[name] for name, column in METRICS.items()},
            "seconds_generate": generated_s,
        }
        if self.is_due:
            r = self.regime
            self._row |= {"weights_equal": weights_equal(self)} | mismatch_parts(
                self, batch, num_replicates=r.parts_replicates, num_sequences=r.parts_sequences, seed=seed_of(self.seed, self.round)
            )  # fmt: skip
        self._measured_s += self._clock() - start

    def end_update(self, logs: dict[str, float]) -> None:
        """After each update, with what TRL logs of it; the last one ends the round."""
        self._updates.append(logs)
        if len(self._updates) < self.regime.updates:
            return
        total = self._clock() - self._began
        norms = [n for n in self.masters.take_norms() if math.isfinite(n)]
        first, every = self._updates[0], self._updates
        row = self._row | {
            "reward": first.get("reward"),
            "reward_std": first.get("reward_std"),
            "zero_std_share": first.get("frac_reward_zero_std"),
            "completion_length": first.get("completions/mean_length"),
            "truncated_share": first.get("completions/clipped_ratio"),
            "entropy": _mean([u.get("entropy") for u in every]),
            "loss": _mean([u.get("loss") for u in every]),
            "clip_share": _mean([u.get("clip_ratio/region_mean") for u in every]),
            "grad_norm": _mean(norms),
            "grad_norm_max": max(norms, default=None),
            "skipped_updates": self.masters.skipped,
            "loss_scale": self.masters.scale,
            "seconds_sync": self._synced_s,
            "seconds_measure": self._measured_s,
        }
        row["seconds_train"] = total - row["seconds_generate"] - self._synced_s - self._measured_s
        self.rows.append(row)

    def add_measuring(self, seconds: float) -> None:
        self._measured_s += seconds

    def _time_syncs(self) -> None:
        sync = self.vllm_generation.sync_weights

        def timed() -> None:
            start = self._clock()
            sync()
            self._synced_s += self._clock() - start

        self.vllm_generation.sync_weights = timed

    def _clock(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class _Rounds(TrainerCallback):
    def __init__(self, trainer: RlTrainer) -> None:
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.trainer.end_update(dict(logs))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_table(folder / "steps.parquet", self.trainer.rows, {})


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known and all(map(math.isfinite, known)) else (math.nan if known else None)
