"""Explanations of attention and of the key-value cache: which known variant each side computes.

Shape legend: H heads, T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rpadiag.compare.diagnose_structure import absolute_grid, prefix_boundary, saturated
from rpadiag.compare.explain import Context, Explanation, Pair, rel_error
from rpadiag.structure import same_values

MAX_HEADS, MAX_TOKENS = 8, 512
Variant = Callable[[Tensor, Tensor, Tensor], Tensor]


def cache(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """What was written to a key or value cache."""
    clip = next((e for e in saturated(pair) if e.code == "saturation"), None)
    grid = absolute_grid(pair.b), absolute_grid(pair.a)
    facts = []
    if clip is not None:
        facts.append(clip.text)
    if (grid[0] is None) != (grid[1] is None):
        side, step = ("B", grid[0]) if grid[0] is not None else ("A", grid[1])
        facts.append(f"{side} values collapse onto multiples of 2^{step}, the fp8 subnormal grid, when they are small")
    for name in ctx.a:  # the other half of the cache tells the same story at its own magnitude
        if name != pair.site and "cache" in name.lower() and ctx.a[name].shape == pair.a.shape:
            other = Pair(site=name, role=pair.role, a=ctx.a[name], b=ctx.b[name])
            facts += [f"{name}: {e.text}" for e in saturated(other) if e.code == "saturation"]
    if facts:
        text = (
            "kv-cache write: "
            + "; ".join(facts)
            + " -> unit scale (1.0) instead of a calibrated one; attention arithmetic itself is fine"
        )
        yield Explanation(
            code="unit-scale",
            severity="semantic",
            text=text,
            proof="solved",
            numbers={"grid_b": grid[0], "grid_a": grid[1]},
        )
        return
    yield from _quantised(pair, ctx)


def _quantised(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """One side quantised to fp8 with some scale, the other not."""
    for side, x, y in (("B", pair.b, pair.a), ("A", pair.a, pair.b)):
        error = rel_error(x, y)
        codes = torch.unique(x.float().abs()).numel()
        if codes <= 128 < torch.unique(y.float().abs()).numel() and 5e-3 < error < 0.2:
            text = f"{side} holds {codes} distinct magnitudes: quantised (fp8 or int8, relative error {error:.2g}), the other side is not"
            yield Explanation(
                code="quantised-cache",
                severity="semantic",
                text=text,
                proof="solved",
                numbers={"side": side, "num_values": codes},
            )
            return


def attention(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Scores [H, T, T] or outputs [H, T, D], from q, k and v where they were fed to both sides."""
    found = _inputs(pair, ctx)
    if found is None:
        return
    q, k, v, a, b = found
    is_scores = pair.role.kind == "scores" and a.shape[-1] == k.shape[1]
    window = prefix_boundary(a, b, axis=1)
    lp = torch.float16 if torch.float16 in (pair.a.dtype, q.dtype) else torch.bfloat16
    group = _group(pair, ctx)
    ways = (
        score_variants(q.shape[-1], lp)
        if is_scores
        else variants(q.shape[-1], lp, window[0] if window else None, group)
    )
    fits: list[list[tuple[float, str]]] = [[], []]
    for name, compute in ways.items():
        value = compute(q.double(), k.double(), v.double()).float()
        value = value.to(pair.a.dtype) if pair.lp else value
        for i, side in enumerate((a, b)):
            fits[i].append((rel_error(side, value), name))
    (left_a, form_a), (left_b, form_b) = (min(f) for f in fits)
    limit = 2 * pair.unit if pair.lp else 2e-5
    if not is_scores and min(left_a, left_b) < limit <= max(left_a, left_b):
        name, out, form = ("B", b, form_a) if left_b > left_a else ("A", a, form_b)
        yield from _solved(name, out, form, q, k, v, limit)
        return
    if form_a == form_b or max(left_a, left_b) > limit or not _beats(fits, form_a, form_b):
        return
    rounding = "rounded" in form_a + form_b
    text = f"A computes {form_a}, B computes {form_b}"
    if window is not None and "a window of" in form_a + form_b:
        more = "extra" if _window_of(form_b) > _window_of(form_a) else "missing"
        text = (
            f"rows 0..{window[0] - 1} bit-equal, every row from {window[0]} on differs -> one {more} key at distance {window[0]}: sliding window off by "
            f"one ({text})"
        )
    if "query rounded" in form_a + form_b:
        d = q.shape[-1]
        text += f" -> pre-scaled query rounding: head_dim {d} has the scale 1/sqrt({d}), which is not a power of two, so the scaled query does not fit"
        controls = [s for s in ctx.a if s != pair.site and ctx.a[s].ndim == 3 and same_values(ctx.a[s], ctx.b[s])]
        if controls:
            text += f"; bit-equal controls: {', '.join(controls)} (a head_dim whose scale is an exact power of two)"
    severity = "rounding-contract" if rounding else "semantic"
    yield Explanation(
        code="attention-form", severity=severity, text=text, proof="solved", numbers={"form_a": form_a, "form_b": form_b},
    )  # fmt: skip


