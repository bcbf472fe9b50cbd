"""Rounding contracts: where an implementation of a region rounds. Data, not code.

``lp`` is the 16-bit model dtype (bfloat16 or float16); ``fp32`` means the value stays in float32.
*Level-one* axes say at which points a value is rounded to lp; each moves a sizeable share of output
elements. *Level-two* axes say how the float32 value in between is computed; they move about one element
in 1e4 or fewer. *Backward* axes say where the gradient computation rounds.

A contract is read by three things: the PyTorch reference in ``rpadiag.regions``, the compile-time flags of
the Triton kernels, and the report. Names read from the input to the output, for example
``rmsnorm: sum=bf16 variance=rounded scale=fp32 -> bf16``.

Axes may be added at the end of a region (a default keeps old JSON readable), never renamed. Added since the first
version: rmsnorm ``reduction`` (level 2) and ``dsum`` (backward), rope ``grad_fused`` (backward); ``canonical``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rpadiag.errors import UsageError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One choice of a contract. ``named``: always part of the name; other axes only when not the default."""

    name: str
    values: tuple[str, ...]
    level: int | str  # 1, 2 or "backward"
    text: str
    named: bool = False


class Contract:
    """Base of the region contracts: validation, naming, JSON, enumeration."""

    region: ClassVar[str]
    axes: ClassVar[tuple[Axis, ...]]

    def __post_init__(self) -> None:
        for axis in self.axes:
            value = getattr(self, axis.name)
            if value not in axis.values:
                raise unknown_name(f"value of {self.region} axis {axis.name}", str(value), axis.values)

    def name(self, dtype: str = "bf16") -> str:
        """Readable name, with ``lp`` written as the dtype: ``rope: cache=bf16 products=fp32 -> bf16``."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        parts = []
        for axis in self.axes:
            value = getattr(self, axis.name)
            if axis.named or value != defaults[axis.name]:
                parts.append(f"{axis.name}={value.replace('lp', dtype)}")
        return f"{self.region}: {' '.join(parts)} -> {dtype}"

    def __str__(self) -> str:
        return self.name()

    def replace(self, **changes: str) -> Self:
        """A copy with some axes changed; unknown axes or values raise."""
        self._check_axes(changes)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def _check_axes(cls, values: Mapping[str, Any]) -> None:
        known = [a.name for a in cls.axes]
        for axis in values:
            if axis not in known:
                raise unknown_name(f"axis of {cls.region}", axis, known)

    def to_dict(self) -> dict[str, str]:
        """All axes by name, plus the region."""
        return {"region": self.region, **{a.name: getattr(self, a.name) for a in self.axes}}

    def canonical(self, **facts: bool) -> Self:
        """The contract with every axis that cannot matter set to its default: two contracts that give the same
        bits on every input have the same canonical form. ``facts`` about the data are region specific."""
        if facts:
            raise unknown_name(f"fact for {self.region}", next(iter(facts)), ())
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`; absent axes take their defaults, unknown ones raise."""
        values = {k: v for k, v in data.items() if k != "region"}
        cls._check_axes(values)
        return cls(**values)

    @classmethod
    def space(cls, *, levels: tuple[int | str, ...] = (1,), **fixed: str) -> Iterator[Self]:
        """Every contract over the axes of the given levels, other axes at their default; ``fixed`` pins axes."""
        cls._check_axes(fixed)
        free = [a for a in cls.axes if a.level in levels and a.name not in fixed]
        for values in itertools.product(*(a.values for a in free)):
            yield cls(**fixed, **dict(zip((a.name for a in free), values, strict=True)))


_STORE = Axis(
    name="store",
    values=("rne", "truncate"),
    level=1,
    text="how the output is rounded to lp: to nearest even, or toward zero",
)


