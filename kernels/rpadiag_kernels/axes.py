"""Contract axes as the kernels take them: plain strings in, small integers out.

The names and values mirror ``rpadiag/contracts.py`` (this package never imports rpadiag; a test compares the two).
Each value's code is its position here, and is what a kernel sees as a compile-time flag.
"""

from __future__ import annotations

from functools import lru_cache

import torch

LP_CODES: dict[torch.dtype, int] = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "rmsnorm": {
        "sum": ("lp", "fp32"),
        "variance": ("rounded", "unrounded"),
        "scale": ("lp", "fp32"),
        "weight": ("w", "1+w", "lp(1+w)", "none"),
        "rstd": ("fp32", "lp"),
        "store": ("rne", "truncate"),
        "root": ("rsqrt", "1/sqrt"),
        "mean": ("sum/n", "sum*(1/n)"),
        "order": ("(x*r)*w", "x*(r*w)", "(x*w)*r"),
        "dn": ("lp", "fp32"),
        "dw": ("lp", "lp-xhat", "fp32"),
        "reduction": ("native", "lanes8", "warps8"),
        "dsum": ("lp", "fp32"),
    },
    "rope": {
        "cache": ("lp", "fp32"),
        "products": ("lp", "fp32", "lp-fma"),
        "fused": ("--", "cc", "cs", "sc", "ss"),
        "layout": ("neox", "interleaved"),
        "store": ("rne", "truncate"),
        "fma": ("--", "cc", "cs", "sc", "ss"),
        "grad_products": ("lp", "fp32", "lp-fma"),
        "grad_fused": ("cc", "cs", "sc", "ss"),
    },
    "swiglu": {
        "silu": ("lp", "fp32"),
        "sigmoid": ("fp32", "lp"),
        "store": ("rne", "truncate"),
        "formula": ("x/(1+e)", "x*(1/(1+e))", "x*u/(1+e)"),
        "exp": ("exp", "exp2"),
        "dact": ("lp", "fp32"),
        "grad_silu": ("lp", "fp32"),
    },
}


def encode(region: str, axes: dict[str, str]) -> dict[str, int]:
    """Axis values as codes; absent axes take their first value.

    Errors: ValueError for an unknown axis or value, with the known ones.
    """
    known = AXES[region]
    for name, value in axes.items():
        if name not in known:
            raise ValueError(f"unknown axis of {region}: {name}; known axes: {', '.join(known)}")
        if value not in known[name]:
            raise ValueError(f"unknown value of {region} axis {name}: {value}; known values: {', '.join(known[name])}")
    return {name: values.index(axes.get(name, values[0])) for name, values in known.items()}


def to_string(codes: dict[str, int]) -> str:
    """Codes as the string that an op carries."""
    return " ".join(f"{name}={code}" for name, code in codes.items())


def contract(region: str, axes: dict[str, str]) -> tuple[dict[str, int], str]:
    """Codes of axis values, and the string that an op carries. The caller must not change the codes.

    Errors: as :func:`encode`. Known ones are looked up: a model makes hundreds of calls a step. (Not under torch.compile,
    which does not look into caches and runs this once.)
    """
    if torch.compiler.is_compiling():
        codes = encode(region, axes)
        return codes, to_string(codes)
    return _known_contract(region, tuple(axes.items()))


@lru_cache(maxsize=4096)
def _known_contract(region: str, items: tuple[tuple[str, str], ...]) -> tuple[dict[str, int], str]:
    codes = encode(region, dict(items))
    return codes, to_string(codes)


@lru_cache(maxsize=4096)
def from_string(contract: str) -> dict[str, int]:
    """Inverse of :func:`to_string`. The caller must not change the result."""
    return {name: int(code) for name, code in (part.split("=") for part in contract.split(" "))}


def lp_code(x: torch.Tensor, region: str) -> int:
    """Code of the low-precision dtype of ``x``. Errors: TypeError for anything but bf16, fp16 and fp32."""
    if x.dtype not in LP_CODES:
        raise TypeError(f"{region} takes bfloat16, float16 or float32, not {x.dtype}")
    return LP_CODES[x.dtype]


def check_same(region: str, **tensors: torch.Tensor) -> None:
    """Shapes, dtypes and devices of tensors that must agree. Errors: ValueError naming both sides."""
    (first_name, first), *rest = tensors.items()
    for name, tensor in rest:
        if first.shape == tensor.shape and first.dtype == tensor.dtype and first.device == tensor.device:
            continue
        for what, a, b in (
            ("shape", tuple(first.shape), tuple(tensor.shape)),
            ("dtype", first.dtype, tensor.dtype),
            ("device", first.device, tensor.device),
        ):
            if a != b:
                raise ValueError(f"{region}: {first_name} has {what} {a} and {name} has {b}; they must agree")
