"""verl: align the trainer's model. Name this module in ``actor_rollout_ref.model.external_lib``.

verl imports that module in every worker, before the engine builds the model. The model is aligned as soon as transformers has made it,
before FSDP shards it; the rollout engine is left alone. ``RPADIAG_ALIGN`` names the regions (default: all that the model has), ``RPADIAG_CONTRACT`` a preset
or the file of ``rpadiag fingerprint`` (default: ``fp32-output``).

verl 0.9.1 casts the whole module with ``module.to(dtype)``, the rotary frequencies with it: under ``model_dtype=bf16`` the angles are then those of another model than
vLLM runs, which is no matter of rounding positions. They are put back to FP32 here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import rpadiag

REGIONS = [r for r in os.environ.get("RPADIAG_ALIGN", "").split(",") if r] or None
CONTRACT = os.environ.get("RPADIAG_CONTRACT", "fp32-output")

_build_module = FSDPEngine._build_module


def build_aligned_module(engine: FSDPEngine) -> Any:
    """What verl builds, aligned; a value model is left as it is, since nothing is sampled from it."""
    module = _build_module(engine)
    if engine.model_config.model_type == "language_model":
        restore_frequencies(module)
        rpadiag.align(module, regions=REGIONS, contract=CONTRACT)
    return module


def restore_frequencies(module: torch.nn.Module) -> None:
    """Rotary frequencies in FP32 again, as transformers makes them and vLLM has them."""
    for rotary in module.modules():
        frequencies = getattr(rotary, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor) and frequencies.dtype != torch.float32:
            rotary.inv_freq = type(rotary)(rotary.config).inv_freq.to(frequencies.device)


FSDPEngine._build_module = build_aligned_module
