"""Small models of every family, and the bits of one training step: for the tests of align beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpadiag.regions.align_families import FAMILIES

VOCAB, LAYERS = 500, 3
IDS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
# One contract for each way a sum reaches its norm: rounded; rounded with a fused gradient; unrounded; truncated.
WAYS = ("hf-eager", "vllm-eager", "fp32-output", "vllm-cpu-ops-avx2")
Result = tuple[Tensor, dict[str, Tensor]]


def make_model(family: str = "llama", *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any) -> Any:
    """A model of three layers with norm weights that are no powers of two, in training mode."""
    import transformers

    prefix = next(f.prefix for f in FAMILIES if f.name == family)
    config_class = getattr(transformers, f"{prefix}TextConfig" if family == "gemma3" else f"{prefix}Config")
    torch.manual_seed(seed)
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
    }
    model = transformers.AutoModelForCausalLM.from_config(config_class(**values | config), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def adapted(family: str, model: Any = None) -> Any:
    """A model with LoRA adapters, the same whenever it is made: ``model``, or a new one of the family. Skips the test without peft."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = make_model(family) if model is None else model
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def step(model: nn.Module, forward: Callable[..., Any] | None = None, ids: Tensor = IDS) -> Result:
    """Logits and every gradient of one training step, through ``forward`` if given."""
    model.zero_grad()
    out = (model if forward is None else forward)(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(a: Result, b: Result) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    assert [n for n in a[1] if not torch.equal(a[1][n], b[1][n])] == []


def differs(a: Result, b: Result) -> bool:
    return not torch.equal(a[0], b[0])
