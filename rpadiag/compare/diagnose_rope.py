"""Explanations of RoPE: frequencies, tables, layout, positions, rounding. Shape legend: T tokens, H heads, D head size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare import angles
from rpadiag.compare.angles import Base, Turn
from rpadiag.compare.diagnose_contracts import contract_difference
from rpadiag.compare.explain import Context, Explanation, Pair, percent, rel_error
from rpadiag.structure import same_values

FEW_ULP = 64


def inv_freq(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two vectors of inverse frequencies."""
    a, b = pair.a.double().reshape(-1), pair.b.double().reshape(-1)
    ratio = b / a
    if pair.change.max_ulp <= FEW_ULP and pair.a.dtype == torch.float32:
        text = (
            f"inv_freq differs by a few fp32 ULP (at most {pair.change.max_ulp:,}, {percent(pair.change.differing)} of {len(a)}): another pow, "
            "device or formula; the table error is proportional to position, bf16-visible only in a small fraction at long positions"
        )
        yield Explanation(
            code="inv-freq-ulp",
            severity="ulp-noise",
            text=text,
            proof="solved",
            numbers={"max_ulp": pair.change.max_ulp},
        )
        return
    dim = 2 * len(a)
    base_a, base_b = angles.fit_base(a, dim), angles.fit_base(b, dim)
    found = compare_bases(base_a, base_b) if base_a and base_b else None
    if found is not None:
        yield found
        return
    same = int((abs(ratio - 1) < 1e-6).sum())
    low, high = float(ratio.min()), float(ratio.max())
    text = f"inv_freq is rescaled piecewise: {same} of {len(a)} frequencies equal, the others times {low:.4g} to {high:.4g}: a llama3, yarn or NTK scaling on one side only"
    yield Explanation(
        code="rope-scaling",
        severity="semantic",
        text=text,
        proof="solved",
        numbers={"min": low, "max": high, "num_equal": same},
    )


def compare_bases(a: Base, b: Base) -> Explanation | None:
    """Say that theta, or a linear scale, differs; None when both are fitted alike or one is no power law."""
    if max(a.residual, b.residual) > 2e-2:
        return None
    theta_a, theta_b = a.round_theta, b.round_theta
    apart = abs(math.log(b.theta / a.theta))
    scale = b.scale / a.scale
    floor = 4 * max(a.residual, b.residual) + 1e-6
    if theta_a != theta_b and apart > 5 * (a.error + b.error) + 1e-5:
        text = f"the RoPE base differs: solved theta A = {theta_a:g}, B = {theta_b:g} (fit over {b.num_pairs} pairs): a configuration, not precision"
        return Explanation(
            code="rope-base", severity="semantic", text=text, proof="solved", numbers={"theta_a": theta_a, "theta_b": theta_b},
        )  # fmt: skip
    if abs(math.log(scale)) > floor + 1e-3:
        text = f"all frequencies are scaled by {scale:.6g} (positions divided by {1 / scale:.6g}): linear RoPE scaling on one side only"
        return Explanation(
            code="rope-scaling", severity="semantic", text=text, proof="solved", numbers={"scale": scale}
        )
    return None