@dataclass(frozen=True, kw_only=True)
class RmsNormContract(Contract):
    """Residual add and the RMSNorm that reads it; without a residual, ``sum`` and ``variance`` are empty.

    ``s = x + r`` in fp32; ``y = store(w * round_scale((s_or_lp(s)) * rstd))`` with
    ``rstd = rsqrt(mean(square(s or lp(s))) + eps)``. The stored residual is ``store(s)`` always, and the rounded
    sum that a contract reads is the stored one. ``reduction=lanes8``: eight running sums over columns 0..7 mod 8,
    then added one after another (vLLM's CPU kernels built for AVX2). ``reduction=warps8``: eight consecutive columns a
    thread, a shuffle tree over the 32 threads of a warp, then the warps in order (vLLM's CUDA kernels; with a residual
    a thread adds the columns in pairs first).
    ``dsum``: the gradient of the stored residual is added to the norm's input gradient after that was rounded to lp
    (two operations, as autograd does for a separate add) or before (one fused operation, one rounding).
    """

    region: ClassVar[str] = "rmsnorm"
    axes: ClassVar[tuple[Axis, ...]] = (
        Axis(
            name="sum",
            values=("lp", "fp32"),
            level=1,
            named=True,
            text="the sum that is scaled: rounded to lp, or as added in fp32",
        ),
        Axis(name="variance", values=("rounded", "unrounded"), level=1, named=True, text="the sum that is squared"),
        Axis(
            name="scale",
            values=("lp", "fp32"),
            level=1,
            named=True,
            text="the normalised value before the weight: rounded to lp or kept",
        ),
        Axis(
            name="weight", values=("w", "1+w", "lp(1+w)", "none"), level=1, text="what multiplies the normalised value"
        ),
        Axis(name="rstd", values=("fp32", "lp"), level=1, text="the inverse rms: kept in fp32 or rounded to lp"),
        _STORE,
        Axis(name="root", values=("rsqrt", "1/sqrt"), level=2, text="how the inverse root is taken"),
        Axis(name="mean", values=("sum/n", "sum*(1/n)"), level=2, text="how the mean is taken"),
        Axis(
            name="order",
            values=("(x*r)*w", "x*(r*w)", "(x*w)*r"),
            level=2,
            text="order of the two products when scale=fp32",
        ),
        Axis(
            name="dn",
            values=("lp", "fp32"),
            level="backward",
            text="gradient of the normalised value: rounded to lp or kept",
        ),
        Axis(
            name="dw",
            values=("lp", "lp-xhat", "fp32"),
            level="backward",
            text="terms of the weight gradient: product rounded to lp, xhat rounded to lp, or all in fp32",
        ),
        Axis(
            name="reduction",
            values=("native", "lanes8", "warps8"),
            level=2,
            text="order of the sum of squares: the backend's own, eight running sums, or eight columns a thread of a warp",
        ),
        Axis(
            name="dsum",
            values=("lp", "fp32"),
            level="backward",
            text="gradient of the norm's input before the stored residual's is added: rounded to lp or kept",
        ),
    )
    sum: str = "lp"
    variance: str = "rounded"
    scale: str = "lp"
    weight: str = "w"
    rstd: str = "fp32"
    store: str = "rne"
    root: str = "rsqrt"
    mean: str = "sum/n"
    order: str = "(x*r)*w"
    dn: str = "lp"
    dw: str = "lp"
    reduction: str = "native"
    dsum: str = "lp"

    def canonical(self, *, residual: bool = True, **facts: bool) -> Self:
        """As in the base class. Without a ``residual`` the axes sum, variance and dsum are empty; ``order`` and
        ``root`` need what they order; an empty weight has no gradient and no rounding before it."""
        changes: dict[str, str] = {}
        if not residual:
            changes |= {"sum": "lp", "variance": "rounded", "dsum": "lp"}
        if self.weight == "none":
            changes |= {"order": "(x*r)*w", "dw": "lp"}
        elif self.scale == "lp":
            changes |= {"order": "(x*r)*w"}
        return super().canonical(**facts).replace(**changes)


