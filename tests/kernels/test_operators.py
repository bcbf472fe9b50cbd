"""The operators on a CPU: the contracts of rpadiag.regions bit for bit, torch.library's rules, and bad input."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import rpadiag_kernels
import torch
from kernel_data import DTYPES, angles, num_mismatches, pairs, ulp_differences, values
from rpadiag_kernels.axes import AXES, encode, to_string
from torch import Tensor

from rpadiag.contracts import CONTRACT_TYPES, Contract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.regions import rmsnorm as rmsnorm_region
from rpadiag.regions import rope as rope_region
from rpadiag.regions import swiglu as swiglu_region

EPS = 1e-6


def axes_of(contract: Contract) -> dict[str, str]:
    return {name: value for name, value in contract.to_dict().items() if name != "region"}


@pytest.mark.parametrize("region", sorted(AXES))
def test_axes_mirror_the_contracts(region: str) -> None:
    axes = {axis.name: set(axis.values) for axis in CONTRACT_TYPES[region].axes}
    assert {name: set(known) for name, known in AXES[region].items()} == axes
    defaults = {f.name: f.default for f in dataclasses.fields(CONTRACT_TYPES[region])}
    assert {name: known[0] for name, known in AXES[region].items()} == defaults


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [(1,), (2,), ("backward",)])
def test_rmsnorm_has_the_bits_of_the_region_reference(levels: tuple[int | str, ...], dtype: torch.dtype) -> None:
    x, r, dy, ds = (values(12, 72, dtype=dtype, seed=s) for s in range(4))
    weight = values(72, dtype=dtype, seed=5, spread=0)
    for contract in RmsNormContract.space(levels=levels, **({} if levels == (1,) else {"scale": "fp32"})):
        w = None if contract.weight == "none" else weight.clone().requires_grad_()
        for residual in (None, r):
            inputs = [t.clone().requires_grad_() for t in ((x,) if residual is None else (x, residual))]
            got = rpadiag_kernels.rmsnorm(
                inputs[0], w, eps=EPS, residual=inputs[1] if residual is not None else None, **axes_of(contract)
            )
            want = rmsnorm_region.reference(x, w, eps=EPS, contract=contract, residual=residual)
            got, want = (o if isinstance(o, tuple) else (o,) for o in (got, want))
            assert all(num_mismatches(a, b) == 0 for a, b in zip(got, want, strict=True)), contract
            wanted = inputs + ([] if w is None else [w])
            grads = torch.autograd.grad(got, wanted, (dy, ds)[: len(got)])
            grad_x, grad_w = rmsnorm_region.reference_backward(
                dy, None if residual is None else ds, x, w, eps=EPS, contract=contract, residual=residual
            )
            expected = [grad_x] * len(inputs) + ([] if w is None else [grad_w])
            assert all(num_mismatches(a, b) == 0 for a, b in zip(grads, expected, strict=True)), contract


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [(1, 2), ("backward",)])
def test_swiglu_has_the_bits_of_the_region_reference(levels: tuple[int | str, ...], dtype: torch.dtype) -> None:
    gate, up, dy = (values(9, 100, dtype=dtype, seed=s, spread=1.5) for s in range(3))
    for contract in SwigluContract.space(levels=levels):
        inputs = [t.clone().requires_grad_() for t in (gate, up)]
        out = rpadiag_kernels.swiglu(*inputs, **axes_of(contract))
        assert num_mismatches(out, swiglu_region.reference(gate, up, contract=contract)) == 0, contract
        grads = torch.autograd.grad(out, inputs, dy)
        expected = swiglu_region.reference_backward(dy, gate, up, contract=contract)
        assert all(num_mismatches(a, b) == 0 for a, b in zip(grads, expected, strict=True)), contract


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [(1, 2), ("backward",)])
def test_rope_has_the_bits_of_the_region_reference(levels: tuple[int | str, ...], dtype: torch.dtype) -> None:
    q, k = values(6, 3, 40, dtype=dtype, seed=1), values(6, 1, 40, dtype=dtype, seed=2)
    cos, sin = (t[:, None] for t in angles(6, 16))
    for contract in dict.fromkeys(c.canonical() for c in RopeContract.space(levels=levels)):
        inputs = [t.clone().requires_grad_() for t in (q, k)]
        out = rpadiag_kernels.rope(inputs[0], cos, sin, k=inputs[1], **axes_of(contract))
        grads = torch.autograd.grad(out, inputs, (k.expand_as(q), k))
        for x, y, dy, dx in zip((q, k), out, (k.expand_as(q), k), grads, strict=True):
            assert num_mismatches(y, rope_region.rotate(x, cos, sin, contract=contract)) == 0, contract
            assert num_mismatches(dx, rope_region.rotate_backward(dy, cos, sin, contract=contract)) == 0, contract


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("kind", ["noise", "patterns", "zeros", "small", "large"])
def test_ulp_stats_equals_bits_on_every_number(kind: str, dtype: torch.dtype) -> None:
    assert ulp_differences(*pairs(5000, kind=kind, dtype=dtype)) == {}


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operator and arguments, by name."""
    x, r = (values(4, 64, dtype=torch.bfloat16, seed=s, spread=0).requires_grad_() for s in (1, 2))
    w = values(64, dtype=torch.bfloat16, seed=3, spread=0).requires_grad_()
    cos, sin = angles(4, 8)
    contract = {region: to_string(encode(region, {})) for region in AXES}
    rstd = torch.rand(4)
    q, k = (
        x.detach().view(4, 4, 16).clone().requires_grad_(),
        r.detach().view(4, 4, 16)[:, :1].clone().requires_grad_(),
    )
    ops = torch.ops.rpadiag
    return {
        "rmsnorm": (ops.rmsnorm.default, (x, r, w, EPS, contract["rmsnorm"])),
        "rmsnorm without residual": (ops.rmsnorm.default, (x, None, w, EPS, contract["rmsnorm"])),
        "rmsnorm of columns": (
            ops.rmsnorm.default,
            (values(64, 4, dtype=torch.bfloat16, seed=1).t(), None, w, EPS, contract["rmsnorm"]),
        ),
        "rmsnorm_backward": (
            ops.rmsnorm_backward.default,
            (x.detach(), r.detach(), x.detach(), None, w.detach(), rstd, contract["rmsnorm"], True),
        ),
        "swiglu": (ops.swiglu.default, (x, r, contract["swiglu"])),
        "swiglu_backward": (ops.swiglu_backward.default, (x.detach(), x.detach(), r.detach(), contract["swiglu"])),
        "rope": (ops.rope.default, (q, k, cos, sin, 1, contract["rope"])),
        "rope_backward": (ops.rope_backward.default, (q.detach(), k.detach(), cos, sin, 1, contract["rope"])),
        "ulp_counts": (ops.ulp_counts.default, (x.detach(), r.detach())),
    }


