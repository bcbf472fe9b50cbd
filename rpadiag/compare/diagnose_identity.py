"""Explanations that hold for every element: one side is the other, rounded, permuted, shifted, scaled, or an input.

Shape legend: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rpadiag.compare.explain import Context, Explanation, Pair, percent
from rpadiag.structure import same_values, signed_ulp

MAX_SHIFT = 16
_ALMOST = 1e-3  # share of elements that may miss a rounding identity (transcendental noise below the grid)


def drop_mantissa(x: Tensor, bits: int) -> Tensor:
    """float32 with the mantissa cut to ``bits`` bits, toward zero."""
    mask = ~((1 << (23 - bits)) - 1)
    return (x.float().contiguous().view(torch.int32) & mask).view(torch.float32)


def round_tf32(x: Tensor) -> Tensor:
    """float32 rounded to the 10-bit mantissa of TF32, to nearest even."""
    raw = x.float().contiguous().view(torch.int32)
    return ((raw + 0xFFF + ((raw >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.float().to(dtype).float()


ROUNDINGS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bf16": ("rounding-contract", _cast(torch.bfloat16)),
    "fp16": ("rounding-contract", _cast(torch.float16)),
    "tf32": ("rounding-contract", round_tf32),
    "fp8_e4m3": ("semantic", _cast(torch.float8_e4m3fn)),
    "fp8_e5m2": ("semantic", _cast(torch.float8_e5m2)),
    "truncate-to-bf16": ("biased-rounding", lambda x: drop_mantissa(x, 7)),
    "truncate-to-tf32": ("biased-rounding", lambda x: drop_mantissa(x, 10)),
}


def rounded_side(pair: Pair) -> Iterator[Explanation]:
    """One side equals the other after one rounding, element by element: ``B == bf16(A)``."""
    a, b = pair.a.float(), pair.b.float()
    for name, (severity, rounding) in ROUNDINGS.items():
        for this, that, x, y in (("B", "A", a, b), ("A", "B", b, a)):
            misses = int((rounding(x) != y).sum()) if _is_rounded(rounding, x, y) else y.numel()
            if misses > _ALMOST * y.numel():
                continue
            but = f" but for {misses} of {y.numel()} elements" if misses else " bit for bit"
            if severity == "biased-rounding":
                text = f"{this}.{pair.site} == {name}({that}.{pair.site}){but}: truncation toward zero"
            else:
                text = f"{this}.{pair.site} == {name}({that}.{pair.site}){but}"
            level = severity
            if pair.role.kind == "rstd":
                level, text = "biased-rounding", text + "; a whole row is scaled by one rounded scalar"
            elif pair.role.kind == "inv_freq":
                level, text = "biased-rounding", text + "; the angle error grows with position"
            elif pair.role.kind == "table":
                text += f": the table is rounded on the {this} side (identity table)"
            numbers = {"rounded_side": this, "rounding": name, "num_misses": misses}
            yield Explanation(code="rounded-identity", severity=level, text=text, proof="identity", numbers=numbers)
            return


def _is_rounded(rounding: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> bool:
    """``y`` lies on the grid and ``x`` does not (or the identity would be trivial)."""
    return same_values(rounding(y), y) and not same_values(rounding(x), x)


def permuted(pair: Pair) -> Iterator[Explanation]:
    """B holds A's values in another order along the last axis or the head axis."""
    a, b = pair.a, pair.b
    if a.ndim < 2:
        return
    d = a.shape[-1]
    candidates: list[tuple[str, Tensor]] = [("reversed", a.flip(-1))]
    if d % 2 == 0 and d >= 4:
        halves, pairs = a.unflatten(-1, (2, d // 2)), a.unflatten(-1, (d // 2, 2))
        candidates += [
            ("interleaved (0, d/2, 1, d/2+1, ...)", halves.transpose(-1, -2).flatten(-2)),
            ("de-interleaved (0, 2, ..., 1, 3, ...)", pairs.transpose(-1, -2).flatten(-2)),
            ("halves swapped", halves.flip(-2).flatten(-2)),
            ("neighbours swapped", pairs.flip(-1).flatten(-2)),
        ]
    if a.ndim == 2 and a.shape[0] == a.shape[1]:
        candidates.append(("transposed", a.T))
    if a.ndim == 3:
        if a.shape[0] == a.shape[1]:
            candidates.append(("first two axes transposed", a.transpose(0, 1)))
        order = _slice_order(a, b, axis=1)
        if order is not None:
            candidates.append((f"heads reordered {order[:8]}", a.index_select(1, torch.tensor(order))))
        order = _slice_order(a, b, axis=0)
        if order is not None:
            candidates.append((f"first axis reordered {order[:8]}", a.index_select(0, torch.tensor(order))))
    for how, moved in candidates:
        if moved.shape == b.shape and same_values(moved, b) and not same_values(a, b):
            text = f"B.{pair.site} holds A's values in another order, bit for bit: {how} -> layout, not precision"
            yield Explanation(code="permuted", severity="semantic", text=text, proof="identity", numbers={"order": how})
            return


def _slice_order(a: Tensor, b: Tensor, *, axis: int) -> list[int] | None:
    """order with ``b == a.index_select(axis, order)``, if there is one other than the identity."""
    n = a.shape[axis]
    if not 2 <= n <= 128:
        return None
    order = []
    for i in range(n):
        hit = next((j for j in range(n) if same_values(a.select(axis, j), b.select(axis, i))), None)
        if hit is None:
            return None
        order.append(hit)
    return order if order != list(range(n)) else None


def shifted(pair: Pair) -> Iterator[Explanation]:
    """B[t] == A[t + k] along the token axis: one side is aligned differently."""
    a, b = pair.a, pair.b
    if not a.ndim or a.shape[0] < 6:
        return
    for k in range(1, min(MAX_SHIFT, a.shape[0] // 3) + 1):
        for lag, x, y in ((k, a[k:], b[:-k]), (-k, a[:-k], b[k:])):
            if same_values(x, y) and not same_values(x[:-1], x[1:]):
                where = f"t+{lag}" if lag > 0 else f"t{lag}"
                text = f"lag-{abs(lag)} identity: B[t] == A[{where}] (lag-{abs(lag)} correlation is exactly 1); "
                numbers = {"lag": lag}
                if pair.role.kind == "table" or pair.role.region == "rope":
                    text += f"positions are offset by {lag}"
                    yield Explanation(
                        code="position-offset", severity="semantic", text=text, proof="identity", numbers=numbers
                    )
                else:
                    text += (
                        "off-by-one alignment of the label or token axis, no model-side finding"
                        if k == 1
                        else "the token axis is misaligned, no model-side finding"
                    )
                    yield Explanation(
                        code="shifted", severity="data", text=text, proof="identity", numbers=numbers,
                        region="data",
                    )  # fmt: skip
                return


def equals_an_input(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """One side is an input, untouched: an operation is missing, or other weights were used."""
    for name, value in ctx.inputs.items():
        if not isinstance(value, Tensor) or value.shape != pair.a.shape:
            continue
        for this, that, x, y in (("B", "A", pair.b, pair.a), ("A", "B", pair.a, pair.b)):
            if same_values(x, value) and not same_values(y, value):
                if pair.role.region == "weights":
                    text = f"{this}.{pair.site} equals {name} bit for bit and {that} does not: {this} runs with other (stale) weights"
                    code = "stale-weights"
                else:
                    text = f"{this}.{pair.site} equals its input {name} bit for bit: the operation is missing on the {this} side"
                    code = "missing-operation"
                yield Explanation(
                    code=code, severity="semantic", text=text, proof="identity", numbers={"input": name, "side": this}
                )
                return


def exact_scale(pair: Pair) -> Iterator[Explanation]:
    """B == -A, or B == 2^k * A."""
    a, b = pair.a.double(), pair.b.double()
    ok = (a != 0) & a.isfinite() & b.isfinite()
    if int(ok.sum()) < 4:
        return
    ratio = (b[ok] / a[ok])[0]
    if bool((b[ok] == ratio * a[ok]).all()) and float(ratio) not in (0.0, 1.0):
        g = float(ratio)
        what = "the sign is flipped" if g == -1 else f"B == {g:g} * A bit for bit"
        yield Explanation(
            code="exact-scale", severity="semantic", text=f"constant gain: {what}", proof="identity", numbers={"gain": g},
        )  # fmt: skip


def truncated(pair: Pair) -> Iterator[Explanation]:
    """All changes of a 16-bit output are 0 or -1 ULP in magnitude, independent of the mantissa: truncation.

    A gain below 1 looks the same at first sight, but moves large mantissas more than small ones.
    """
    c = pair.change
    if pair.lp is None or c.max_ulp > 1 or c.num_differing < 32 or not 0.2 < c.differing < 0.75:
        return
    by_value = abs(c.sign_balance) > 0.95
    if abs(c.magnitude_balance) < 0.95 and not by_value:
        return
    if not by_value and mantissa_trend(pair.a, pair.b) > 1.15:
        return
    side = "B" if (c.magnitude_balance < 0 or (by_value and c.sign_balance < 0)) else "A"
    toward = "minus infinity (floor)" if by_value else "zero"
    text = (
        f"one-sided: 0/-1 magnitude ULP only, mean magnitude {c.mean_magnitude_ulp:+.2f} ULP while the value-signed mean is "
        f"{c.mean_signed_ulp:+.3f}; {percent(c.differing)} differ -> {side} truncates toward {toward} instead of rounding to nearest; "
        "grows linearly with depth"
    )
    yield Explanation(
        code="truncation", severity="biased-rounding", text=text, proof="solved",
        numbers={"side": side, "mean_magnitude_ulp": c.mean_magnitude_ulp, "mean_signed_ulp": c.mean_signed_ulp},
    )  # fmt: skip


def mantissa_trend(a: Tensor, b: Tensor) -> float:
    """Mean ULP change of elements in the upper half of a binade over that in the lower: 1 truncation, 1.4 gain."""
    _, magnitude = signed_ulp(a, b)
    mantissa, _ = torch.frexp(a.float().abs())
    ok = a.isfinite() & (a != 0)
    upper, lower = magnitude[ok & (mantissa >= 0.75)].double(), magnitude[ok & (mantissa < 0.75)].double()
    if upper.numel() < 64 or lower.numel() < 64 or float(lower.mean()) == 0:
        return 1.0
    return float(upper.mean() / lower.mean())


IDENTITIES: tuple[Callable[[Pair], Iterator[Explanation]], ...] = (
    rounded_side,
    exact_scale,
    permuted,
    shifted,
    truncated,
)
