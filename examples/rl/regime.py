"""The knobs that all arms of a run share, from presets.toml and ``--set``."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).with_name("presets.toml")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A round: num_prompts * group_size completions, then num_minibatches * num_iterations updates."""

    learning_rate: float
    num_prompts: int
    group_size: int
    num_minibatches: int
    num_iterations: int
    length: str  # of the task: short or long
    rounds: int
    temperature: float = 1.0
    epsilon: float = 0.2  # PPO's clip of the trainer's own ratio
    max_grad_norm: float = 1.0  # 0: no clipping
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    loss_type: str = "grpo"
    scale_rewards: str = "group"
    truncate_at: float = 2.0  # of the arm with truncated importance sampling
    parts_every: int = 10  # rounds between measurements of the systematic and chaotic parts, runs and weight digests
    parts_replicates: int = 4
    parts_sequences: int = 32
    checkpoint_every: int = 50  # rounds

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def updates(self) -> int:
        """Optimizer steps of one round."""
        return self.num_minibatches * self.num_iterations


def regime_of(preset: str, overrides: Sequence[str] = ()) -> Regime:
    """A preset with ``name=value`` overrides."""
    with PRESETS.open("rb") as file:
        presets = tomllib.load(file)
    if preset not in presets:
        raise SystemExit(f"error: unknown preset {preset!r}\nhint: one of {', '.join(presets)}")
    values: dict[str, Any] = dict(presets[preset])
    known = {f.name: f for f in dataclasses.fields(Regime)}
    for text in overrides:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise SystemExit(f"error: --set {text} sets nothing\nhint: NAME=VALUE with one of {', '.join(known)}")
        kind = str(known[name].type)
        try:
            values[name] = {"int": int, "float": float, "str": str}[kind](value)
        except ValueError:
            raise SystemExit(f"error: --set {text}: {name} is of type {kind}\nhint: give such a value") from None
    regime = Regime(**values)
    if regime.num_rows % regime.num_minibatches:
        raise SystemExit(
            f"error: {regime.num_rows} completions do not divide into {regime.num_minibatches} minibatches"
        )
    return regime