def table(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two cos or sin tables [T, P] or [T, D], after rounding and shift identities did not explain them."""
    positions = ctx.tensor("positions")
    if positions is None or pair.a.ndim != 2 or positions.numel() != pair.a.shape[0]:
        return
    rounded = positions.float().bfloat16().long()
    if not same_values(rounded, positions.long()):
        index = {int(p): i for i, p in enumerate(positions.tolist())}
        known = [(i, index[int(r)]) for i, r in enumerate(rounded.tolist()) if int(r) in index]
        rows, sources = (
            (torch.tensor(v) for v in zip(*known, strict=True)) if known else (torch.empty(0), torch.empty(0))
        )
        if len(known) > 0.2 * len(positions) and same_values(pair.a[sources.long()], pair.b[rows.long()]):
            text = "B's table is A's at bf16(position): positions are rounded to bf16, beyond 256 they collapse onto a grid"
            yield Explanation(code="rounded-positions", severity="semantic", text=text, proof="identity")
            return
    if "inv_freq" in " ".join(ctx.a) and any(not same_values(ctx.a[s], ctx.b[s]) for s in ctx.a if "inv_freq" in s):
        late, early = _late_and_early(pair)
        text = f"the table error is proportional to position (mean {early:.2g} in the first eighth of the rows, {late:.2g} in the last): inherited from inv_freq"
        yield Explanation(code="inherited-angle", severity="ulp-noise", text=text, proof="structure")
        return
    if "cos" in pair.site.lower():
        yield from _table_base(pair, positions)


def _late_and_early(pair: Pair) -> tuple[float, float]:
    error = (pair.b.double() - pair.a.double()).abs().mean(1)
    n = max(1, len(error) // 8)
    return float(error[-n:].mean()), float(error[:n].mean())


def _table_base(pair: Pair, positions: Tensor) -> Iterator[Explanation]:
    width = pair.a.shape[1]
    half = width // 2 if width % 2 == 0 and same_values(pair.a[:, : width // 2], pair.a[:, width // 2 :]) else width
    a, b = (angles.fit_base(angles.table_frequencies(t[:, :half], positions), 2 * half) for t in (pair.a, pair.b))
    found = compare_bases(a, b) if a and b else None
    if found is not None:
        yield found


def output(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two rotated queries or keys, from the unrotated one and the positions."""
    if pair.a.ndim != 3:
        return
    first = "position 0 is exact" if same_values(pair.a[0], pair.b[0]) else "position 0 differs"
    first_role = "k" if pair.site.rsplit(".", 1)[-1].lower().startswith("k") else "q"
    x = next((t for r in (first_role, "q", "x") if (t := ctx.tensor(r, pair.site, like=pair.a)) is not None), None)
    positions = ctx.tensor("positions")
    if x is None or positions is None or positions.numel() != x.shape[0]:
        yield from _without_input(pair, first)
        return
    positions = positions.reshape(-1)
    sizes = [_rotary_size(x, t) for t in (pair.a, pair.b)]
    if sizes[0] != sizes[1]:
        text = f"{first}; A rotates {sizes[0]} columns of each head, B {sizes[1]} (the others pass through unchanged): partial rotary size on one side only"
        yield Explanation(
            code="rotary-size",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"size_a": sizes[0], "size_b": sizes[1]},
        )
        return
    keep = sizes[0]
    turns = (angles.best_turn(x[..., :keep], pair.a[..., :keep]), angles.best_turn(x[..., :keep], pair.b[..., :keep]))
    found = list(_compare_turns(pair, positions, turns, keep, first))
    yield from found
    if not found:
        yield from _rounding(pair, ctx, x, positions, turns, keep, first)


def _rotary_size(x: Tensor, out: Tensor) -> int:
    """Columns that are rotated: those past it pass through unchanged (a partial rotary embedding)."""
    moved = (out != x.to(out.dtype)).reshape(-1, x.shape[-1]).any(0)
    last = int(torch.nonzero(moved)[-1]) + 1 if bool(moved.any()) else x.shape[-1]
    return last if last % 2 == 0 and last <= 0.75 * x.shape[-1] else x.shape[-1]


def _unit(pair: Pair) -> float:
    """Relative size of the rounding that the angles are read through; inputs are 16 bit, also of a float32 output."""
    return max(pair.unit, 2.07e-4) if pair.lp else 1.65e-3


def _without_input(pair: Pair, first: str) -> Iterator[Explanation]:
    norm_a, norm_b = pair.a.double().norm(dim=-1), pair.b.double().norm(dim=-1)
    kept = float((norm_b / norm_a.clamp_min(1e-300) - 1).abs().max())
    if pair.change.rel_l2 > 12 * pair.unit and kept < 6 * pair.unit:
        text = f"{first}, the per-head L2 norm is preserved (within {kept:.1e}): both sides rotate, by different angles or another layout, not precision"
        yield Explanation(code="rotation", severity="semantic", text=text, proof="structure")


