"""Tiny random-weight checkpoints of every family, with a real tokenizer, for both stacks.

Two layers (Qwen3-MoE: three, the one in the middle dense), hidden size 128, BF16 safetensors. The initialiser range is
ten times the usual one, because the flat logits of a fresh model hide divergence, and norm weights are no powers of two,
because those hide where a norm rounds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 2, 32
VOCAB = 512
PROMPTS = "The quick brown fox jumps over [the] lazy dog.\nRounding once at the end is [not/the] same.\n1 + 1 = 2\n"
EMULATED = (
    "--engine",
    "emulated",
    "--emulate",
    "vllm-compiled",
)  # what rpadiag capture is given for a rollout without vLLM
GEMMA = {"head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "pad_token_id": 0}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "gemma2", "gemma3")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the rain falls on the hills.",
    "A model is trained on the tokens that another engine has sampled from the same weights.",
    "Rounding to sixteen bits after every step is not the same as rounding once at the end.",
    "import numpy as np\n\ndef mean(values):\n    return sum(values) / len(values)\n",
    "What is the capital of France? The capital of France is Paris, a city on the river Seine.",
    "1 + 1 = 2, 2 + 2 = 4, 12 * 12 = 144 and 100 / 8 = 12.5",
)


def make_checkpoint(
    directory: Path, family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> Path:
    """Write a checkpoint of ``family`` to ``directory``; ``config`` overrides configuration values."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": HEAD_DIM}),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 64}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            transformers.Qwen3MoeForCausalLM,
            {
                "head_dim": HEAD_DIM,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
                "num_hidden_layers": 3,
            },
        ),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {**GEMMA, "sliding_window": 16}),
        "gemma3": (
            transformers.Gemma3TextConfig,
            transformers.Gemma3ForCausalLM,
            {
                **GEMMA,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                },
            },
        ),
    }
    config_class, model_class, extra = classes[family]
    values = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": family in ("qwen2", "gemma2", "gemma3"),
        "bos_token_id": 0,
        "eos_token_id": 0,
        **extra,
        **config,
    }
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(config_class(**values)).to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "layernorm.weight")):
                    offset = 1.0 if family.startswith("gemma") else 0.0  # Gemma's norms multiply by 1 + weight
                    parameter.copy_(0.6 - offset + 0.9 * torch.rand_like(parameter))
                elif name.endswith("bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(directory)
    finally:
        torch.random.set_rng_state(state)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB entries with a chat template; the same on every machine."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[0], pad_token=SPECIAL[0]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def planted_copy(
    source: Path,
    directory: Path,
    *,
    tensors: Callable[[dict[str, torch.Tensor]], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a single-file checkpoint with tensors edited in place or configuration values replaced."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory)
    if tensors is not None:
        path = directory / "model.safetensors"
        loaded = load_file(path)
        tensors(loaded)
        save_file(loaded, path, metadata={"format": "pt"})
    if config is not None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}, indent=1))
    return directory


def token_ids(length: int, *, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random ordinary token ids (no special ones)."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(len(SPECIAL), vocab, (length,), generator=generator).tolist()
    return ids
