"""The explanation of last resort, from statistics alone: how large, how often, which way, coherent along what."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.explain import Explanation, Pair, percent, rel_error
from rpadiag.structure import COHERENCE_LIMIT, ONE_SIDED_LIMIT, coherence

RARE = 1e-3  # share of differing 16-bit outputs below which no rounding point moved
FEW_ROUNDINGS = 4.0  # rms size, in single roundings, up to which unbiased differences are a moved rounding point
GROSS = 12.0  # size from which roundings of one operation cannot explain it
FP32_ORDER = 100.0  # rms size in float32 roundings that reordering long sums reaches
SIZES = (("bf16", 1.65e-3), ("fp16 or tf32", 2.07e-4))


def fallback(pair: Pair) -> Iterator[Explanation]:
    """Classify a difference that no identity or solved parameter explains."""
    yield low_precision(pair) if pair.lp else float32(pair)
    grown = growth(pair)
    if grown is not None:
        yield grown


def _bias(pair: Pair) -> str:
    """Which way it points: ``unbiased``, or the one-sidedness or coherence that stands out."""
    c = pair.change
    if c.num_differing >= 32:
        if abs(c.magnitude_balance) > ONE_SIDED_LIMIT:
            return (
                "one-sided in magnitude, every change "
                + ("away from" if c.magnitude_balance > 0 else "toward")
                + " zero"
            )
        if abs(c.sign_balance) > ONE_SIDED_LIMIT:
            return "one-sided in value, every change " + ("up" if c.sign_balance > 0 else "down")
        limit = max(0.25, 5 / math.sqrt(c.num_differing))
        if abs(c.magnitude_balance) > limit:
            return f"biased in magnitude (balance {c.magnitude_balance:+.2f})"
        if abs(c.sign_balance) > limit:
            return f"biased in value (balance {c.sign_balance:+.2f})"
    if pair.a.ndim >= 2 and pair.a.shape[-1] >= 16:
        a, b = pair.a.reshape(-1, pair.a.shape[-1]), pair.b.reshape(-1, pair.b.shape[-1])
        if coherence(a, b, axis=1) > COHERENCE_LIMIT:
            return "coherent along rows"
        if a.shape[0] >= 16 and coherence(a, b, axis=0) > COHERENCE_LIMIT:
            return "coherent along columns"
    return "unbiased"


def low_precision(pair: Pair) -> Explanation:
    """bf16 or fp16 on both sides."""
    c, bias = pair.change, _bias(pair)
    size = c.rel_l2 / pair.unit
    numbers = {"differing": c.differing, "max_ulp": c.max_ulp, "rel_l2": c.rel_l2, "roundings": size, "bias": bias}
    shape = f"{percent(c.differing)} of {c.n:,} {pair.lp} outputs differ, at most {c.max_ulp:,} ULP"
    if c.max_ulp > 2:
        shape += " (near zero only)" if size < FEW_ROUNDINGS and _large_only_near_zero(pair) else ""
    if c.differing < RARE and size < 1:
        text = f"{shape}, {bias}: accumulation order, a transcendental or a fused multiply-add below the output grid; same rounding contract"
        return Explanation(code="order-noise", severity="ulp-noise", text=text, proof="statistics", numbers=numbers)
    if bias != "unbiased" and size < GROSS:
        text = f"{shape}, {bias}: biased rounding, it compounds with depth"
        return Explanation(code="biased", severity="biased-rounding", text=text, proof="statistics", numbers=numbers)
    if size < GROSS:
        tail = "; larger where terms cancel" if c.max_ulp > 2 else ""
        text = f"{shape}{tail}, unbiased, rms {size:.1f} roundings: a rounding point moved"
        return Explanation(
            code="rounding-point", severity="rounding-contract", text=text, proof="statistics", numbers=numbers
        )
    text = f"{shape}, relative L2 {c.rel_l2:.3g} ({size:.0f} roundings), {bias}: too large for rounding: a different computation"
    return Explanation(
        code="different-computation", severity="semantic", text=text, proof="statistics", numbers=numbers
    )


def _large_only_near_zero(pair: Pair) -> bool:
    scale = pair.a.double().square().mean().sqrt()
    delta = (pair.b.double() - pair.a.double()).abs()
    return bool(
        (delta[pair.a.double().abs() > scale] <= pair.a.double().abs()[pair.a.double().abs() > scale] * 2.0**-6).all()
    )


def float32(pair: Pair) -> Explanation:
    """float32 (or mixed) tensors: order noise, or the trace of a value that was rounded on the way."""
    c, bias = pair.change, _bias(pair)
    size = rel_error(pair.b, pair.a)
    numbers = {"differing": c.differing, "max_ulp": c.max_ulp, "rel_l2": size, "bias": bias}
    shape = f"{percent(c.differing)} of {c.n:,} float32 values differ, relative L2 {size:.3g}"
    if size < FP32_ORDER * 2.5e-8:
        text = f"{shape}, a few float32 ULP, {bias}: accumulation order or a transcendental; same rounding contract, not a precision downgrade"
        return Explanation(code="order-noise", severity="ulp-noise", text=text, proof="statistics", numbers=numbers)
    if pair.role.region == "rope" and pair.role.kind in ("table", "inv_freq") and size < 1e-3:
        text = f"{shape}: an angle error that position amplifies"
        return Explanation(code="angle-noise", severity="ulp-noise", text=text, proof="statistics", numbers=numbers)
    for name, unit in SIZES:
        if 0.15 < size / unit < FEW_ROUNDINGS:
            text = f"{shape}, the size of a rounding to {name}, {bias}: a value on the way is rounded to {name} on one side"
            severity = "rounding-contract" if bias == "unbiased" else "biased-rounding"
            return Explanation(code="rounding-point", severity=severity, text=text, proof="statistics", numbers=numbers)
    if size < 2e-4:
        text = f"{shape}, {bias}: more than reordering, less than one 16-bit rounding"
        return Explanation(
            code="small",
            severity="ulp-noise" if bias == "unbiased" else "biased-rounding",
            text=text,
            proof="statistics",
            numbers=numbers,
        )
    text = f"{shape}, {bias}: too large for rounding: a different computation"
    return Explanation(
        code="different-computation", severity="semantic", text=text, proof="statistics", numbers=numbers
    )


def growth(pair: Pair) -> Explanation | None:
    """Whether the error grows along the token axis."""
    n = pair.a.shape[0] if pair.a.ndim else 0
    if n < 32 or pair.a.ndim < 2:
        return None
    size = row_error(pair.a, pair.b)
    first, last = float(size[: n // 4].mean()), float(size[-(n // 4) :].mean())
    if last > 4 * first and last > 0:
        ratio = f"{last / first:.3g} times" if first > 0 else "from zero"
        text = f"the error grows with position ({ratio} from the first to the last quarter of the rows)"
        return Explanation(
            code="grows-with-position", severity="ulp-noise", text=text, numbers={"first": first, "last": last}
        )
    return None


def row_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of each slice of the first axis."""
    return torch.nan_to_num((b.double() - a.double()).abs(), 0.0, 0.0, 0.0).reshape(a.shape[0], -1).mean(1)
