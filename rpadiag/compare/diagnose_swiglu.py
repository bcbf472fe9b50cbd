"""Explanations of gated activations: which formula, which rounding. Shape legend: R rows, I columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rpadiag.compare.diagnose_contracts import contract_difference
from rpadiag.compare.explain import Context, Explanation, Pair, rel_error

MAX_ELEMENTS = 200_000  # what a formula is told apart on
FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu(gate) * up": lambda g, u: torch.nn.functional.silu(g) * u,
    "silu(up) * gate": lambda g, u: torch.nn.functional.silu(u) * g,
    "gelu_tanh(gate) * up": lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
    "gelu(gate) * up": lambda g, u: torch.nn.functional.gelu(g) * u,
    "gelu_tanh(up) * gate": lambda g, u: torch.nn.functional.gelu(u, approximate="tanh") * g,
    "gelu(up) * gate": lambda g, u: torch.nn.functional.gelu(u) * g,
    "gate * sigmoid(1.702 gate) * up": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "gate * sigmoid(1.702 gate) * (up + 1)": lambda g, u: g * torch.sigmoid(1.702 * g) * (u + 1),
    "relu(gate) * up": lambda g, u: torch.relu(g) * u,
    "relu(gate)^2 * up": lambda g, u: torch.relu(g).square() * u,
    "sigmoid(gate) * up": lambda g, u: torch.sigmoid(g) * u,
    "gate * up": lambda g, u: g * u,
    "silu(gate)": lambda g, u: torch.nn.functional.silu(g),
}


def activation(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two products of a gated activation."""
    gate, up = ctx.tensor("gate", like=pair.a), ctx.tensor("up", like=pair.a)
    if gate is None or up is None:
        yield from _fused_input(pair, ctx)
        return
    rows = slice(0, max(16, MAX_ELEMENTS // gate.shape[-1]))
    g, u = gate.reshape(-1, gate.shape[-1])[rows], up.reshape(-1, up.shape[-1])[rows]
    sides = (t.reshape(-1, t.shape[-1])[rows] for t in (pair.a, pair.b))
    (form_a, left_a, clamp_a), (form_b, left_b, clamp_b) = (_formula(g, u, side) for side in sides)
    limit = max(4 * pair.unit, 1e-5)
    names = [f"{f}{f' with inputs clamped at {c:g}' if c else ''}" for f, c in ((form_a, clamp_a), (form_b, clamp_b))]
    if max(left_a, left_b) < limit and names[0] != names[1] and _apart(g, u, form_a, form_b, clamp_a, clamp_b, limit):
        text = f"A computes {names[0]}, B computes {names[1]}: another formula, not precision"
        yield Explanation(
            code="formula", severity="semantic", text=text, proof="solved", numbers={"formula_a": names[0], "formula_b": names[1]},
        )  # fmt: skip
        return
    if max(left_a, left_b) > limit and min(left_a, left_b) < limit:
        side = "B" if left_b > left_a else "A"
        text = f"{side} is none of the known gated activations of gate and up (closest {form_b if side == 'B' else form_a}, relative {max(left_a, left_b):.2g}); the other side is {form_a if side == 'B' else form_b}"
        yield Explanation(
            code="unknown-formula", severity="semantic", text=text, proof="structure", numbers={"side": side}
        )
        return
    yield from contract_difference(pair, ctx, "swiglu", {"gate": gate, "up": up})


def _fused_input(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """gate and up as one tensor of twice the width: split in halves, or interleaved?"""
    width = pair.a.shape[-1]
    fused = next(
        (v for v in ctx.inputs.values() if isinstance(v, Tensor) and v.shape == (*pair.a.shape[:-1], 2 * width)), None
    )
    if fused is None:
        return
    splits = {
        "halves, gate first": (fused[..., :width], fused[..., width:]),
        "halves, up first": (fused[..., width:], fused[..., :width]),
        "interleaved, gate first": (fused[..., ::2], fused[..., 1::2]),
        "interleaved, up first": (fused[..., 1::2], fused[..., ::2]),
    }
    found = []
    for side in (pair.a, pair.b):
        best = min(
            (rel_error(FORMULAS["silu(gate) * up"](g.double(), u.double()), side), name)
            for name, (g, u) in splits.items()
        )
        found.append(best)
    if max(f[0] for f in found) < max(4 * pair.unit, 1e-5) and found[0][1] != found[1][1]:
        text = f"A splits gate and up as {found[0][1]}, B as {found[1][1]}: layout, not precision"
        yield Explanation(code="gate-up-layout", severity="semantic", text=text, proof="solved")
    elif found[0][1] == found[1][1]:
        gate, up = splits[found[0][1]]
        yield from contract_difference(pair, ctx, "swiglu", {"gate": gate.contiguous(), "up": up.contiguous()})


def _formula(gate: Tensor, up: Tensor, out: Tensor) -> tuple[str, float, float]:
    """(name, relative error, clamp or 0) of the formula closest to an output."""
    g, u = gate.double(), up.double()
    best = min(((rel_error(f(g, u), out), name) for name, f in FORMULAS.items()))
    if best[0] < 0.01:
        return best[1], best[0], 0.0
    for clamp in (7.0, 10.0, 20.0, 5.0):
        for name in ("silu(gate) * up", "gate * sigmoid(1.702 gate) * (up + 1)"):
            error = rel_error(FORMULAS[name](g.clamp(max=clamp), u.clamp(-clamp, clamp)), out)
            if error < min(best[0], 0.01):
                return name, error, clamp
    return best[1], best[0], 0.0


def _apart(gate: Tensor, up: Tensor, a: str, b: str, clamp_a: float, clamp_b: float, limit: float) -> bool:
    """The two formulas differ on these inputs by more than rounding hides."""

    def value(name: str, clamp: float) -> Tensor:
        g, u = gate.double(), up.double()
        return FORMULAS[name](g.clamp(max=clamp), u.clamp(-clamp, clamp)) if clamp else FORMULAS[name](g, u)

    return rel_error(value(a, clamp_a), value(b, clamp_b)) > 0.1 * limit
