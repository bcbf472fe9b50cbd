"""Explanations of a scaled embedding (families that multiply it by sqrt(width))."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.explain import Context, Explanation, Pair, percent
from rpadiag.structure import same_values


def embedding(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two embedding outputs: the scalar that each side multiplied by, found among the ways to write sqrt(width)."""
    emb = ctx.tensor("emb", like=pair.a)
    if emb is None:
        return
    scales = _scales(pair.a.shape[-1], pair.a.dtype)
    found = [
        next(((n, s) for n, s in scales.items() if same_values(_scaled(emb, s, pair.a.dtype), side)), None)
        for side in (pair.a, pair.b)
    ]
    if found[0] is None or found[1] is None or found[0] == found[1]:
        return
    (name_a, a), (name_b, b) = found[0], found[1]
    gain = b / a
    c = pair.change
    small = abs(gain - 1) < 2**-6
    text = (
        f"embedding, first site of the network: A multiplies by {name_a} = {a:g}, B by {name_b} = {b:.6g}: constant gain {gain:.5f} "
        f"({100 * (gain - 1):+.3f} %) before rounding"
    )
    if small:
        text += f", so every difference points the same way in magnitude ({percent(c.differing)} of {c.n:,} elements)"
    yield Explanation(
        code="embedding-scale", severity="biased-rounding" if small else "semantic", text=text, proof="identity",
        numbers={"scale_a": a, "scale_b": b, "gain": gain},
    )  # fmt: skip


def _scales(width: int, dtype: torch.dtype) -> dict[str, float]:
    root = math.sqrt(width)
    lp = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    name = "fp16" if lp == torch.float16 else "bf16"
    return {
        f"sqrt({width})": float(torch.tensor(root, dtype=torch.float32)),
        f"{name}(sqrt({width}))": float(torch.tensor(root).to(lp)),
        "1 (no normaliser)": 1.0,
        f"1/sqrt({width})": 1 / root,
    }


def _scaled(emb: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (emb.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
