"""Inputs for the kernel tests: several magnitudes at once, so that large, small and subnormal values take part."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)


def values(*shape: int, dtype: torch.dtype, seed: int, device: str = "cpu", spread: float = 3.0) -> Tensor:
    """Normal values whose rows differ in scale by powers of ten within 10 ** +-spread, with some exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    scale = 10.0 ** (torch.rand(*shape[:-1], 1, generator=generator) * 2 * spread - spread) if spread else 1.0
    x = torch.where(torch.rand(*shape, generator=generator) < 0.01, torch.zeros(()), x * scale)
    return x.to(dtype).to(device)


def num_mismatches(a: Tensor, b: Tensor) -> int:
    """Elements that are not the same value; NaNs are the same, and so are +0 and -0 not."""
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = a.contiguous(), b.contiguous()
    if a.dtype == torch.float32:
        bits_a, bits_b = a.view(torch.int32), b.view(torch.int32)
    else:
        bits_a, bits_b = a.view(torch.int16), b.view(torch.int16)
    return int(((bits_a != bits_b) & ~(a.isnan() & b.isnan())).sum())


def angles(*shape: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """float32 cos and sin tables of the given shape, angles up to a thousand radians."""
    generator = torch.Generator().manual_seed(7)
    angle = torch.rand(*shape, generator=generator) * 1000
    return angle.cos().to(device), angle.sin().to(device)


def pairs(n: int, *, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two tensors to compare. patterns: any bits, NaN and infinity included; zeros: both zeros and tiny values."""
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(n, generator=generator)
    if kind == "noise":
        b = a * (1 + 0.01 * torch.randn(n, generator=generator)) + 1e-3 * torch.randn(n, generator=generator)
    elif kind == "patterns":
        integer, limit = (torch.int32, 2**31) if dtype == torch.float32 else (torch.int16, 2**15)
        a, b = (torch.randint(-limit, limit, (n,), generator=generator).to(integer).view(dtype) for _ in range(2))
    elif kind == "zeros":
        few = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 1.0])
        a, b = (few[torch.randint(5, (n,), generator=generator)] for _ in range(2))
    else:
        a = a * (1e-30 if kind == "small" else 1e25)
        b = a * 1.01
    return a.to(dtype), b.to(dtype)


def ulp_differences(a: Tensor, b: Tensor) -> dict[str, tuple[object, object]]:
    """Numbers of rpadiag_kernels.ulp_stats that are not those of rpadiag.bits; float sums may differ by 1e-5."""
    import dataclasses

    import rpadiag_kernels

    from rpadiag import bits

    got = rpadiag_kernels.ulp_stats(a, b)
    want = dataclasses.asdict(bits.ulp_stats(a.cpu(), b.cpu()))
    assert got.keys() == want.keys()
    return {
        name: (got[name], value)
        for name, value in want.items()
        if (abs(got[name] - value) > 1e-5 * abs(value) if isinstance(value, float) else got[name] != value)
    }
