"""The kernels package has references of its own, because it never imports rpadiag: the two are one function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rpadiag.contracts import RmsNormContract, RopeContract, SwigluContract

pytest.importorskip("rpadiag_kernels", reason="the kernels package is not installed")

from rpadiag.regions.ops import RmsNormOperation, RopeOperation, SwigluOperation

by_dtype = pytest.mark.parametrize("lp", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
Results = list[Tensor | None]


def _randn(*shape: int, seed: int, lp: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(lp)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _equal(a: Results, b: Results) -> bool:
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))  # type: ignore[arg-type]


@by_dtype
@pytest.mark.parametrize("levels", [(1, 2), (1, "backward")], ids=["forward", "backward"])
def test_rmsnorm_agrees_on_every_contract(lp: torch.dtype, levels: tuple[int | str, ...]) -> None:
    x, residual, grad_y, grad_s = (_randn(60, 96, seed=s, lp=lp) for s in range(4))
    weight = _randn(96, seed=9, lp=lp, scale=0.3) + 1

    def results(contract: RmsNormContract, kernels: str) -> Results:
        a, r, w = _leaf(x), _leaf(residual), None if contract.weight == "none" else _leaf(weight)
        out = RmsNormOperation(contract, kernels)(a, w, r, 1e-5)
        torch.autograd.backward(list(out), [grad_y, grad_s])
        return [*out, a.grad, r.grad, None if w is None else w.grad]

    for contract in RmsNormContract.space(levels=levels):
        assert _equal(results(contract, "reference"), results(contract, "triton")), contract.to_dict()


@by_dtype
@pytest.mark.parametrize("levels", [(1, 2), (1, "backward")], ids=["forward", "backward"])
def test_rope_agrees_on_every_contract(lp: torch.dtype, levels: tuple[int | str, ...]) -> None:
    angle = torch.arange(60)[:, None] * 3.0 * 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    query, grad = (_randn(60, 3, 48, seed=s, lp=lp) for s in (1, 2))

    def results(contract: RopeContract, kernels: str) -> Results:
        leaf = _leaf(query)
        out = RopeOperation(contract, kernels)(leaf, cos, sin)
        out.backward(grad)
        return [out, leaf.grad]

    for contract in RopeContract.space(levels=levels):
        assert _equal(results(contract, "reference"), results(contract, "triton")), contract.to_dict()


@by_dtype
def test_swiglu_agrees_on_every_contract(lp: torch.dtype) -> None:
    gate, up, grad = (_randn(100, 96, seed=s, lp=lp, scale=3.0) for s in range(3))

    def results(contract: SwigluContract, kernels: str) -> Results:
        a, b = _leaf(gate), _leaf(up)
        out = SwigluOperation(contract, kernels)(a, b)
        out.backward(grad)
        return [out, a.grad, b.grad]

    for contract in SwigluContract.space(levels=(1, 2, "backward")):
        assert _equal(results(contract, "reference"), results(contract, "triton")), contract.to_dict()