def _compare_turns(
    pair: Pair, positions: Tensor, turns: tuple[Turn, Turn], dim: int, first: str
) -> Iterator[Explanation]:
    """Layout, direction, gain, position offset, base: what the angles say."""
    a, b = turns
    limit = max(20 * _unit(pair), 0.02)
    if a.layout != b.layout and max(a.defect, b.defect) < limit:
        text = (
            f"{first}, per-head L2 norm preserved; A pairs columns {_pairing(a.layout)}, B {_pairing(b.layout)}: B matches A after permuting the "
            "head dim -> layout, not precision"
        )
        yield Explanation(
            code="layout", severity="semantic", text=text, proof="solved", numbers={"layout_a": a.layout, "layout_b": b.layout},
        )  # fmt: skip
        return
    if max(a.defect, b.defect) > limit:
        worse = "A" if a.defect > b.defect else "B"
        text = f"{worse} is not a rotation of its input: the length of a pair changes by {max(a.defect, b.defect):.2g} (rms)"
        yield Explanation(code="not-a-rotation", severity="semantic", text=text, proof="structure")
        return
    gain = b.gain / a.gain
    if abs(gain - 1) > 3e-3:
        text = f"B is A times {gain:.5g} at every position: an attention factor (yarn mscale) on one side only"
        yield Explanation(code="rope-gain", severity="semantic", text=text, proof="solved", numbers={"gain": gain})
        return
    delta = torch.angle(b.z * a.z.conj())
    if float(torch.quantile(delta.abs(), 0.9, dim=0).max()) < 8 * _unit(pair):
        return
    backwards = torch.angle(b.z * a.z)
    if float(backwards.abs().mean()) < 4 * _unit(pair):
        text = f"{first}; B rotates by the negative angle: the sign of sin is flipped"
        yield Explanation(code="rope-direction", severity="semantic", text=text, proof="solved")
        return
    yield from _angles_differ(pair, positions, turns, delta, dim, first)


def _pairing(layout: str) -> str:
    return "in neox halves (i, i + d/2)" if layout == "neox" else "interleaved (2i, 2i + 1)"


