"""Explanations from rounding contracts: which axes the two sides choose differently.

The contracts of each side come from ``Context.contracts`` (the fingerprint), which is handed in: this package knows no region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rpadiag.compare.explain import Context, Explanation, Pair, percent
from rpadiag.contracts import Contract

SEVERITY_OF_AXIS = {"store": "biased-rounding", "rstd": "biased-rounding", "weight": "semantic", "layout": "semantic"}

# (region, axis): what it is about, and what each value means for it
WORDS: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("rope", "cache"): ("the table", {"lp": "is rounded", "fp32": "is not rounded"}),
    ("rope", "products"): (
        "products",
        {
            "lp": "are rounded",
            "fp32": "are not rounded (single output rounding)",
            "lp-fma": "are rounded but one, which is fused",
        },
    ),
    ("rope", "fused"): ("the fused product of (o1, o2)", {}),
    ("rope", "layout"): ("the pair layout", {"neox": "is neox halves", "interleaved": "is interleaved"}),
    ("rmsnorm", "sum"): ("the sum", {"lp": "is rounded before it is scaled", "fp32": "is scaled unrounded"}),
    ("rmsnorm", "variance"): (
        "the variance",
        {"rounded": "is of the rounded sum", "unrounded": "is of the unrounded sum"},
    ),
    ("rmsnorm", "scale"): (
        "the normalised value",
        {"lp": "is rounded before the weight multiply", "fp32": "is multiplied by the weight in fp32 and rounded once"},
    ),
    ("rmsnorm", "weight"): (
        "the factor",
        {"w": "is w", "1+w": "is 1+w", "lp(1+w)": "is 1+w rounded", "none": "is missing"},
    ),
    ("rmsnorm", "rstd"): (
        "the inverse rms",
        {"fp32": "is kept in fp32", "lp": "is rounded (the row gain is bf16(inv)/inv: row-coherent sign)"},
    ),
    ("swiglu", "silu"): (
        "silu(gate)",
        {"lp": "is rounded before the product with up", "fp32": "stays fp32, one rounding"},
    ),
    ("swiglu", "sigmoid"): ("the sigmoid", {"fp32": "stays fp32", "lp": "is rounded"}),
    ("qk_norm", "mid"): ("the normed value", {"lp": "is rounded before RoPE", "fp32": "reaches RoPE unrounded"}),
}
STORE = ("the output", {"rne": "is rounded to nearest", "truncate": "is truncated toward zero"})


def contract_difference(
    pair: Pair, ctx: Context, region: str, inputs: Mapping[str, Any], facts: Sequence[str] = ()
) -> Iterator[Explanation]:
    """Which contract each side follows at a site, and the axes on which they differ."""
    if ctx.contracts is None or pair.lp is None:
        return
    (a, _), (b, exact) = (ctx.contracts(region, inputs, side) for side in (pair.a, pair.b))
    if not a and not b:
        return
    if not a or not b:
        side, known = ("B", a) if a else ("A", b)
        text = f"{'A' if a else 'B'} follows {known[0].name(pair.lp)}; {side} follows no known contract"
        yield Explanation(
            code="unknown-contract", severity="rounding-contract", text=text, proof="structure", numbers={"side": side}
        )
        return
    one, two = _closest(a, b)
    axes = differing_axes(one, two)
    numbers = {
        "contract_a": one.name(pair.lp), "contract_b": two.name(pair.lp), "axes": axes, "differing": pair.change.differing,
    }  # fmt: skip
    tail = (
        f"; {percent(pair.change.differing)} of {pair.change.n:,} elements differ, at most {pair.change.max_ulp:,} ULP"
    )
    if not axes:
        text = f"same contract on both sides ({one.name(pair.lp)}){tail}: order, transcendental or fused multiply-add"
        yield Explanation(code="same-contract", severity="ulp-noise", text=text, proof="solved", numbers=numbers)
        return
    sentences = [sentence(region, axis, one, two, pair.lp) for axis in axes]
    shared = [shared_sentence(region, axis, one, pair.lp) for axis in _worth_saying(region, one) if axis not in axes]
    severity = max((_severity(x, one, two) for x in axes), key=_ORDER.index)
    bias = ", unbiased" if severity == "rounding-contract" and abs(pair.change.sign_balance) < 0.05 else ""
    stacked = (
        "two stacked contracts: " if len(axes) == 2 else f"{len(axes)} stacked contracts: " if len(axes) > 2 else ""
    )
    identity = f"; B == {two.name(pair.lp)}{' bit for bit' if exact else ' but for rare elements'}"
    text = stacked + "; ".join([*sentences, *shared, *facts]) + tail + bias + identity
    yield Explanation(code="contract", severity=severity, text=text, proof="identity", numbers=numbers)


def _severity(axis: str, a: Contract, b: Contract) -> str:
    """Rounding 1 + w is rounding; another factor is another formula."""
    if axis == "weight" and {str(getattr(a, axis)), str(getattr(b, axis))} == {"1+w", "lp(1+w)"}:
        return "rounding-contract"
    return SEVERITY_OF_AXIS.get(axis, "rounding-contract")


_ORDER = ["ulp-noise", "rounding-contract", "biased-rounding", "semantic"]


def _closest(a: Sequence[Contract], b: Sequence[Contract]) -> tuple[Contract, Contract]:
    """The pair with the fewest axes between them: where the data cannot tell, no difference is claimed."""
    return min(((x, y) for x in a for y in b), key=lambda p: len(differing_axes(*p)))


def differing_axes(a: Contract, b: Contract) -> list[str]:
    """Level-one axes on which two contracts of a region differ; ``fused`` belongs to ``products``."""
    axes = [x.name for x in a.axes if x.level == 1 and getattr(a, x.name) != getattr(b, x.name)]
    return [x for x in axes if x != "fused" or "products" not in axes]


def sentence(region: str, axis: str, a: Contract, b: Contract, lp: str) -> str:
    """``the table is not rounded (A) and is rounded to bf16 (B)``."""
    subject, words = WORDS.get((region, axis), STORE if axis == "store" else (axis, {}))
    one, two = (str(getattr(c, axis)) for c in (a, b))
    return f"{subject} {words.get(one, one)} on A and {words.get(two, two)} on B ({axis}: {one.replace('lp', lp)} -> {two.replace('lp', lp)})"


def shared_sentence(region: str, axis: str, contract: Contract, lp: str) -> str:
    """What both sides do on an axis."""
    subject, words = WORDS[(region, axis)]
    value = str(getattr(contract, axis))
    return f"{subject} {words.get(value, value)} on both"


def _worth_saying(region: str, contract: Contract) -> list[str]:
    """Axes whose shared value belongs to the answer (the other half of the same operation)."""
    del contract
    return {"rope": ["cache", "products"], "qk_norm": [], "swiglu": []}.get(region, [])
