"""prime-rl: its own trainer with an aligned model. Start it with the arguments of ``prime_rl.trainer.rl.train``:

    RPADIAG_CONTRACT=vllm-compiled uv run torchrun --nproc-per-node 8 train_aligned.py @ trainer.toml

``trainer.toml`` needs ``impl = "hf"`` under ``[model]``: prime-rl's custom implementations are modules of its own, which no contract describes yet. Every model that
prime-rl makes is aligned before activation checkpointing, compilation and FSDP wrap it; it is on the meta device then, and weights come later.
"""

from __future__ import annotations

import os
from typing import Any

import prime_rl.trainer.model as models
from prime_rl.trainer.rl.train import main

import rpadiag

REGIONS = [r for r in os.environ.get("RPADIAG_ALIGN", "").split(",") if r] or None
CONTRACT = os.environ.get("RPADIAG_CONTRACT", "fp32-output")

_get_model = models.get_model


def get_aligned_model(*args: Any, **kwargs: Any) -> Any:
    """prime-rl's model, aligned in place."""
    model = _get_model(*args, **kwargs)
    rpadiag.align(model, regions=REGIONS, contract=CONTRACT)
    return model


if __name__ == "__main__":
    models.get_model = get_aligned_model  # setup_model looks it up in its module
    main()
