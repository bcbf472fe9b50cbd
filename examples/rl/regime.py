"""The knobs that all arms of a run share, from presets.toml and ``--set``."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).with_name("presets.toml")

# What a value may be: at least, or above, a number; or one of some words.
AT_LEAST = {
    "learning_rate": 0.0, "num_prompts": 1, "group_size": 2, "num_minibatches": 1, "num_iterations": 1, "rounds": 1, "epsilon": 0.0,
    "max_grad_norm": 0.0, "adam_beta1": 0.0, "adam_beta2": 0.0, "parts_every": 1, "parts_replicates": 2, "parts_sequences": 2, "checkpoint_every": 1,
}  # fmt: skip
ABOVE_ZERO = ("temperature", "adam_eps", "truncate_at")
BELOW_ONE = ("adam_beta1", "adam_beta2")
WORDS = {
    "length": ("short", "long"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
    "scale_rewards": ("group", "batch", "none"),
}


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
            raise SystemExit(
                f"error: --set {text}: {name} is of type {kind}\nhint: give {'a whole number' if kind == 'int' else 'a number'}"
            ) from None
    for name, value in values.items():
        _check_value(name, value)
    regime = Regime(**values)
    if regime.num_rows % regime.num_minibatches:
        raise SystemExit(
            f"error: {regime.num_rows} completions (num_prompts times group_size) do not divide into {regime.num_minibatches} minibatches\n"
            f"hint: --set num_minibatches to a divisor of {regime.num_rows}"
        )
    return regime


def _check_value(name: str, value: Any) -> None:
    """Raises SystemExit for a value that no training can have."""
    if name in WORDS:
        if value not in WORDS[name]:
            raise SystemExit(f"error: {name} cannot be {value!r}\nhint: one of {', '.join(WORDS[name])}")
        return
    if not math.isfinite(value):
        raise SystemExit(f"error: {name} cannot be {value}\nhint: give a finite number")
    if name in ABOVE_ZERO and value <= 0:
        raise SystemExit(f"error: {name} cannot be {value}\nhint: give a number above 0")
    if value < AT_LEAST.get(name, value):
        raise SystemExit(f"error: {name} cannot be {value}\nhint: give at least {AT_LEAST[name]}")
    if name in BELOW_ONE and value >= 1:
        raise SystemExit(f"error: {name} cannot be {value}\nhint: give a number below 1")
