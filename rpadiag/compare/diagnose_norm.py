"""Explanations of RMSNorm and of the per-head norm before or after RoPE. Shape legend: R rows, C columns; T, H, D as in rope."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rpadiag.compare import angles
from rpadiag.compare.diagnose_contracts import contract_difference
from rpadiag.compare.explain import Context, Explanation, Pair, rel_error
from rpadiag.structure import same_values

ROUND_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3, 1e-2)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormFit:
    """One side as ``source * rstd[row] * factor[column]``: which source and factor fit, the inverse rms and epsilon of each row."""

    form: str
    rstd: Tensor
    eps: float
    eps_error: float
    residual: float
    smallest: float = 0.0  # mean square of the smallest row


def fit(source: Tensor, weight: Tensor | None, out: Tensor) -> NormFit:
    """The form of a norm [R, C] that leaves the smallest residual."""
    z, o = source.double(), out.double()
    w = None if weight is None else weight.double()
    centred = z - z.mean(1, keepdim=True)
    forms: dict[str, Tensor] = {"x": z, "x - mean": centred}
    if w is not None:
        forms |= {"x * w": z * w, "x * (1 + w)": z * (1 + w), "(x - mean) * w": centred * w}
    best: NormFit | None = None
    for form, product in forms.items():
        power = product.square().sum(1).clamp_min(1e-300)
        rstd = (product * o).sum(1) / power
        residual = float((o - product * rstd[:, None]).norm() / o.norm().clamp_min(1e-300))
        if best is None or residual < 0.9 * best.residual:
            base = centred if "mean" in form else z
            eps, error = _epsilon(rstd, base.square().mean(1))
            smallest = float(base.square().mean(1).min())
            best = NormFit(form=form, rstd=rstd, eps=eps, eps_error=error, residual=residual, smallest=smallest)
    assert best is not None
    return best


def _epsilon(rstd: Tensor, mean_square: Tensor) -> tuple[float, float]:
    """Epsilon in ``rstd = (mean_square + eps) ** -0.5`` and its standard error: rows of small mean square know it best."""
    each = rstd.square().clamp_min(1e-300).reciprocal() - mean_square
    weight = (mean_square + 1e-30).square().reciprocal()
    eps = float((each * weight).sum() / weight.sum())
    spread = ((each - eps) / mean_square.clamp_min(1e-30)).square().mean().sqrt()
    return eps, float(spread / weight.sum().sqrt())


def round_eps(eps: float, error: float) -> float:
    """The usual epsilon within the error of the solved one, or the solved one."""
    near = min(ROUND_EPS, key=lambda e: abs(e - eps))
    return near if abs(near - eps) < max(4 * error, 0.03 * abs(near)) else eps


def norm_sources(pair: Pair, ctx: Context) -> list[tuple[Tensor, Tensor | None]]:
    """What the norm may have read, float32, with the residual that is part of it: x plus the residual, or x alone."""
    x = norm_input(pair, ctx)
    if x is None:
        return []
    residual = ctx.tensor("residual", like=pair.a)
    alone: list[tuple[Tensor, Tensor | None]] = [(x.float(), None)]
    return alone if residual is None else [(x.float() + residual.float(), residual), *alone]


def norm_input(pair: Pair, ctx: Context) -> Tensor | None:
    """x of a norm: by its name, or the query or key of a per-head norm."""
    key = pair.site.lower().startswith("k")
    for role in ("x", "k" if key else "q", "q"):
        found = ctx.tensor(role, pair.site, like=pair.a)
        if found is not None:
            return found
    return None


def residual(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two residual streams: how much of the input and of the old residual each holds."""
    x, old = norm_input(pair, ctx), ctx.tensor("residual", like=pair.a)
    if x is None or old is None:
        return
    columns = torch.stack([x.double().reshape(-1), old.double().reshape(-1)], 1)
    held = [torch.linalg.lstsq(columns, t.double().reshape(-1, 1)).solution[:, 0] for t in (pair.a, pair.b)]
    left = [rel_error(t.double().reshape(-1), columns @ h) for t, h in zip((pair.a, pair.b), held, strict=True)]
    if max(left) < 4 * pair.unit + 1e-6 and float((held[0] - held[1]).abs().max()) > 0.01:
        forms = [f"{float(h[0]):.3g} * x + {float(h[1]):.3g} * residual" for h in held]
        text = f"A is {forms[0]}, B is {forms[1]} (solved): the residual is added another number of times, or scaled, on one side"
        yield Explanation(
            code="residual-form",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"form_a": forms[0], "form_b": forms[1]},
        )


