"""Random checkpoints in the shape of known models, made on the device, and what each part of record_modes.py is given."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.vllm import VllmEngine

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every part is given. tokens: of the one long prompt of the overhead parts; others take a quarter, four prompts."""

    device: str
    model: Path | None
    work: Path
    layers: int | None
    tokens: int
    generate: int
    vocab: int

    @property
    def short(self) -> int:
        return max(16, self.tokens // 32)

    def checkpoint(self, shape: str) -> Path:
        """A random bf16 checkpoint of the shape, made on the device where it is not there yet; or the one given."""
        if self.model is not None and shape == "0.6b":
            return self.model
        directory = self.work / f"model-{shape}"
        if not (directory / "config.json").exists():
            make_checkpoint(directory, SHAPES[shape], self)
        return directory

    def sequences(self, shape: str, num: int, length: int) -> list[TokenSequence]:
        config = json.loads((self.checkpoint(shape) / "config.json").read_text())
        rng = np.random.default_rng(0)
        ids = rng.integers(10, config["vocab_size"], (num, length))
        return [TokenSequence(prompt=i, token_ids=tuple(map(int, row)), num_prompt_tokens=length) for i, row in enumerate(ids)]  # fmt: skip

    def engine(self, shape: str, length: int, **arguments: Any) -> VllmEngine:
        batched = arguments.pop("max_num_batched_tokens", 8192)
        return VllmEngine.start(
            self.checkpoint(shape), dtype="bfloat16", device=self.device, log_path=self.work / "vllm.log",
            max_model_len=length + 1, max_num_batched_tokens=batched, timeout_s=240, **arguments,
        )  # fmt: skip


def make_checkpoint(directory: Path, shape: dict[str, Any], setting: Setting) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small = {} if setting.layers is None else {"num_hidden_layers": setting.layers}
    if setting.device == "cpu":  # the same code on a model that a CPU runs in seconds
        small |= {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    values = {**shape, **small}
    config = Qwen3Config(
        vocab_size=setting.vocab, num_key_value_heads=min(8, values["num_attention_heads"]), head_dim=128 if not small.get("hidden_size") else 32,
        max_position_embeddings=8192, initializer_range=0.04 if values["hidden_size"] < 4096 else 0.02, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(setting.device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(dtype)
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part, max_shard_size="2GB")
    part.rename(directory)
    del model
    if setting.device != "cpu":
        torch.cuda.empty_cache()
