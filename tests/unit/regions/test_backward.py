"""Gradients of the references: the axes mean what they say, and transformers' autograd is one point of the space."""

from __future__ import annotations

import itertools

import pytest
import torch
from region_probes import num_differing
from torch import Tensor

from rpadiag.contracts import RmsNormContract, RopeContract, SwigluContract
from rpadiag.regions import qk_norm, rmsnorm, rope, swiglu
from rpadiag.regions.presets import PRESETS

LP = (torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("lp", LP, ids=lambda d: str(d).removeprefix("torch."))
EPS = 1e-5


def _randn(*shape: int, seed: int, lp: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(lp)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _tables(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angle = (torch.arange(tokens) * 5.0)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    return angle.cos(), angle.sin()


# --- transformers' autograd, bit for bit -----------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_autograd_of_transformers_norm_is_the_hf_contract(lp: torch.dtype, family: str) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = (GemmaRMSNorm if family == "gemma" else LlamaRMSNorm)(576, eps=EPS).to(lp)
    norm.weight.data.add_(_randn(576, seed=1, lp=lp, scale=0.3))
    x, residual = (_leaf(_randn(3, 200, 576, seed=s, lp=lp)) for s in (2, 3))
    grad_y, grad_total = _randn(3, 200, 576, seed=4, lp=lp), _randn(3, 200, 576, seed=5, lp=lp)
    total = residual + x
    torch.autograd.backward([norm(total), total], [grad_y, grad_total])

    ours, weight = [_leaf(x), _leaf(residual)], _leaf(norm.weight)
    contract = PRESETS["hf-eager"].rmsnorm(offset=family == "gemma")
    out = rmsnorm.aligned(ours[0], weight, eps=EPS, contract=contract, residual=ours[1])
    torch.autograd.backward(list(out), [grad_y, grad_total])
    assert torch.equal(ours[0].grad, x.grad) and torch.equal(ours[1].grad, residual.grad)  # type: ignore[arg-type]
    assert torch.equal(weight.grad, norm.weight.grad)  # type: ignore[arg-type]


@by_dtype
def test_autograd_of_transformers_swiglu_and_rope_is_the_hf_contract(lp: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    gate, up = _leaf(_randn(500, 600, seed=1, lp=lp, scale=4.0)), _leaf(_randn(500, 600, seed=2, lp=lp))
    grad = _randn(500, 600, seed=3, lp=lp)
    (torch.nn.functional.silu(gate) * up).backward(grad)
    gate2, up2 = _leaf(gate), _leaf(up)
    swiglu.aligned(gate2, up2, contract=SwigluContract()).backward(grad)
    assert torch.equal(gate2.grad, gate.grad) and torch.equal(up2.grad, up.grad)  # type: ignore[arg-type]

    query = _leaf(_randn(1, 8, 300, 64, seed=4, lp=lp))
    cos, sin = _tables(300, 64)
    turned, _ = apply_rotary_pos_emb(query, query, *(torch.cat([t, t], -1)[None].to(lp) for t in (cos, sin)))
    grad = _randn(1, 8, 300, 64, seed=5, lp=lp)
    turned.backward(grad)
    query2 = _leaf(query)
    rope.aligned(query2, cos, sin, contract=RopeContract()).backward(grad)
    assert torch.equal(query2.grad, query.grad)  # type: ignore[arg-type]


# --- every contract's gradient is the gradient, up to rounding -------------------------------------------------------

# A value rounded to lp is off by half an ULP, 2^-9 (bfloat16). A gradient passes at most three roundings on its
# way, and dx of a norm is a difference whose terms may be four times the result: 3 * 4 * 2^-9 of the row's scale.
TOLERANCE = 12 * 2.0**-9


def _close(got: Tensor, exact: Tensor) -> bool:
    scale = exact.abs().amax(dim=-1, keepdim=True) if exact.dim() > 1 else exact.abs().max()
    return bool(((got.double() - exact).abs() <= TOLERANCE * scale + 1e-30).all())


@pytest.mark.parametrize("weight_axis", ["w", "1+w", "lp(1+w)", "none"])
def test_norm_gradient_of_every_contract_is_the_float64_one(weight_axis: str) -> None:
    lp = torch.bfloat16
    x, residual, grad_y, grad_s = (_randn(50, 96, seed=s, lp=lp) for s in range(4))
    stored_weight = _randn(96, seed=9, lp=lp, scale=0.3) + (1.0 if weight_axis == "w" else 0.0)
    exact = [t.double().requires_grad_() for t in (x, residual, stored_weight)]
    total = exact[0] + exact[1]
    factor = {"w": exact[2], "none": torch.ones(96).double()}.get(weight_axis, exact[2] + 1.0)
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * factor
    torch.autograd.backward([y, total], [grad_y.double(), grad_s.double()])
    weight = None if weight_axis == "none" else stored_weight
    for contract in RmsNormContract.space(levels=(1, "backward"), weight=weight_axis):
        grad_x, grad_w = rmsnorm.reference_backward(
            grad_y, grad_s, x, weight, eps=EPS, contract=contract, residual=residual
        )
        assert _close(grad_x, exact[0].grad), contract  # type: ignore[arg-type]
        assert weight is None or _close(grad_w, exact[2].grad), contract  # type: ignore[arg-type]


def test_swiglu_gradient_of_every_contract_is_the_float64_one() -> None:
    gate, up, grad = (_randn(50, 96, seed=s, lp=torch.bfloat16) for s in range(3))
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    (torch.nn.functional.silu(g) * u).backward(grad.double())
    for contract in SwigluContract.space(levels=(1, 2, "backward")):
        grad_gate, grad_up = swiglu.reference_backward(grad, gate, up, contract=contract)
        assert _close(grad_gate, g.grad) and _close(grad_up, u.grad), contract  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
def test_rope_gradient_of_every_contract_is_the_rotation_back(layout: str) -> None:
    lp = torch.bfloat16
    x, (cos, sin) = _randn(40, 2, 48, seed=1, lp=lp), _tables(40, 32)
    for contract in RopeContract.space(levels=(1, "backward"), layout=layout):
        leaf = _leaf(x)
        rope.aligned(leaf, cos[:, None], sin[:, None], contract=contract).backward(x)
        there = rope.reference(
            x.float(), cos, -sin, contract=RopeContract(cache="fp32", products="fp32", layout=layout)
        )
        assert _close(leaf.grad, there.double()), contract  # type: ignore[arg-type]
        assert torch.equal(leaf.grad[..., 32:], x[..., 32:]), contract  # type: ignore[index]


# --- every backward axis moves bits ----------------------------------------------------------------------------------


def _moves(results: list[Tensor]) -> bool:
    return all(num_differing(a, b) > 0.01 * a.numel() for a, b in itertools.combinations(results, 2))


@by_dtype
def test_every_backward_axis_of_the_norm_moves_bits(lp: torch.dtype) -> None:
    x, residual, grad_y, grad_s = (_randn(300, 576, seed=s, lp=lp) for s in range(4))
    weight = _randn(576, seed=9, lp=lp, scale=0.3) + 1.0

    def gradients(**axes: str) -> tuple[Tensor, Tensor]:
        contract = RmsNormContract(**axes)
        grad_x, grad_w = rmsnorm.reference_backward(
            grad_y, grad_s, x, weight, eps=EPS, contract=contract, residual=residual
        )
        assert grad_w is not None
        return grad_x, grad_w

    assert _moves([gradients(dn=v)[0] for v in ("lp", "fp32")])
    assert _moves([gradients(dsum=v)[0] for v in ("lp", "fp32")])
    assert _moves([gradients(dw=v)[1] for v in ("lp", "lp-xhat", "fp32")])


@by_dtype
def test_every_backward_axis_of_swiglu_and_rope_moves_bits(lp: torch.dtype) -> None:
    gate, up, grad = (_randn(300, 576, seed=s, lp=lp) for s in range(3))
    for axis, position in (("dact", 0), ("grad_silu", 1)):
        results = [
            swiglu.reference_backward(grad, gate, up, contract=SwigluContract(**{axis: v}))[position]
            for v in ("lp", "fp32")
        ]
        assert _moves(results)
    x, (cos, sin) = _randn(300, 4, 64, seed=5, lp=lp), _tables(300, 64)
    contracts = RopeContract.space(levels=("backward",))
    assert _moves([rope.rotate_backward(x, cos[:, None], sin[:, None], contract=c) for c in contracts])


# --- level two -------------------------------------------------------------------------------------------------------


def test_level_two_axes_move_few_elements_and_only_where_they_can() -> None:
    lp, shares = torch.float16, {}
    x, weight = _randn(3000, 570, seed=1, lp=lp), _randn(570, seed=2, lp=lp, scale=0.3) + 1.0
    base = RmsNormContract(scale="fp32")
    for axis, value in (("mean", "sum*(1/n)"), ("order", "x*(r*w)"), ("order", "(x*w)*r"), ("reduction", "lanes8")):
        other = rmsnorm.reference(x, weight, eps=EPS, contract=base.replace(**{axis: value}))
        first = rmsnorm.reference(x, weight, eps=EPS, contract=base)
        shares[value] = num_differing(first, other) / x.numel()  # type: ignore[arg-type]
    assert all(0 < share < 5e-4 for share in shares.values()), shares

    q, (cos, sin) = _randn(4000, 4, 64, seed=3, lp=lp), _tables(4000, 64)
    for cache in ("fp32", "lp"):
        contract = RopeContract(cache=cache, products="fp32")
        plain = rope.reference(q, cos, sin, contract=contract)
        for fma in ("cc", "cs", "sc", "ss"):
            moved = num_differing(plain, rope.reference(q, cos, sin, contract=contract.replace(fma=fma)))
            assert moved == 0 if cache == "lp" else 0 < moved < 5e-4 * q.numel()


def test_norm_and_rope_without_rounding_between_have_one_gradient() -> None:
    lp = torch.bfloat16
    x, weight, grad = (
        _randn(60, 2, 64, seed=1, lp=lp),
        _randn(64, seed=2, lp=lp, scale=0.3) + 1.0,
        _randn(60, 2, 64, seed=3),
    )
    cos, sin = (t[:, None] for t in _tables(60, 64))
    norm, turn = (
        PRESETS["fp32-output"].rmsnorm(offset=False),
        RopeContract(cache="fp32", products="fp32", grad_products="fp32"),
    )
    ours = _leaf(x), _leaf(weight)
    qk_norm.aligned(ours[0], ours[1], cos, sin, eps=EPS, norm=norm, rope=turn).backward(grad.to(lp))
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    normed = exact[0] * torch.rsqrt(exact[0].pow(2).mean(-1, keepdim=True) + EPS) * exact[1]
    x1, x2 = normed.chunk(2, dim=-1)
    torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).backward(grad.to(lp).double())
    assert _close(ours[0].grad, exact[0].grad) and _close(ours[1].grad, exact[1].grad)  # type: ignore[arg-type]