def _angles_differ(
    pair: Pair, positions: Tensor, turns: tuple[Turn, Turn], delta: Tensor, dim: int, first: str
) -> Iterator[Explanation]:
    a, b = turns
    if min(float(b.z.imag.abs().mean()), float(a.z.imag.abs().mean())) < 4 * _unit(pair):
        side = "B" if float(b.z.imag.abs().mean()) < float(a.z.imag.abs().mean()) else "A"
        text = f"{side} does not rotate at all: RoPE is missing, or every position is 0, on the {side} side"
        yield Explanation(code="missing-operation", severity="semantic", text=text, proof="solved")
        return
    freq_a, freq_b = angles.frequencies(a.z, positions), angles.frequencies(b.z, positions)
    for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rounded = positions.float().to(dtype).double()
        expected = (rounded - positions.double())[:, None] * freq_a
        ok = freq_a.isfinite()
        left = torch.angle(torch.exp(1j * (delta[:, ok] - expected[:, ok]))).abs().mean() if bool(ok.any()) else 1.0
        if bool((rounded != positions).any()) and float(left) < 0.1 * float(delta[:, ok].abs().mean()):
            text = f"{first}; B's angles are those of {word}(position): positions beyond {256 if word == 'bf16' else 2048} are rounded, neighbouring tokens share an angle"
            yield Explanation(
                code="rounded-positions", severity="semantic", text=text, proof="solved", numbers={"dtype": word}
            )
            return
    offset = _position_offset(delta, freq_a)
    if offset is not None:
        text = f"every angle is off by {offset} times its frequency: positions are offset by {offset} (harmless for attention scores if both q and k are)"
        yield Explanation(
            code="position-offset", severity="semantic", text=text, proof="solved", numbers={"offset": offset}
        )
        return
    base_a, base_b = angles.fit_base(freq_a, dim), angles.fit_base(freq_b, dim)
    found = compare_bases(base_a, base_b) if base_a and base_b else None
    if found is not None and _follows(b.z, positions, freq_b):
        yield found
        return
    ok = freq_a.isfinite() & freq_b.isfinite() & (freq_a > 0)
    if int(ok.sum()) >= 3 and _follows(b.z, positions, freq_b):
        ratio = freq_b[ok] / freq_a[ok]
        low, high = float(ratio.min()), float(ratio.max())
        if high - low > 0.02:
            text = f"{first}; frequencies are rescaled piecewise, by {low:.4g} to {high:.4g}: a llama3, yarn or NTK scaling on one side only"
            yield Explanation(
                code="rope-scaling", severity="semantic", text=text, proof="solved", numbers={"min": low, "max": high}
            )
            return
    n = max(1, len(positions) // 8)
    order = torch.argsort(positions)
    early, late = float(delta.abs()[order[:n]].mean()), float(delta.abs()[order[-n:]].mean())
    text = f"{first}; the angles differ, by {early:.2g} rad at the lowest positions and {late:.2g} at the highest"
    if late > 4 * early:
        text += ": the angle error grows with position (inv_freq or positions rounded to a 16-bit type)"
    severity = "biased-rounding" if float(delta.abs().max()) < 1.0 else "semantic"
    yield Explanation(
        code="angles", severity=severity, text=text, proof="solved", numbers={"early": early, "late": late}
    )


def _follows(z: Tensor, positions: Tensor, freq: Tensor) -> bool:
    """Whether the angles are position times frequency throughout, and not only on average."""
    ok = freq.isfinite()
    return float(torch.angle(z[:, ok] * torch.exp(-1j * positions.double()[:, None] * freq[ok])).abs().mean()) < 0.1


def _position_offset(delta: Tensor, freq: Tensor) -> int | None:
    """k with delta[t, i] == k * freq[i] (mod 2 pi) for all tokens, if there is one."""
    ok = freq.isfinite() & (freq > 1e-6)
    if int(ok.sum()) < 3:
        return None
    best, error = 0, math.inf
    for k in [k for n in range(1, 65) for k in (n, -n)]:
        e = float(torch.angle(torch.exp(1j * (delta[:, ok] - k * freq[ok]))).abs().mean())
        if e < error:
            best, error = k, e
    return best if error < 0.02 and error < 0.25 * float(delta[:, ok].abs().mean()) else None


def _rounding(
    pair: Pair, ctx: Context, x: Tensor, positions: Tensor, turns: tuple[Turn, Turn], dim: int, first: str
) -> Iterator[Explanation]:
    """Same angles: which contracts the two sides follow."""
    inv = ctx.tensor("inv_freq")
    if inv is None:
        freq = torch.stack([angles.frequencies(t.z, positions) for t in turns]).mean(0)
        base = angles.fit_base(freq, dim)
        if base is not None and base.residual < 0.05:
            inv = angles.inverse_frequencies(dim, base.round_theta)
    if inv is None:
        return
    if not pair.lp:
        yield from _float32_table(pair, x, positions, inv, turns[0].layout)
        return
    inputs = {"x": x, "positions": positions, "inv_freq": inv, "rotary_dim": dim}
    facts = [first]
    if rel_error(pair.b, pair.a) < 12 * pair.unit and pair.change.max_ulp > 4:
        facts.append("large ULP only where the two products cancel")
    yield from contract_difference(pair, ctx, "rope", inputs, facts)


def _float32_table(pair: Pair, x: Tensor, positions: Tensor, inv: Tensor, layout: str) -> Iterator[Explanation]:
    """Rotations kept in float32: which side used a rounded table."""
    angle = positions.double()[:, None] * inv.double()[None, :]
    table = torch.complex(angle.cos(), angle.sin())
    low = torch.complex(table.real.float().bfloat16().double(), table.imag.float().bfloat16().double())
    turned = {name: angles.pairs(x, layout) * t[:, None, :] for name, t in (("fp32", table), ("bf16", low))}
    found = []
    for out in (pair.a, pair.b):
        errors = {n: float((angles.pairs(out, layout) - t).abs().norm() / t.abs().norm()) for n, t in turned.items()}
        best = min(errors, key=lambda n: errors[n])
        found.append(best if errors[best] < 3e-4 else "")
    if found[0] and found[1] and found[0] != found[1]:
        side = "B" if found[1] == "bf16" else "A"
        text = f"the table is rounded to bf16 on the {side} side and float32 on the other; products are not rounded; the output stays float32"
        yield Explanation(
            code="rounded-table", severity="rounding-contract", text=text, proof="solved", numbers={"side": side}
        )