@dataclass(frozen=True, kw_only=True)
class RopeContract(Contract):
    """Rotary embedding of a query or key.

    ``o1 = x1*c - x2*s``, ``o2 = x2*c + x1*s``. products=fp32: both products and the sum in fp32, one rounding.
    products=lp: each product and the sum rounded. products=lp-fma: one product of each output is fused into the
    sum unrounded, the other is rounded first; ``fused`` names the fused one for (o1, o2): ``c`` or ``s``. The fused
    product and the sum are rounded once, as the fma.rn.bf16 instruction does.
    With an lp cache and lp inputs every product is exact in fp32, so the ``fma`` axis is empty there.
    The gradient is ``d1 = g1*c + g2*s``, ``d2 = g2*c - g1*s``; ``grad_fused`` is read when grad_products=lp-fma only.
    """

    region: ClassVar[str] = "rope"
    axes: ClassVar[tuple[Axis, ...]] = (
        Axis(name="cache", values=("lp", "fp32"), level=1, named=True, text="cos and sin: rounded to lp or fp32"),
        Axis(
            name="products", values=("lp", "fp32", "lp-fma"), level=1, named=True, text="the two products and their sum"
        ),
        Axis(
            name="fused",
            values=("--", "cc", "cs", "sc", "ss"),
            level=1,
            text="which product of (o1, o2) is fused when products=lp-fma",
        ),
        Axis(name="layout", values=("neox", "interleaved"), level=1, text="pairs (i, i+d/2) or (2i, 2i+1)"),
        _STORE,
        Axis(
            name="fma",
            values=("--", "cc", "cs", "sc", "ss"),
            level=2,
            text="fp32 fused multiply-add per output when products=fp32 and cache=fp32",
        ),
        Axis(
            name="grad_products",
            values=("lp", "fp32", "lp-fma"),
            level="backward",
            text="the same choice for the gradient",
        ),
        Axis(
            name="grad_fused",
            values=("cc", "cs", "sc", "ss"),
            level="backward",
            text="which product of (d1, d2) is fused when grad_products=lp-fma",
        ),
    )
    cache: str = "lp"
    products: str = "lp"
    fused: str = "--"
    layout: str = "neox"
    store: str = "rne"
    fma: str = "--"
    grad_products: str = "lp"
    grad_fused: str = "cc"

    def canonical(self, **facts: bool) -> Self:
        """As in the base class: ``fma`` needs an fp32 cache and fp32 products, ``grad_fused`` a fused gradient."""
        changes: dict[str, str] = {}
        if self.cache == "lp" or self.products != "fp32":
            changes["fma"] = "--"
        if self.grad_products != "lp-fma":
            changes["grad_fused"] = "cc"
        return super().canonical(**facts).replace(**changes)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.products == "lp-fma") != (self.fused != "--"):
            raise UsageError(
                f"rope axes products={self.products} and fused={self.fused} contradict each other",
                hint="products=lp-fma needs fused=cc, cs, sc or ss; every other value needs fused=--",
            )

    @classmethod
    def space(cls, *, levels: tuple[int | str, ...] = (1,), **fixed: str) -> Iterator[Self]:
        """As in the base class, less the combinations that contradict each other."""
        cls._check_axes(fixed)
        free = [a for a in cls.axes if a.level in levels and a.name not in fixed]
        names = [a.name for a in free]
        for values in itertools.product(*(a.values for a in free)):
            chosen = {**fixed, **dict(zip(names, values, strict=True))}
            fused_gradient = chosen.get("grad_products", "lp") == "lp-fma" or chosen.get("grad_fused", "cc") == "cc"
            if fused_gradient and (chosen.get("products", "lp") == "lp-fma") == (chosen.get("fused", "--") != "--"):
                yield cls(**chosen)


@dataclass(frozen=True, kw_only=True)
class SwigluContract(Contract):
    """``out = store(round_silu(silu(gate)) * up)``."""

    region: ClassVar[str] = "swiglu"
    axes: ClassVar[tuple[Axis, ...]] = (
        Axis(
            name="silu",
            values=("lp", "fp32"),
            level=1,
            named=True,
            text="silu(gate) before the product: rounded to lp or kept",
        ),
        Axis(name="sigmoid", values=("fp32", "lp"), level=1, text="the sigmoid: kept in fp32 or rounded to lp"),
        _STORE,
        Axis(name="formula", values=("x/(1+e)", "x*(1/(1+e))", "x*u/(1+e)"), level=2, text="how silu is written"),
        Axis(name="exp", values=("exp", "exp2"), level=2, text="exponential used"),
        Axis(
            name="dact", values=("lp", "fp32"), level="backward", text="gradient of silu(gate): rounded to lp or kept"
        ),
        Axis(
            name="grad_silu",
            values=("lp", "fp32"),
            level="backward",
            text="silu(gate) recomputed for the gradient of up: rounded or kept",
        ),
    )
    silu: str = "lp"
    sigmoid: str = "fp32"
    store: str = "rne"
    formula: str = "x/(1+e)"
    exp: str = "exp"
    dact: str = "lp"
    grad_silu: str = "lp"


@dataclass(frozen=True, kw_only=True)
class QkRopeContract(Contract):
    """The boundary between the per-head norm and RoPE: is the normed query or key rounded in between?"""

    region: ClassVar[str] = "qk_norm"
    axes: ClassVar[tuple[Axis, ...]] = (
        Axis(name="mid", values=("lp", "fp32"), level=1, named=True, text="the normed q or k handed to RoPE"),
    )
    mid: str = "lp"


CONTRACT_TYPES: dict[str, type[Contract]] = {
    c.region: c for c in (RopeContract, SwigluContract, RmsNormContract, QkRopeContract)
}


def contract_from_dict(data: Mapping[str, Any]) -> Contract:
    """Contract of any region from its JSON form."""
    region = str(data.get("region"))
    if region not in CONTRACT_TYPES:
        raise unknown_name("contract region", region, CONTRACT_TYPES)
    return CONTRACT_TYPES[region].from_dict(data)