def norm_output(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Two outputs of a norm."""
    sources = norm_sources(pair, ctx)
    if not sources:
        return
    width = pair.a.shape[-1]
    weight = ctx.tensor("weight")
    weight = weight if weight is not None and weight.shape == (width,) else None
    a, b = pair.a.reshape(-1, width), pair.b.reshape(-1, width)
    lost = list(_overflow(a, b, sources[-1][0].reshape(-1, width)))
    if lost:
        yield from lost
        return
    tried = [(fit(t.reshape(-1, width), weight, a), fit(t.reshape(-1, width), weight, b), t, r) for t, r in sources]
    fit_a, fit_b, source, added = min(tried, key=lambda t: min(t[0].residual, t[1].residual))
    z = source.reshape(-1, width)
    limit = 4 * pair.unit
    if weight is None and min(fit_a.residual, fit_b.residual) > max(limit, 1e-6):
        weight = common_weight(z, a)  # not known: what side A multiplied by stands for it
        fit_a, fit_b = fit(z, weight, a), fit(z, weight, b)
    if max(fit_a.residual, fit_b.residual) > max(limit, 1e-6) and not _is_rescaled(fit_a, fit_b, limit):
        yield from _other_norm(pair, z, weight, fit_a, fit_b, limit)
        return
    if fit_a.form != fit_b.form:
        text = f"A computes {fit_a.form} * rstd, B computes {fit_b.form} * rstd: another weight or mean on one side (per-column)"
        yield Explanation(
            code="norm-form",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"form_a": fit_a.form, "form_b": fit_b.form},
        )
        return
    wide = list(_across_heads(pair, fit_a, fit_b))
    found = _epsilons(pair, z, fit_a, fit_b) if not wide else wide[0]
    if found is not None:
        yield found
        return
    yield from _row_scalar(pair, z, fit_a, fit_b)
    yield from _norm_contracts(pair, ctx, weight, added, fit_a)


def _overflow(a: Tensor, b: Tensor, z: Tensor) -> Iterator[Explanation]:
    """Rows that are zero on one side only, although their input is not: an infinite sum of squares."""
    for side, x, other in (("B", b, a), ("A", a, b)):
        rows = (x == 0).all(1) & (other != 0).any(1) & (z != 0).any(1)
        n = int(rows.sum())
        if n:
            largest = float(z[rows].abs().max())
            text = (
                f"{side} is zero in {n:,} whole rows (largest input {largest:.4g}): the sum of squares overflowed to infinity (65504 is the largest fp16), so the "
                "inverse rms is 0"
            )
            yield Explanation(
                code="overflow", severity="fatal", text=text, proof="solved", numbers={"side": side, "num_rows": n}
            )
            return


def common_weight(z: Tensor, out: Tensor) -> Tensor:
    """The factor of each column [C] in ``out = rstd[row] * z * factor``, float64, by alternating least squares.

    Factors are scaled so that the row of largest norm has the inverse rms that no epsilon touches.
    """
    x, y = z.double(), out.double()
    mean_square = x.square().mean(1)
    rstd = (mean_square + 1e-30).rsqrt()
    factor = torch.ones(x.shape[1], dtype=torch.float64)
    for _ in range(4):
        rows = x * rstd[:, None]
        factor = (rows * y).sum(0) / rows.square().sum(0).clamp_min(1e-300)
        columns = x * factor
        rstd = (columns * y).sum(1) / columns.square().sum(1).clamp_min(1e-300)
    top = mean_square.argmax()
    return factor * rstd[top] * mean_square[top].sqrt()


def _is_rescaled(a: NormFit, b: NormFit, limit: float) -> bool:
    return a.form == b.form and max(a.residual, b.residual) < 1.5 * limit


def _other_norm(
    pair: Pair, z: Tensor, weight: Tensor | None, a: NormFit, b: NormFit, limit: float
) -> Iterator[Explanation]:
    side, out = ("B", pair.b) if b.residual > a.residual else ("A", pair.a)
    out = out.reshape(-1, z.shape[-1]).double()
    unit = z.double() / z.double().square().mean(1, keepdim=True).clamp_min(1e-300).sqrt()
    column = (unit * out).sum(0) / unit.square().sum(0).clamp_min(1e-300)
    left = float((out - unit * column).norm() / out.norm().clamp_min(1e-300))
    if left < limit:
        text = f"{side} is the normalised input times another weight vector (solved per column: {float(column.min()):.4g} to {float(column.max()):.4g}): wrong or stale norm weight"
        yield Explanation(code="norm-weight", severity="semantic", text=text, proof="solved", numbers={"side": side})
        return


def _epsilons(pair: Pair, z: Tensor, a: NormFit, b: NormFit) -> Explanation | None:
    """A different epsilon, solved on each side, and only where it explains the gain of every row."""
    error = math.hypot(a.eps_error, b.eps_error)
    mean_square = z.double().square().mean(1)
    gain = b.rstd / a.rstd
    if abs(a.eps - b.eps) < max(6 * error, 0.02 * abs(a.eps), 0.02 * abs(b.eps)):
        return None
    if float((gain - 1).abs().max()) < 2 * pair.unit:
        return None  # rounding patterns bias a row by that much
    eps_a, eps_b = round_eps(a.eps, a.eps_error), round_eps(b.eps, b.eps_error)
    tolerance = max(3 * pair.unit, 1e-5)
    usual = eps_a in ROUND_EPS and eps_b in ROUND_EPS
    outside = None if usual else _outside(mean_square, a, b, eps_a, eps_b, tolerance)
    if outside is not None:
        return outside
    if eps_a >= 0 and eps_b >= 0:
        predicted = ((mean_square + eps_a) / (mean_square + eps_b)).sqrt()
        if float((gain / predicted - 1).abs().max()) < tolerance:
            return _eps_mismatch(eps_a, eps_b, gain)
    return None


def _outside(
    mean_square: Tensor, a: NormFit, b: NormFit, eps_a: float, eps_b: float, tolerance: float
) -> Explanation | None:
    """One side adds a usual epsilon to the root instead of under it."""
    for side, rstd, other in (("B", b.rstd, eps_a), ("A", a.rstd, eps_b)):
        solved = float((rstd.reciprocal() - mean_square.sqrt())[mean_square.argmin()])
        eps = round_eps(solved, 0.03 * abs(solved))
        misses = float((rstd * (mean_square.sqrt() + eps) - 1).abs().max())
        if eps > 0 and eps in ROUND_EPS and misses < tolerance:
            text = (
                f"eps mismatch: {side} adds eps = {eps:.3g} to the root (outside), the other side {max(other, 0.0):.3g} under it: one-sided gain per row, huge "
                "for small-rms rows, none for large-rms rows"
            )
            return Explanation(
                code="epsilon", severity="semantic", text=text, proof="solved", numbers={"eps_outside": eps}
            )
    return None


def _eps_mismatch(eps_a: float, eps_b: float, gain: Tensor) -> Explanation:
    way = "away from zero" if eps_b < eps_a else "toward zero"
    text = (
        f"eps mismatch: solved eps A = {eps_a:.3g}, B = {eps_b:.3g}; one-sided gain sqrt((ms + {eps_a:.3g}) / (ms + {eps_b:.3g})) per row "
        f"({float(gain.min()):.4g} to {float(gain.max()):.4g}, {way}): huge for small-rms rows, none for large-rms rows"
    )
    numbers = {"eps_a": eps_a, "eps_b": eps_b, "max_gain": float(gain.max()), "min_gain": float(gain.min())}
    return Explanation(code="epsilon", severity="semantic", text=text, proof="solved", numbers=numbers)


def _across_heads(pair: Pair, a: NormFit, b: NormFit) -> Iterator[Explanation]:
    """A per-head norm against one norm over all heads together: one inverse rms per token on one side."""
    if pair.a.ndim != 3 or pair.a.shape[1] < 2:
        return
    spread = []
    for rstd in (a.rstd, b.rstd):
        by_token = rstd.reshape(pair.a.shape[:2])
        spread.append(float((by_token / by_token.mean(1, keepdim=True) - 1).abs().max()))
    if min(spread) < 4 * pair.unit and max(spread) > 20 * pair.unit:
        one = "A" if spread[0] < spread[1] else "B"
        text = f"{one} normalises all heads of a token together (one inverse rms per token), the other side each head alone"
        yield Explanation(code="norm-width", severity="semantic", text=text, proof="solved", numbers={"side": one})


def _row_scalar(pair: Pair, z: Tensor, a: NormFit, b: NormFit) -> Iterator[Explanation]:
    """The rows of one side are scaled by an inverse rms, or divided by a variance, that was rounded to lp."""
    dtype = pair.a.dtype if pair.lp else torch.bfloat16
    name = {torch.float16: "fp16"}.get(dtype, "bf16")
    mean_square = (z.double().square().mean(1) + max(a.eps, 0.0)).float()
    exact = mean_square.double().rsqrt()
    rounded = {
        f"{name}(inv)/inv": exact.float().to(dtype).double() / exact,
        f"sqrt(var/{name}(var))": (mean_square.double() / mean_square.to(dtype).double()).sqrt(),
    }
    gain = b.rstd / a.rstd
    found = []
    for side, observed in (("B", gain), ("A", 1 / gain)):
        for formula, expected in rounded.items():
            if float((observed - 1).std()) > 0.2 * float((expected - 1).std()) > 0:
                found.append((float(torch.corrcoef(torch.stack([observed, expected]))[0, 1]), side, formula))
    if found and max(found)[0] > 0.9:
        match, side, formula = max(found)
        what = "inverse rms" if "inv" in formula else "variance"
        text = (
            f"row-coherent sign: the row gain of {side} equals {formula} (correlation {match:.3f}), |row gain - 1| <= 2^-8: the {what} is rounded to {name} on "
            f"the {side} side, a whole row is scaled by one imprecise scalar"
        )
        yield Explanation(
            code="rounded-rstd", severity="biased-rounding", text=text, proof="solved", numbers={"side": side, "correlation": match},
        )  # fmt: skip


def _norm_contracts(
    pair: Pair, ctx: Context, weight: Tensor | None, residual: Tensor | None, fitted: NormFit
) -> Iterator[Explanation]:
    inputs = {"x": norm_input(pair, ctx), "residual": residual, "weight": weight}
    facts: list[str] = []
    if weight is not None:
        ones = weight.float() == 1
        if bool(ones.any()) and same_values(pair.a[..., ones], pair.b[..., ones]):
            facts.append("columns with w exactly 1 are equal -> weight-multiply cast order")
    streams = [s for s in ctx.a if "resid" in s.lower() and ctx.a[s].shape == pair.a.shape]
    if streams and all(same_values(ctx.a[s], ctx.b[s]) for s in streams):
        facts.append("residual stream bit-equal, so this is the fused-add contract")
    given = ctx.number("eps")
    for eps in [given] if given is not None else likely_eps(fitted):
        found = list(contract_difference(pair, ctx, "rmsnorm", {**inputs, "eps": eps}, facts))
        if any(e.complete for e in found):
            yield from found
            return
    if weight is not None and pair.lp and not same_values(weight.to(pair.a.dtype), weight):
        low = {**inputs, "weight": weight.to(pair.a.dtype), "eps": given or likely_eps(fitted)[0]}
        full = {**low, "weight": weight}
        if ctx.contracts is not None:
            fits = [
                (bool(ctx.contracts("rmsnorm", full, t)[0]), bool(ctx.contracts("rmsnorm", low, t)[0]))
                for t in (pair.a, pair.b)
            ]
            if fits in ([(True, False), (False, True)], [(False, True), (True, False)]):
                side = "B" if fits[1][1] else "A"
                text = f"the weight itself is rounded to {pair.lp} on the {side} side and float32 on the other: per-column, the same sign down each column"
                yield Explanation(
                    code="rounded-weight",
                    severity="biased-rounding",
                    text=text,
                    proof="identity",
                    numbers={"side": side},
                )


def likely_eps(fitted: NormFit) -> list[float]:
    """Usual epsilons that the solved one does not exclude, the usual first; where rows are large, none is excluded."""
    margin = max(5 * fitted.eps_error + 0.03 * abs(fitted.eps), 4e-3 * fitted.smallest)
    usual = [e for e in (1e-6, 1e-5, *ROUND_EPS) if abs(e - fitted.eps) < margin]
    return list(dict.fromkeys(usual))[:3] or [fitted.eps]


def norm_and_rope(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """A query after per-head norm and RoPE: was the norm before or after?"""
    x, weight, positions = ctx.tensor("q", pair.site, like=pair.a), ctx.tensor("weight"), ctx.tensor("positions")
    if x is None or weight is None or positions is None or pair.a.ndim != 3 or weight.shape != x.shape[-1:]:
        return
    z = x.double()
    normed = z * (z.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    orders = [_order(normed, weight.double(), side) for side in (pair.a, pair.b)]
    (order_a, defect_a), (order_b, defect_b) = orders
    if order_a != order_b and max(defect_a, defect_b) < max(30 * pair.unit, 0.03):
        first = rel_error(pair.b[positions == 0], pair.a[positions == 0]) if bool((positions == 0).any()) else math.nan
        spread = float((weight.float() / weight.float().mean() - 1).std())
        text = (
            f"order of norm and rope swapped: A computes {order_a}, B {order_b}; position 0 agrees to rounding (relative {first:.1e}), per-head L2 "
            f"norm differs slightly, the error scales with the spread of the norm weight ({spread:.2g} relative; zero for a constant weight) -> order, not precision"
        )
        yield Explanation(
            code="order-swapped",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"order_a": order_a, "order_b": order_b},
        )
        return
    if order_a == order_b == "rope(norm(q))":
        mids = [(normed * weight.double()).float().to(pair.a.dtype)]
        turns = [angles.best_turn(mids[0], side) for side in (pair.a, pair.b)]
        freq = torch.stack([angles.frequencies(t.z, positions.reshape(-1)) for t in turns]).mean(0)
        base = angles.fit_base(freq, x.shape[-1])
        if base is not None and base.residual < 0.05:
            inv = angles.inverse_frequencies(x.shape[-1], base.round_theta)
            inputs = {
                "x": x,
                "weight": weight,
                "positions": positions,
                "inv_freq": inv,
                "eps": ctx.number("eps") or 1e-6,
            }
            yield from contract_difference(pair, ctx, "qk_norm", inputs)


def _order(normed: Tensor, weight: Tensor, out: Tensor) -> tuple[str, float]:
    """Which of the two orders keeps the length of every pair, and by how much it misses."""
    before = angles.best_turn(normed * weight, out).defect
    after = angles.best_turn(normed, out.double() / torch.where(weight == 0, 1.0, weight)).defect
    return ("rope(norm(q))", before) if before <= after else ("norm(rope(q))", after)
