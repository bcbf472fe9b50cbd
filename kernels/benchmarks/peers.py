"""The implementations that are timed: one signature per region, each loaded on demand.

rmsnorm: (x, residual, weight) -> (y, new residual); swiglu: (gate, up) -> out; rope: (q, k, cos, sin) -> (q, k) with
q, k [1, H, T, D] and tables [1, T, D] as transformers passes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6
FP32_OUTPUT = {
    "rmsnorm": {"sum": "fp32", "variance": "unrounded", "scale": "fp32", "dn": "fp32", "dw": "fp32", "dsum": "fp32"},
    "swiglu": {"silu": "fp32", "dact": "fp32", "grad_silu": "fp32"},
    "rope": {"products": "fp32", "grad_products": "fp32"},
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``load`` imports and returns the function; ImportError, AttributeError or OSError mean it is not installed."""

    name: str
    load: Callable[[], Callable[..., Any]]
    has_backward: bool = True


def _ours(region: str, axes: dict[str, str]) -> Callable[..., Any]:
    import rpadiag_kernels

    if region == "rmsnorm":
        return lambda x, r, w: rpadiag_kernels.rmsnorm(x, w, eps=EPS, residual=r, **axes)
    if region == "swiglu":
        return lambda gate, up: rpadiag_kernels.swiglu(gate, up, **axes)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        half = q.shape[-1] // 2
        return rpadiag_kernels.rope(q, cos[:, None, :, :half], sin[:, None, :, :half], k=k, **axes)

    return rope


def _eager(region: str) -> Callable[..., Any]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    if region == "swiglu":
        return lambda gate, up: torch.nn.functional.silu(gate) * up
    if region == "rope":
        return lambda q, k, cos, sin: apply_rotary_pos_emb(q, k, cos, sin)

    norm = LlamaRMSNorm(1, eps=EPS)
    del norm.weight

    def rmsnorm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        norm.weight = w  # a plain attribute, so that the benchmark's own tensor receives the gradient
        s = x + r
        return norm(s), s

    return rmsnorm


def _compiled(region: str) -> Callable[..., Any]:
    """transformers' operations, compiled; the norm is written out, as its module would be inlined."""
    if region != "rmsnorm":
        return torch.compile(_eager(region), fullgraph=True, dynamic=False)

    def rmsnorm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        wide = s.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return w * (wide * torch.rsqrt(variance + EPS)).to(s.dtype), s

    return torch.compile(rmsnorm, fullgraph=True, dynamic=False)


def _liger(region: str) -> Callable[..., Any]:
    if region == "rmsnorm":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)
    if region == "swiglu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return lambda q, k, cos, sin: liger_rotary_pos_emb(q, k, cos, sin)


def _vllm(region: str) -> Callable[..., Any]:
    """vLLM's CUDA operators, from its shared library alone (RPADIAG_VLLM_C names the file) or an installed vLLM."""
    import os

    if library := os.environ.get("RPADIAG_VLLM_C"):
        torch.ops.load_library(library)
    else:
        import vllm._custom_ops  # noqa: F401
    ops = torch.ops._C
    if region == "rmsnorm":
        op = ops.fused_add_rms_norm
        return lambda x, r, w: op(x, r, w, EPS)
    if region == "swiglu":
        op = ops.silu_and_mul
        buffers: dict[str, Any] = {}

        def swiglu(gate: Tensor, up: Tensor) -> Tensor:
            if buffers.get("of") != gate.data_ptr():  # vLLM reads gate and up side by side
                buffers.update(of=gate.data_ptr(), both=torch.cat((gate, up), dim=-1), out=torch.empty_like(gate))
            op(buffers["out"], buffers["both"])
            return buffers["out"]

        return swiglu
    op = ops.rotary_embedding
    held: dict[str, Tensor] = {}

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, half = q.shape[2], q.shape[3] // 2
        if not held:
            held["positions"] = torch.arange(tokens, device=q.device)
            held["cache"] = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous()
        q2, k2 = (t.transpose(1, 2).view(tokens, -1) for t in (q, k))
        op(held["positions"], q2, k2, q.shape[3], held["cache"], True)
        return q

    return rope


def _quack(region: str) -> Callable[..., Any]:
    if region != "rmsnorm":
        raise ImportError("not offered by quack in this form")
    from quack.rmsnorm import rmsnorm

    def call(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)[:2]  # without prenorm it keeps the sum to itself

    return call


def _peers(region: str) -> list[Peer]:
    def bind(function: Callable[..., Any], *args: Any) -> Callable[[], Callable[..., Any]]:
        return lambda: function(region, *args)

    return [
        Peer(name="rpadiag fp32-output", load=bind(_ours, FP32_OUTPUT[region])),
        Peer(name="rpadiag hf-eager", load=bind(_ours, {})),
        Peer(name="transformers eager", load=bind(_eager)),
        Peer(name="torch.compile", load=bind(_compiled)),
        Peer(name="liger", load=bind(_liger)),
        Peer(name="vllm cuda", load=bind(_vllm), has_backward=False),
        Peer(name="quack", load=bind(_quack)),
    ]


PEERS = {region: _peers(region) for region in ("rmsnorm", "swiglu", "rope")}
