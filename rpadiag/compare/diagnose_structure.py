"""Explanations from the structure of a difference: where it starts, what it follows, how large it is.

Shape legend: R rows (tokens, or token x head), C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.explain import LP, Explanation, Pair, percent
from rpadiag.structure import COHERENCE_LIMIT, ONE_SIDED_LIMIT, coherence, same_values

RARE = 1e-3  # share of differing 16-bit outputs below which a rounding point did not move
CLIP_LEVELS = {
    448.0: "fp8 e4m3",
    240.0: "fp8 e4m3fnuz",
    57344.0: "fp8 e5m2",
    65504.0: "fp16",
    127.0: "int8",
    6.0: "fp4 e2m1",
}


def non_finite(pair: Pair) -> Iterator[Explanation]:
    """NaN or infinity on one side only."""
    a, b = pair.a, pair.b
    bad_a, bad_b = ~a.isfinite(), ~b.isfinite()
    masked_a, masked_b = a == float("-inf"), b == float("-inf")
    if same_values(torch.where(bad_a, a, torch.zeros_like(a)), torch.where(bad_b, b, torch.zeros_like(b))):
        return
    only_mask = bool((bad_a == masked_a).all() and (bad_b == masked_b).all())
    lost = _all_masked_rows(masked_a, masked_b)
    if only_mask and lost is None and pair.role.kind in ("logits", "scores"):
        n = int((masked_a != masked_b).sum())
        side = "B" if int(masked_b.sum()) > int(masked_a.sum()) else "A"
        text = (
            f"{n:,} entries are -inf on the {side} side only: masked out (top-k, top-p, a grammar or an attention mask)"
        )
        yield Explanation(code="masked", severity="semantic", text=text, proof="solved", numbers={"num_masked": n})
        return
    side, bad, good = ("B", bad_b & ~bad_a, a) if int(bad_b.sum()) >= int(bad_a.sum()) else ("A", bad_a & ~bad_b, b)
    x = b if side == "B" else a
    nans, infs = int(x.isnan().sum()), int(x.isinf().sum())
    where = torch.nonzero(bad)
    first = [int(i) for i in where[0]] if len(where) else []
    text = f"non-finite values on the {side} side: {nans} NaN and {infs} infinite of {x.numel()}, first at {first}"
    finite_there = good[bad & good.isfinite()].double().abs()
    code, limit = "non-finite", torch.finfo(x.dtype).max
    if finite_there.numel() and float(finite_there.min()) > 0.5 * min(limit, 65504.0):
        code = "overflow"
        text += f"; the other side holds magnitudes of {float(finite_there.min()):.4g} and more there: overflow (65504 is the largest fp16)"
    elif lost is not None:
        code = "non-finite-rows"
        text += f"; {lost} whole rows are -inf: everything is masked, so the softmax is 0/0"
    elif only_mask and pair.role.kind == "logprob":
        code = "impossible-token"
        text += "; a chosen token has probability 0 on this side (masked by top-k, top-p or a grammar there): the ratio is infinite"
    elif bad.ndim >= 2 and bool(
        bad.reshape(-1, bad.shape[-1]).any(-1).eq(bad.reshape(-1, bad.shape[-1]).all(-1)).all()
    ):
        rows = int(bad.reshape(-1, bad.shape[-1]).all(-1).sum())
        code = "non-finite-rows"
        text += f"; {rows} whole rows: a fully masked softmax row (0/0), or an overflowed row reduction"
    yield Explanation(
        code=code, severity="fatal", text=text, proof="solved", numbers={"side": side, "num_nan": nans, "num_inf": infs, "first": first},
    )  # fmt: skip


def _all_masked_rows(masked_a: Tensor, masked_b: Tensor) -> int | None:
    """Rows that are -inf throughout on one side only."""
    if masked_a.ndim < 2:
        return None
    n = int((masked_a.all(-1) != masked_b.all(-1)).sum())
    return n or None


def boundary(pair: Pair) -> Iterator[Explanation]:
    """Everything before an index of one axis is bit-equal and (nearly) everything from it on differs, or the reverse."""
    a, b = pair.a, pair.b
    for axis in _token_axes(a):
        found = prefix_boundary(a, b, axis=axis)
        if found is None:
            continue
        k, share, n = found
        text = f"rows 0..{k - 1} bit-equal, every row from {k} on differs ({percent(share)} of {n - k:,} rows)"
        numbers = {"first_differing_row": k, "axis": axis, "num_rows": n}
        if pair.role.region == "attention":
            text += f" -> sliding window off by one or another window: one extra (or missing) key at distance {k}"
            yield Explanation(code="window", severity="semantic", text=text, proof="solved", numbers=numbers)
        elif pair.role.region in ("sampling", "data"):
            text = (
                f"everything before index {k} is bit-equal, everything from the boundary (index {k}) on differs from its first "
                "entry on -> a document boundary in a packed row (cross-document attention), or the inputs change there"
            )
            yield Explanation(
                code="document-boundary", severity="data", text=text, proof="solved", region="data", numbers=numbers
            )
        else:
            text += " -> something starts there: a chunk, a document, a table length or a window"
            yield Explanation(code="row-boundary", severity="semantic", text=text, numbers=numbers)
        return


def _token_axes(a: Tensor) -> tuple[int, ...]:
    return {1: (0,), 2: (0,), 3: (1, 0), 4: (2, 1)}.get(a.ndim, ())


def prefix_boundary(a: Tensor, b: Tensor, *, axis: int) -> tuple[int, float, int] | None:
    """(first differing index, share of later indices that differ, axis length); None without a clean cut.

    Index 1 does not count (position 0 is the identity of RoPE, and one causal key is one probability).
    """
    n = a.shape[axis]
    if n < 8:
        return None
    differs = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
    per_index = differs.movedim(axis, 0).reshape(n, -1).any(dim=1)
    where = torch.nonzero(per_index)[:, 0]
    if not len(where) or int(where[0]) < 2:
        return None
    k = int(where[0])
    share = float(per_index[k:].double().mean())
    return (k, share, n) if share > 0.9 and n - k >= 2 else None


def saturated(pair: Pair) -> Iterator[Explanation]:
    """One side never exceeds a level that it reaches repeatedly while the other does: clipping; tanh: a soft cap."""
    for side, x, y in (("B", pair.b, pair.a), ("A", pair.a, pair.b)):
        top, other = float(x.abs().max()), float(y.abs().max())
        if x.numel() < 16 or not (0 < top < 0.9995 * other):
            continue
        at_top = int((x.abs() == top).sum())
        beyond = int((y.abs() > top).sum())
        if at_top >= 2 and beyond >= 2 and at_top >= 0.5 * beyond:
            kind = CLIP_LEVELS.get(top)
            what = f" ({kind}: quantised with scale 1.0)" if kind else ""
            text = f"{side} saturates at exactly +-{top:g}{what} in {at_top} elements where the other side goes to {other:.4g}"
            yield Explanation(
                code="saturation", severity="semantic", text=text, proof="solved", numbers={"side": side, "level": top, "num": at_top},
            )  # fmt: skip
            return
        cap = solve_softcap(x, y)
        if cap is not None:
            text = f"{side} == c * tanh(other / c) with c = {cap:.5g} (solved): a soft cap on the {side} side only"
            yield Explanation(
                code="softcap", severity="semantic", text=text, proof="solved", numbers={"side": side, "cap": cap}
            )
            return


def solve_softcap(x: Tensor, y: Tensor) -> float | None:
    """c with ``x == c * tanh(y / c)`` to rounding, if one exists."""
    big = y.abs().flatten().topk(min(64, y.numel())).indices
    xs, ys = x.flatten()[big].double().abs(), y.flatten()[big].double().abs()
    low, high = float(xs.max()) * (1 + 1e-9), float(ys.max()) * 1e4
    for _ in range(80):
        mid = math.sqrt(low * high)
        low, high = (mid, high) if float((mid * torch.tanh(ys / mid) - xs).sum()) < 0 else (low, mid)
    cap = math.sqrt(low * high)
    if cap > 100 * float(ys.max()):
        return None
    all_x, all_y = x.double().flatten(), y.double().flatten()
    error = float((cap * torch.tanh(all_y / cap) - all_x).norm() / all_x.norm().clamp_min(1e-300))
    return cap if error < 4e-3 and error < 0.2 * float((all_y - all_x).norm() / all_x.norm()) else None


def coarser_grid(pair: Pair) -> Iterator[Explanation]:
    """One side lies on a coarser grid than the other without being its rounding: quantised, or rounded earlier."""
    for side, x, y in (("B", pair.b, pair.a), ("A", pair.a, pair.b)):
        mine, other = mantissa_bits(x), mantissa_bits(y)
        step = absolute_grid(x)
        if step is not None and absolute_grid(y) is None:
            text = f"{side} values collapse onto multiples of 2^{step} (the fp8 subnormal grid is 2^-9) -> quantised with a unit scale"
            yield Explanation(
                code="absolute-grid",
                severity="semantic",
                text=text,
                proof="solved",
                numbers={"side": side, "log2_step": step},
            )
            return
        if mine <= 10 < other or mine <= 3 < other:
            grid = {7: "bf16", 10: "fp16 or tf32", 3: "fp8 e4m3", 2: "fp8 e5m2"}.get(mine, f"{mine}-bit mantissa")
            text = f"{side} lies on the {grid} grid, the other side uses {other} mantissa bits"
            severity = "rounding-contract" if mine >= 7 else "semantic"
            yield Explanation(
                code="coarser-grid", severity=severity, text=text, numbers={"side": side, "mantissa_bits": mine}
            )
            return


def mantissa_bits(x: Tensor) -> int:
    """Explicit mantissa bits that some element uses."""
    if x.dtype in LP:
        x = x.float()
    raw = x.float().contiguous().view(torch.int32) & 0x7FFFFF
    combined = int(torch.from_numpy(_or_reduce(raw)).item())
    return 23 - ((combined & -combined).bit_length() - 1) if combined else 0


def _or_reduce(raw: Tensor):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.asarray(np.bitwise_or.reduce(raw.cpu().numpy().reshape(-1)))


def absolute_grid(x: Tensor) -> int | None:
    """k when every element is a multiple of 2^k and few multiples occur (a fixed-point or subnormal grid)."""
    for k in (-9, -16, -6):
        scaled = x.double() * 2.0**-k
        if bool((scaled == scaled.round()).all()) and float(scaled.abs().max()) < 256 and float(scaled.abs().max()) > 0:
            return k
    return None


def gains(pair: Pair) -> Iterator[Explanation]:
    """A constant, per-row or per-column factor between the sides, beyond what rounding explains."""
    a, b = pair.rows
    ok = a.isfinite() & b.isfinite()
    a, b = torch.where(ok, a, 0.0), torch.where(ok, b, 0.0)
    power = float(a.square().sum())
    if power == 0 or a.numel() < 16:
        return
    g = float((a * b).sum()) / power
    noise = float((b - g * a).norm()) / math.sqrt(power) / abs(g) if g else math.inf
    budget = 3.2 * pair.unit
    certain = abs(g - 1) > 2 * pair.unit or abs(pair.change.magnitude_balance) > 0.5
    least = max(4e-4 if pair.lp else 2e-6, 8 * noise / math.sqrt(a.numel()))  # rounding twice shrinks by less
    if certain and noise < max(budget, 1e-6) and abs(g - 1) > least:
        yield _constant_gain(pair, g)
        return
    for axis, name in ((1, "row"), (0, "column")):
        found = _gain_along(pair, a, b, axis=axis, name=name)
        if found is not None:
            yield found
            return


def _constant_gain(pair: Pair, g: float) -> Explanation:
    small = abs(g - 1) < 2**-6
    c = pair.change
    text = f"constant gain {g:.6g} ({100 * (g - 1):+.3g} %) before rounding"
    if abs(c.magnitude_balance) > ONE_SIDED_LIMIT:
        text += ", so every difference points the same way in magnitude"
    known = known_factor(g, pair.a.shape[-1])
    if known:
        text += f"; {known}"
    numbers = {"gain": g}
    return Explanation(
        code="constant-gain", severity="biased-rounding" if small else "semantic", text=text, proof="solved", numbers=numbers,
    )  # fmt: skip


def known_factor(g: float, width: int) -> str:
    """Words for a factor that has a name, or an empty string."""
    root = math.sqrt(width)
    bf = float(torch.tensor(root).bfloat16())
    names = {
        root: f"sqrt(width = {width})", 1 / root: f"1/sqrt(width = {width})", root / bf: f"sqrt({width}) = {root:.6g} against its bf16 value {bf:g}",
        bf / root: f"the bf16 value {bf:g} of sqrt({width}) against {root:.6g}", math.log2(math.e): "log2(e)", math.log(2): "ln 2",
    }  # fmt: skip
    for value, text in names.items():
        if value != 1 and abs(g / value - 1) < min(2e-4, 0.3 * abs(value - 1)):
            return text
    mantissa, exponent = math.frexp(abs(g))
    return f"2^{exponent - 1}" if abs(mantissa - 0.5) < 1e-6 and exponent != 1 else ""


def _gain_along(pair: Pair, a: Tensor, b: Tensor, *, axis: int, name: str) -> Explanation | None:
    """A factor of its own for each row (axis=1) or column (axis=0) that leaves only rounding, if it does."""
    num = a.shape[1 - axis]
    length = a.shape[axis]
    if num < 4 or length < 4:
        return None
    power = a.square().sum(axis, keepdim=True)
    live = power > 0
    g = torch.where(live, (a * b).sum(axis, keepdim=True) / power.clamp_min(1e-300), 1.0)
    rest = b - g * a
    left = float(rest.norm() / (g * a).norm().clamp_min(1e-300))
    before = float((b - a).norm() / a.norm())
    if left > max(3.2 * pair.unit, 2e-6) or (before < 2 * left and not _coherent(pair, axis)):
        return None
    spread = g[live]
    error = (rest.square().sum(axis, keepdim=True) / power.clamp_min(1e-300)).sqrt()[live] / math.sqrt(length)
    z = float(((spread - spread.mean()) / error.clamp_min(1e-12)).square().mean())
    if z < 3 or float((spread - 1).abs().max()) < 1e-5:
        return None
    low, high = float(spread.min()), float(spread.max())
    small = max(abs(low - 1), abs(high - 1)) <= 2**-7
    what = {
        "row": "a scalar of the row (inverse rms, epsilon, a dynamic scale)",
        "column": "a weight or per-channel scale",
    }[name]
    if pair.role.region == "attention" and name == "row":
        what = "a softmax denominator: an attention sink on one side only"
    text = (
        f"each {name} is off by a constant factor of its own ({low:.6g} to {high:.6g}), the rest is rounding -> {what}"
    )
    return Explanation(
        code=f"{name}-gain", severity="biased-rounding" if small else "semantic", text=text, proof="solved",
        numbers={"min_gain": low, "max_gain": high},
    )  # fmt: skip


def _coherent(pair: Pair, axis: int) -> bool:
    width = pair.a.shape[-1]
    return coherence(pair.a.reshape(-1, width), pair.b.reshape(-1, width), axis=axis) > COHERENCE_LIMIT


def offset(pair: Pair) -> Iterator[Explanation]:
    """B - A is the same for every row: a bias."""
    a, b = pair.rows
    if a.shape[0] < 4 or a.shape[1] < 2:
        return
    delta = b - a
    mean = delta.mean(0, keepdim=True)
    spread = float((delta - mean).norm() / delta.norm().clamp_min(1e-300))
    size = float(mean.norm() / a.square().mean(0, keepdim=True).sqrt().norm().clamp_min(1e-300))
    if spread < 0.2 and size > 5 * pair.unit:
        text = f"the same vector is added to every row (relative size {size:.3g}) -> a bias missing on one side"
        yield Explanation(code="bias", severity="semantic", text=text, proof="solved", numbers={"relative_size": size})
