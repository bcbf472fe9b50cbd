"""What a diagnosis is made of: two tensors at a site, what was fed to them, and explanations of their difference.

Direction: A is the trainer or reference, B the other side; a delta is B - A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rpadiag.compare.roles import Role, find_input
from rpadiag.contracts import Contract
from rpadiag.structure import Change, change

SITE_SEVERITIES = {
    "control": "no difference may be reported",
    "ulp-noise": "at most one output ULP, unbiased, rare: order, transcendentals, fused multiply-add",
    "rounding-contract": "a rounding point moved: few ULP, unbiased, more than 0.1 % of elements",
    "biased-rounding": "one-sided in value or magnitude, or coherent along a row or column",
    "semantic": "wrong formula, configuration, missing operation or wrong weights",
    "data": "the two sides were fed or aligned differently",
    "fatal": "non-finite values",
}
FINDING_SEVERITY = {
    "control": "info", "ulp-noise": "info", "rounding-contract": "notice", "biased-rounding": "warning",
    "semantic": "error", "data": "error", "fatal": "error",
}  # fmt: skip
PROOFS = ("identity", "solved", "structure", "statistics")  # strongest first
LP = {torch.bfloat16: "bf16", torch.float16: "fp16"}

ContractReader = Callable[[str, Mapping[str, Any], Tensor], tuple[tuple[Contract, ...], bool]]
"""(region, captured inputs, output) -> contracts that reproduce the output, and whether to the last bit; none: ()."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One thing a difference is, or does.

    severity: a key of SITE_SEVERITIES. proof: how it is known (PROOFS); a difference with an ``identity`` or ``solved``
    explanation was made here and needs no statistics. region: where it differs from the site's own.
    """

    code: str
    severity: str
    text: str
    proof: str = "structure"
    region: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.proof in ("identity", "solved")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two tensors of equal shape at one site."""

    site: str
    role: Role
    a: Tensor
    b: Tensor

    @cached_property
    def change(self) -> Change:
        return change(self.a, self.b)

    @property
    def lp(self) -> str | None:
        """``bf16`` or ``fp16`` when both sides are held in it, else None."""
        return LP.get(self.a.dtype) if self.a.dtype == self.b.dtype else None

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Both sides as float64 [rows, columns]; the last axis is the columns."""
        width = self.a.shape[-1] if self.a.ndim else 1
        return self.a.double().reshape(-1, width), self.b.double().reshape(-1, width)

    @cached_property
    def unit(self) -> float:
        """Relative size of one rounding (rms) in the dtype of the site: 1.65e-3 for bf16, 2.1e-4 fp16, 2.5e-8 fp32."""
        return ROUNDING_RMS.get(self.a.dtype if self.a.dtype == self.b.dtype else torch.float32, 2.5e-8)


ROUNDING_RMS = {torch.bfloat16: 1.65e-3, torch.float16: 2.07e-4, torch.float32: 2.5e-8, torch.float64: 5e-17}


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What else is known: every site of both sides (execution order), and the inputs they share."""

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    contracts: ContractReader | None = None

    def tensor(self, role: str, site: str = "", *, like: Tensor | None = None) -> Tensor | None:
        """An input by role, as a tensor."""
        found = find_input(role, self.inputs, site=site, shape_of=like)
        return found if isinstance(found, Tensor) else None

    def number(self, role: str) -> float | None:
        """An input by role, as a number."""
        found = find_input(role, self.inputs)
        return (
            float(found)
            if isinstance(found, int | float) or (isinstance(found, Tensor) and found.numel() == 1)
            else None
        )

    def without(self, *names: str) -> Context:
        return replace(self, inputs={k: v for k, v in self.inputs.items() if k not in names})


def percent(share: float) -> str:
    """``12.3 %``."""
    return f"{100 * share:.3g} %"


def rel_error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error of ``got`` against ``expected``, over elements finite on both sides."""
    g, e = got.double(), expected.double()
    ok = g.isfinite() & e.isfinite()
    norm = float(e[ok].norm())
    return float((g[ok] - e[ok]).norm()) / norm if norm else (0.0 if not bool(g[ok].any()) else float("inf"))