def _solved(side: str, out: Tensor, form: str, q: Tensor, k: Tensor, v: Tensor, limit: float) -> Iterator[Explanation]:
    """A side that fits no form as it stands: with another scale, or with capped scores?"""
    q, k, v = q.double(), k.double(), v.double()
    base = (q @ k.mT) / math.sqrt(q.shape[-1])
    mask = _mask(q.shape[1], None)

    def error(change: Callable[[Tensor], Tensor]) -> float:
        return rel_error(out, change(base).masked_fill(~mask, -math.inf).softmax(-1) @ v)

    families: dict[str, tuple[Callable[[float], Callable[[Tensor], Tensor]], float, float]] = {
        "scale": (lambda t: lambda s: s * t, 0.02, 50.0),
        "cap": (lambda t: lambda s: t * torch.tanh(s / t), 1.0, 200.0),
    }
    for name, (make, low, high) in families.items():
        found = _search(lambda t, make=make: error(make(t)), low, high)  # type: ignore[misc]
        if error(make(found)) < limit:
            scale = found / math.sqrt(q.shape[-1])
            what = (
                f"scores scaled by {scale:.5g} = 1/sqrt({scale**-2:.4g})"
                if name == "scale"
                else f"scores capped as c * tanh(s / c) with c = {found:.4g}"
            )
            text = f"{side} computes attention with {what} (solved), the other side {form}"
            yield Explanation(
                code=f"attention-{name}",
                severity="semantic",
                text=text,
                proof="solved",
                numbers={name: scale if name == "scale" else found},
            )
            return


def _search(error: Callable[[float], float], low: float, high: float) -> float:
    """The argument with the smallest error, on a logarithmic grid refined around its best point."""
    for _ in range(5):
        grid = torch.logspace(math.log10(low), math.log10(high), 13).tolist()
        best = min(grid, key=error)
        step = (high / low) ** (1 / 12)
        low, high = best / step, best * step
    return best


def _group(pair: Pair, ctx: Context) -> int:
    """Query heads that share one key head, 1 where each has its own."""
    q, k = ctx.tensor("q", pair.site), ctx.tensor("k", pair.site)
    if q is None or k is None or q.ndim != 3 or k.ndim != 3:
        return 1
    axis = 1 if k.shape[0] == q.shape[0] and k.shape[1] != q.shape[1] else 0
    return max(1, q.shape[axis] // max(1, k.shape[axis]))


def _window_of(form: str) -> float:
    """Visible keys that a form names; unlimited when it names none."""
    return float(form.split("a window of ")[1].split()[0]) if "a window of" in form else math.inf


def _beats(fits: list[list[tuple[float, str]]], form_a: str, form_b: str) -> bool:
    """Each side is clearly closer to its own form than to the other side's."""
    a, b = ({name: error for error, name in f} for f in fits)
    return a[form_a] < 0.7 * a[form_b] and b[form_b] < 0.7 * b[form_a]


def _inputs(pair: Pair, ctx: Context) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """q, k, v, a, b as [H, T, D] with as many heads in k as in q."""
    q, k, v = (ctx.tensor(name, pair.site) for name in ("q", "k", "v"))
    if q is None or k is None or v is None or q.ndim != 3 or pair.a.ndim != 3:
        return None
    if q.shape[0] != pair.a.shape[0] or q.shape[1] != pair.a.shape[1]:
        return None
    a, b = pair.a, pair.b
    if k.shape[0] == q.shape[0] and k.shape[1] != q.shape[1]:  # token-major: [T, H, D]
        q, k, v, a, b = (t.transpose(0, 1) for t in (q, k, v, a, b))
    if q.shape[0] % k.shape[0] or q.shape[1] != k.shape[1] or q.shape[1] > MAX_TOKENS:
        return None
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    h = min(MAX_HEADS, q.shape[0])
    return q[:h], k[:h], v[:h], a[:h], b[:h]


def _mask(t: int, window: int | None) -> Tensor:
    i = torch.arange(t)
    seen = i[None, :] <= i[:, None]
    return seen if window is None else seen & (i[:, None] - i[None, :] < window)


def score_variants(d: int, lp: torch.dtype) -> dict[str, Variant]:
    """Ways to scale q @ k."""
    s = d**-0.5

    def low(x: Tensor) -> Tensor:
        return x.float().to(lp).double()

    return {
        "(q @ k) / sqrt(d)": lambda q, k, v: (q @ k.mT) * s,
        f"a scaled query rounded to {_name(lp)} times k": lambda q, k, v: low(q * s) @ k.mT,
        "q @ k without a scale": lambda q, k, v: q @ k.mT,
        "(q @ k) / d": lambda q, k, v: (q @ k.mT) / d,
        f"scores rounded to {_name(lp)} before they are scaled": lambda q, k, v: low(q @ k.mT) * s,
        f"scores rounded to {_name(lp)}": lambda q, k, v: low((q @ k.mT) * s),
    }


def _name(lp: torch.dtype) -> str:
    return "fp16" if lp == torch.float16 else "bf16"


def variants(d: int, lp: torch.dtype, window: int | None, group: int = 1) -> dict[str, Variant]:
    """Ways to compute attention outputs, with the window that the first differing row suggests."""
    scores = score_variants(d, lp)

    def low(x: Tensor) -> Tensor:
        return x.float().to(lp).double()

    def out(
        score: Variant, w: int | None = None, causal: bool = True, probs: Callable[[Tensor], Tensor] = lambda p: p
    ) -> Variant:
        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = _mask(q.shape[1], w) if causal else torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
            return probs(score(q, k, v).masked_fill(~mask, -math.inf).softmax(-1)) @ v

        return compute

    plain = scores["(q @ k) / sqrt(d)"]
    ways = {f"softmax({name}) @ v": out(score) for name, score in scores.items()}
    ways["softmax without a causal mask"] = out(plain, causal=False)
    ways[f"softmax with probabilities rounded to {_name(lp)} before v"] = out(plain, probs=low)
    if group > 1:

        def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index = (torch.arange(q.shape[0]) % (q.shape[0] // group)) * group
            return out(plain)(q, k[index], v[index])

        ways["attention with the key heads tiled instead of repeated"] = tiled
    if window is not None:
        for w in (window, window + 1):
            ways[f"a window of {w} visible keys"] = out(plain, w=w)
    return ways