@pytest.mark.parametrize("name", sorted(calls()))
def test_operator_follows_the_rules_of_torch_library(name: str) -> None:
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments)


def block(x: Tensor, r: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All three regions in a row."""
    y, s = rpadiag_kernels.rmsnorm(x, w, eps=EPS, residual=r)
    heads = rpadiag_kernels.rope(y.view(-1, 4, 16), cos, sin)
    return rpadiag_kernels.swiglu(heads.reshape(s.shape), s)


def block_inputs() -> list[Tensor]:
    tensors = [values(6, 64, dtype=torch.bfloat16, seed=s, spread=0).requires_grad_() for s in (1, 2)]
    tensors.append(values(64, dtype=torch.bfloat16, seed=3, spread=0).requires_grad_())
    return [*tensors, *(t[:, None] for t in angles(6, 8))]


def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
    inputs = block_inputs()
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs[:3])]


def test_torch_compile_keeps_the_operators_whole_and_their_bits() -> None:
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    assert all(num_mismatches(a, b) == 0 for a, b in zip(gradients(compiled), gradients(block), strict=True))
    assert {f"rpadiag.{name}" for name in ("rmsnorm", "rope", "swiglu")} <= {
        name.removesuffix(".default") for name in seen
    }
    traced = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    assert all(num_mismatches(a, b) == 0 for a, b in zip(gradients(traced), gradients(block), strict=True))


def test_gradient_checkpointing_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    again = gradients(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False))
    assert all(num_mismatches(a, b) == 0 for a, b in zip(again, gradients(block), strict=True))


def test_autocast_changes_nothing() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients(block)
    assert all(num_mismatches(a, b) == 0 for a, b in zip(inside, gradients(block), strict=True))


def test_float32_weight_with_16_bit_input_keeps_a_float32_gradient() -> None:
    x = values(5, 32, dtype=torch.bfloat16, seed=1).requires_grad_()
    w = torch.rand(32, requires_grad=True)
    y = rpadiag_kernels.rmsnorm(x, w, eps=EPS)
    assert y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.sum(), w)[0].dtype == torch.float32


def test_frozen_weight_gets_no_gradient_and_input_the_same_one() -> None:
    x = values(5, 32, dtype=torch.bfloat16, seed=1).requires_grad_()
    w = values(32, dtype=torch.bfloat16, seed=2, spread=0)
    dy = values(5, 32, dtype=torch.bfloat16, seed=3)
    frozen = torch.autograd.grad(rpadiag_kernels.rmsnorm(x, w, eps=EPS), x, dy)[0]
    trained = w.clone().requires_grad_()
    both = torch.autograd.grad(rpadiag_kernels.rmsnorm(x, trained, eps=EPS), (x, trained), dy)
    assert num_mismatches(frozen, both[0]) == 0


def test_gradient_through_the_new_residual_alone_reaches_both_inputs() -> None:
    x, r = (values(5, 32, dtype=torch.bfloat16, seed=s).requires_grad_() for s in (1, 2))
    w = values(32, dtype=torch.bfloat16, seed=3)
    _, s = rpadiag_kernels.rmsnorm(x, w, eps=EPS, residual=r)
    ds = values(5, 32, dtype=torch.bfloat16, seed=4)
    assert all(torch.equal(g, ds) for g in torch.autograd.grad(s, (x, r), ds))


def test_no_tokens_give_empty_results_and_a_zero_weight_gradient() -> None:
    x, w = (
        torch.empty(0, 32, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(32, dtype=torch.bfloat16, requires_grad=True),
    )
    y = rpadiag_kernels.rmsnorm(x, w, eps=EPS)
    assert y.shape == (0, 32)
    assert not torch.autograd.grad(y.sum(), w)[0].any()
    assert rpadiag_kernels.swiglu(x, x).shape == (0, 32)
    table = torch.empty(0, 1, 8)
    assert rpadiag_kernels.rope(x.view(0, 2, 16), table, table).shape == (0, 2, 16)
    assert rpadiag_kernels.ulp_stats(x.detach(), x.detach())["n"] == 0


def test_rope_keeps_the_strides_of_its_input() -> None:
    x = values(2, 5, 3, 16, dtype=torch.bfloat16, seed=1).transpose(1, 2)
    cos, sin = (t[None, None] for t in angles(5, 8))
    assert rpadiag_kernels.rope(x, cos, sin).stride() == x.stride()


BF16 = torch.zeros(2, 32, dtype=torch.bfloat16)
TABLE = torch.zeros(2, 1, 8)
HEADS = torch.zeros(2, 2, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: rpadiag_kernels.rmsnorm(BF16.double(), None, eps=EPS), TypeError, "float64"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0, :8], eps=EPS), ValueError, "weight has shape"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0].half(), eps=EPS), TypeError, "weight is torch.float16"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0], eps=EPS, residual=BF16[:1]), ValueError, "residual"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0], eps=EPS, residual=BF16.half()), ValueError, "dtype"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0].to("meta"), eps=EPS), ValueError, "meta"),
    (lambda: rpadiag_kernels.rmsnorm(torch.zeros(1, 16385).bfloat16(), None, eps=EPS), ValueError, "16384"),
    (lambda: rpadiag_kernels.rmsnorm(BF16[:, :0], None, eps=EPS), ValueError, "columns"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0], eps=EPS, weight="none"), ValueError, "weight=none"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0], eps=EPS, summ="lp"), ValueError, "known axes: sum"),
    (lambda: rpadiag_kernels.rmsnorm(BF16, BF16[0], eps=EPS, scale="fp8"), ValueError, "known values: lp, fp32"),
    (lambda: rpadiag_kernels.swiglu(BF16, BF16[:1]), ValueError, "shape"),
    (lambda: rpadiag_kernels.swiglu(BF16.int(), BF16.int()), TypeError, "int32"),
    (lambda: rpadiag_kernels.rope(HEADS, TABLE[..., :7], TABLE), ValueError, "cos is"),
    (lambda: rpadiag_kernels.rope(HEADS, torch.zeros(2, 1, 9), torch.zeros(2, 1, 9)), ValueError, "do not fit a head size"),
    (lambda: rpadiag_kernels.rope(HEADS, TABLE.bfloat16(), TABLE.bfloat16(), cache="fp32"), ValueError, "cannot be undone"),
    (lambda: rpadiag_kernels.rope(HEADS, TABLE, TABLE, products="lp-fma"), ValueError, "needs fused"),
    (lambda: rpadiag_kernels.rope(HEADS, TABLE, TABLE, k=HEADS[..., :8]), ValueError, "k is"),
    (lambda: rpadiag_kernels.rope(torch.zeros(2, 1, 1024).bfloat16(), TABLE, TABLE), ValueError, "512"),
    (lambda: rpadiag_kernels.ulp_stats(BF16, BF16.half()), ValueError, "dtype"),
    (lambda: rpadiag_kernels.ulp_stats(BF16.long(), BF16.long()), TypeError, "int64"),
])  # fmt: skip
def test_bad_input_is_an_error_that_names_it(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_package_works_where_triton_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, rpadiag_kernels as k\n"
        "x = torch.ones(2, 16, dtype=torch.bfloat16)\n"
        "print(float(k.rmsnorm(x, x[0], eps=0.0).sum()), float(k.swiglu(x, x).sum()) > 0, k.ulp_stats(x, x)['n'])\n"
        "assert not any(name.startswith('rpadiag.') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "32.0 True 32", done.stderr
