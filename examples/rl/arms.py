"""The arms of the experiment, as data: how the trainer rounds, and what else differs from the BF16 baseline.

Everything that is not a field here is equal in all arms of a seed: data order, sampling seeds, learning rate, objective, optimizer with
FP32 masters, clipping. Weights have the same bits in both stacks in every arm: masters rounded to ``engine_dtype``.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "engine"  # the contract that the rollout engine itself was found to follow, see contract_of

# What vLLM follows, by device and mode; each was told by `rpadiag fingerprint` (docs/gpu-results.md), but for the parts named there.
ENGINE_CONTRACTS = {
    ("cpu", "eager"): "vllm-cpu",
    ("cpu", "compiled"): "vllm-cpu-compiled",
    ("cuda", "eager"): "vllm-eager",
    ("cuda", "compiled"): "vllm-compiled",
}
ALL = ("rope", "swiglu", "rmsnorm", "qk_norm")  # qk_norm is left out where the model has none


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm. trainer_dtype: of the trainer's weights and forward. engine_dtype: of vLLM's, and what masters are rounded to.

    regions: aligned in the trainer. contract: what they follow. truncated: importance ratios, truncated, multiply the loss.
    """

    text: str
    trainer_dtype: str = "bfloat16"
    engine_dtype: str = "bfloat16"
    regions: tuple[str, ...] = ()
    contract: str = "fp32-output"
    truncated: bool = False
    kv_cache_dtype: str = "auto"  # of vLLM's cache; auto is engine_dtype


ARMS: dict[str, Arm] = {
    "bf16": Arm(text="BF16 as transformers rounds"),
    "rope": Arm(text="RoPE aligned to fp32-output", regions=("rope",)),
    "fp32-output": Arm(text="RoPE, SwiGLU and RMSNorm aligned to fp32-output", regions=ALL),
    "engine": Arm(text="RoPE, SwiGLU and RMSNorm aligned to the engine's own contract", regions=ALL, contract=ENGINE),
    "fp32": Arm(text="trainer computes in FP32 on the same BF16 weights", trainer_dtype="float32"),
    "fp16": Arm(text="FP16 in both stacks, with loss scaling", trainer_dtype="float16", engine_dtype="float16"),
    "tis": Arm(text="BF16 with truncated importance sampling", truncated=True),
}
# Not of the experiment. Without rounding only mistakes are left, such as weights that were not synced (vLLM's FP32 attention is for CPUs); and
# a mismatch far larger than rounding's shows whether this training minds one at all (FP8 caches are for GPUs).
CONTROLS: dict[str, Arm] = {
    "fp8-cache": Arm(text="as bf16, with an FP8 KV cache in vLLM", kv_cache_dtype="fp8"),
    "fp32-both": Arm(text="FP32 in both stacks", trainer_dtype="float32", engine_dtype="float32"),
}
BASELINE = "bf16"


def arm_of(name: str) -> Arm:
    known = ARMS | CONTROLS
    if name not in known:
        raise SystemExit(f"error: unknown arm {name!r}\nhint: one of {', '.join(known)}")
    return known[name]


def contract_for(name: str, given: str | None) -> str | None:
    """``given`` for an arm that follows the engine, None for the others, whose runs are the same without it."""
    return given if arm_of(name).contract == ENGINE else None


def contract_of(arm: Arm, *, device: str, mode: str, given: str | None = None) -> str:
    """Preset or JSON file that the arm's regions follow. given: a file of ``rpadiag fingerprint`` for the engine's own."""
    if arm.contract != ENGINE:
        return arm.contract
    if given is not None:
        return given
    if (device, mode) not in ENGINE_CONTRACTS:
        raise SystemExit(f"error: no contract is known for vLLM {mode} on {device}\nhint: give --contract FILE")
    return ENGINE_CONTRACTS[device, mode]
