"""On a CUDA device the kernels give the references' bits: every contract, forward and backward, hundreds of shapes.

Bitwise against this package's references with the kernels' order of addition (``reduction.py``). Against
``rpadiag.regions``, which adds in PyTorch's order, rmsnorm differs where the order moves rstd by an ULP: counted and bounded.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from kernel_data import DTYPES, angles, num_mismatches, values
from rpadiag_kernels import reduction
from rpadiag_kernels.axes import encode

from rpadiag.contracts import RmsNormContract, RopeContract, SwigluContract
from rpadiag.regions import rmsnorm as rmsnorm_region

pytestmark = pytest.mark.gpu

EPS = 1e-6


def axes_of(contract: Any) -> dict[str, str]:
    return {name: value for name, value in contract.to_dict().items() if name != "region"}


def rmsnorm_mismatches(
    contract: RmsNormContract, num_tokens: int, num_columns: int, dtype: torch.dtype, residual: bool
) -> list[int]:
    from rpadiag_kernels.gpu import rmsnorm as gpu
    from rpadiag_kernels.rmsnorm import reference_backward, reference_forward

    codes = encode("rmsnorm", axes_of(contract))
    shape = (num_tokens, num_columns)
    x = values(*shape, dtype=dtype, seed=1, device="cuda")
    r = values(*shape, dtype=dtype, seed=2, device="cuda") if residual else None
    w = None if contract.weight == "none" else values(num_columns, dtype=dtype, seed=3, device="cuda", spread=0)
    dy = values(*shape, dtype=dtype, seed=4, device="cuda", spread=0)
    ds = values(*shape, dtype=dtype, seed=5, device="cuda", spread=0) if residual else None
    row_sum = functools.partial(reduction.row_sum, itemsize=x.element_size())
    forward_sum = functools.partial(row_sum, forward=True)
    got = gpu.forward(x, r, w, EPS, codes)
    want = reference_forward(x, r, w, EPS, codes, row_sum=forward_sum)
    got_grad = gpu.backward(dy, ds, x, r, w, got[2], codes, True)
    want_grad = reference_backward(dy, ds, x, r, w, want[2], codes, row_sum=row_sum, column_sum=reduction.column_sum)
    return [num_mismatches(a, b) for a, b in zip((*got, *got_grad), (*want, *want_grad), strict=True)]


RMSNORM_GROUPS = list(itertools.product(("w", "1+w", "lp(1+w)", "none"), ("fp32", "lp"), ("rne", "truncate"), DTYPES))


@pytest.mark.parametrize(("weight", "rstd", "store", "dtype"), RMSNORM_GROUPS)
def test_rmsnorm_equals_its_reference_for_every_level_one_contract(
    weight: str, rstd: str, store: str, dtype: torch.dtype
) -> None:
    for contract in RmsNormContract.space(weight=weight, rstd=rstd, store=store):
        for residual in (False, True):
            if contract.canonical(residual=residual) != contract:
                continue
            assert rmsnorm_mismatches(contract, 70, 1536, dtype, residual) == [0] * 5, (contract, residual)


@pytest.mark.parametrize("root", ["rsqrt", "1/sqrt"])
@pytest.mark.parametrize("mean", ["sum/n", "sum*(1/n)"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_rmsnorm_equals_its_reference_for_every_level_two_contract(root: str, mean: str, dtype: torch.dtype) -> None:
    for order in ("(x*r)*w", "x*(r*w)", "(x*w)*r"):
        contract = RmsNormContract(root=root, mean=mean, order=order, scale="fp32")
        assert rmsnorm_mismatches(contract, 300, 1000, dtype, True) == [0] * 5, contract


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["lp", "fp32"])
def test_rmsnorm_equals_its_reference_for_every_backward_contract(scale: str, dtype: torch.dtype) -> None:
    for contract in RmsNormContract.space(levels=("backward",), scale=scale, sum="fp32", variance="unrounded"):
        assert rmsnorm_mismatches(contract, 600, 320, dtype, True) == [0] * 5, contract


COLUMNS = (64, 65, 72, 96, 100, 127, 128, 192, 256, 333, 512, 576, 768, 896, 1000, 1024, 1025, 1536, 2048, 2560, 3072, 3584, 4096,
           5120, 6144, 7168, 8192, 8200, 11008, 12288, 14336, 16383, 16384)  # fmt: skip


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("contract", [
    RmsNormContract(),
    RmsNormContract(sum="fp32", variance="unrounded", scale="fp32", dn="fp32", dw="fp32", dsum="fp32"),
])  # fmt: skip
def test_rmsnorm_equals_its_reference_for_every_shape(contract: RmsNormContract, num_columns: int) -> None:
    for num_tokens, dtype in itertools.product((1, 3, 257, 1031), (*DTYPES, torch.float32)):
        found = rmsnorm_mismatches(contract, num_tokens, num_columns, dtype, True)
        assert found == [0] * 5, (num_tokens, dtype)


@pytest.mark.parametrize("num_columns", [128, 1024, 4096, 8192])
def test_rmsnorm_differs_from_torchs_order_of_addition_only_where_rstd_moves(num_columns: int) -> None:
    """A sum of n float32 in another order moves by less than log2(n) ULP, rstd by half of that; one ULP of rstd moves
    2.6e-5 of the bf16 outputs (research). 1e-4 leaves room for four ULP in every row."""
    from rpadiag_kernels import rmsnorm

    contract = RmsNormContract(sum="fp32", variance="unrounded", scale="fp32")
    x, r = (values(4096, num_columns, dtype=torch.bfloat16, seed=s, device="cuda") for s in (1, 2))
    w = values(num_columns, dtype=torch.bfloat16, seed=3, device="cuda", spread=0)
    got = rmsnorm(x, w, eps=EPS, residual=r, **axes_of(contract))
    want = rmsnorm_region.reference(x, w, eps=EPS, contract=contract, residual=r)
    assert num_mismatches(got[1], want[1]) == 0
    assert num_mismatches(got[0], want[0]) <= 1e-4 * x.numel()


def test_rmsnorm_of_strided_rows_equals_that_of_contiguous_rows() -> None:
    from rpadiag_kernels import rmsnorm

    wide = values(64, 3 * 640, dtype=torch.bfloat16, seed=1, device="cuda")
    w = values(640, dtype=torch.bfloat16, seed=2, device="cuda")
    for x in (
        wide[:, 640:1280],
        wide[::2, :1280:2],
        wide[:640, :64].t(),
        wide[:, :640].unsqueeze(1).expand(64, 2, 640),
    ):
        weight = w[: x.shape[-1]]
        assert num_mismatches(rmsnorm(x, weight, eps=EPS), rmsnorm(x.contiguous(), weight, eps=EPS)) == 0


def swiglu_mismatches(contract: SwigluContract, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> list[int]:
    from rpadiag_kernels.gpu import swiglu as gpu
    from rpadiag_kernels.swiglu import reference_backward, reference_forward

    codes = encode("swiglu", axes_of(contract))
    got = (gpu.forward(gate, up, codes), *gpu.backward(dy, gate, up, codes))
    want = (reference_forward(gate, up, codes), *reference_backward(dy, gate, up, codes))
    return [num_mismatches(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("store", ["rne", "truncate"])
def test_swiglu_equals_its_reference_for_every_contract(store: str, dtype: torch.dtype) -> None:
    x = [values(257, 1000, dtype=dtype, seed=s, device="cuda", spread=2.5) for s in range(3)]
    for contract in SwigluContract.space(levels=(1, 2), store=store):
        assert swiglu_mismatches(contract, *x) == [0, 0, 0], contract
    for contract in SwigluContract.space(levels=("backward",), store=store, silu="fp32"):
        assert swiglu_mismatches(contract, *x) == [0, 0, 0], contract


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_equals_its_reference_for_every_gate_there_is(dtype: torch.dtype) -> None:
    """All 65,536 patterns, infinities and NaNs included, each with several ups."""
    gate = torch.arange(65536, device="cuda").to(torch.int16).view(dtype).repeat(8, 1)
    up, dy = (values(8, 65536, dtype=dtype, seed=s, device="cuda") for s in (1, 2))
    for silu in ("lp", "fp32"):
        assert swiglu_mismatches(SwigluContract(silu=silu), gate, up, dy) == [0, 0, 0]


@pytest.mark.parametrize("num_columns", [1, 3, 64, 1000, 2048, 2049, 11008])
def test_swiglu_of_halves_of_one_tensor_and_of_odd_shapes_equals_its_reference(num_columns: int) -> None:
    for num_tokens in (1, 7, 130):
        both = values(num_tokens, 2 * num_columns, dtype=torch.bfloat16, seed=1, device="cuda", spread=1)
        dy = values(num_columns, num_tokens, dtype=torch.bfloat16, seed=2, device="cuda", spread=1).t()
        assert swiglu_mismatches(SwigluContract(silu="fp32"), *both.chunk(2, dim=-1), dy) == [0, 0, 0]


def rope_mismatches(
    contract: RopeContract, q: torch.Tensor, k: torch.Tensor, half: int, directions: tuple[bool, ...] = (False, True)
) -> list[int]:
    """q, k: [B, T, H, D], both in one kernel; directions: backward or not."""
    from rpadiag_kernels.gpu import rope as gpu
    from rpadiag_kernels.rope import reference

    codes = encode("rope", axes_of(contract))
    cos, sin = angles(*q.shape[:2], half, device="cuda")
    found = []
    for backward in directions:
        outputs = torch.empty_like(q), torch.empty_like(k)
        gpu.rotate(q, k, cos, sin, *outputs, codes, backward=backward)
        tables = cos[:, :, None], sin[:, :, None]
        found += [
            num_mismatches(out, reference(x, *tables, codes, backward=backward))
            for x, out in zip((q, k), outputs, strict=True)
        ]
    return found


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize("store", ["rne", "truncate"])
def test_rope_equals_its_reference_for_every_contract(layout: str, store: str, dtype: torch.dtype) -> None:
    q = values(2, 33, 8, 128, dtype=dtype, seed=1, device="cuda")
    k = values(2, 2, 33, 128, dtype=dtype, seed=2, device="cuda").transpose(1, 2)
    for contract in dict.fromkeys(c.canonical() for c in RopeContract.space(levels=(1, 2), layout=layout, store=store)):
        assert rope_mismatches(contract, q, k, 64, (False,)) == [0] * 2, contract
    if store == "rne":  # gradients are always rounded to nearest
        for contract in RopeContract.space(levels=("backward",), layout=layout, cache="fp32"):
            assert rope_mismatches(contract, q, k, 64, (True,)) == [0] * 2, contract


@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 112, 128, 160, 192, 224, 256])
def test_rope_equals_its_reference_for_every_shape(head_size: int) -> None:
    shapes = itertools.product(((1, 1), (14, 2), (32, 8), (128, 1)), (1.0, 0.5), DTYPES, ("neox", "interleaved"))
    for heads, rotary, dtype, layout in shapes:
        q, k = (values(1, 17, h, head_size, dtype=dtype, seed=h, device="cuda") for h in heads)
        contract = RopeContract(products="fp32", layout=layout)
        assert rope_mismatches(contract, q, k, int(head_size * rotary) // 2) == [0] * 4, (heads, rotary, dtype, layout)


def test_rope_of_axes_in_any_order_equals_the_reference() -> None:
    from rpadiag_kernels import rope
    from rpadiag_kernels.rope import reference

    codes = encode("rope", {})
    cos, sin = angles(2, 9, 32, device="cuda")
    q = values(2, 5, 9, 64, dtype=torch.bfloat16, seed=1, device="cuda")  # [B, H, T, D]
    want = reference(q, cos[:, None], sin[:, None], codes)
    assert num_mismatches(rope(q, cos[:, None], sin[:, None]), want) == 0
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = rope(strided, cos[:, None], sin[:, None])
    assert out.stride() == strided.stride()
    assert num_mismatches(out, want) == 0
    packed = values(9, 7 * 64, dtype=torch.bfloat16, seed=2, device="cuda")  # q, k, v side by side
    q3, k3 = packed[:, :320].view(9, 5, 64), packed[:, 320:384].view(9, 1, 64)
    got = rope(q3, cos[0, :, None], sin[0, :, None], k=k3)
    for x, y in zip((q3, k3), got, strict=True):
        assert num_mismatches(y, reference(x, cos[0, :, None], sin[0, :, None], codes)) == 0
    rows = q[0, 0]
    assert num_mismatches(rope(rows, cos[0], sin[0]), reference(rows, cos[0], sin[0], codes)) == 0


def test_offsets_beyond_two_to_the_31_reach_the_right_elements() -> None:
    from rpadiag_kernels import rmsnorm, rope, swiglu

    big = torch.zeros(2**31 + 4 * 4096, dtype=torch.bfloat16, device="cuda")
    tail = values(4, 4096, dtype=torch.bfloat16, seed=1, device="cuda", spread=0)
    big[-4 * 4096 :] = tail.reshape(-1)
    view = big.as_strided((2, 4, 4096), (2**31, 4096, 1))
    w = values(4096, dtype=torch.bfloat16, seed=2, device="cuda", spread=0)
    assert num_mismatches(rmsnorm(view, w, eps=EPS)[1], rmsnorm(tail, w, eps=EPS)) == 0
    assert num_mismatches(swiglu(view, view)[1], swiglu(tail, tail)) == 0
    cos, sin = angles(4, 1, 64, device="cuda")
    heads = view.view(2, 4, 32, 128)
    assert num_mismatches(rope(heads, cos, sin)[1], rope(tail.view(4, 32, 128), cos, sin)) == 0
    deep = big.as_strided((4, 2, 128), (128, 2**31, 1))
    assert num_mismatches(rope(deep, cos, sin)[:, 1], rope(deep[:, 1:].contiguous(), cos, sin)[:, 0]) == 0


def test_results_do_not_change_from_run_to_run() -> None:
    from rpadiag_kernels import rmsnorm

    x = values(5000, 2048, dtype=torch.bfloat16, seed=1, device="cuda", spread=0).requires_grad_()
    w = values(2048, dtype=torch.bfloat16, seed=2, device="cuda", spread=0).requires_grad_()
    dy = values(5000, 2048, dtype=torch.bfloat16, seed=3, device="cuda", spread=0)
    first = torch.autograd.grad(rmsnorm(x, w, eps=EPS), (x, w), dy)
    for _ in range(5):
        again = torch.autograd.grad(rmsnorm(x, w, eps=EPS), (x, w), dy)
        assert all(num_mismatches(a, b) == 0 for a, b in zip(first, again, strict=True))


def test_nan_and_infinity_spread_as_in_the_reference() -> None:
    x = values(8, 512, dtype=torch.bfloat16, seed=1, device="cuda", spread=0)
    x[1, 3], x[2, 4], x[3, 5] = float("nan"), float("inf"), -float("inf")
    from rpadiag_kernels import rmsnorm
    from rpadiag_kernels.rmsnorm import reference_forward

    w = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    for store in ("rne", "truncate"):
        got = rmsnorm(x, w, eps=EPS, store=store)
        row_sum = functools.partial(reduction.row_sum, itemsize=2, forward=True)
        want = reference_forward(x, None, w, EPS, encode("rmsnorm", {"store": store}), row_sum=row_sum)[0]
        assert num_mismatches(got, want) == 0
    assert bool(got[1].isnan().all()) and not bool(got[0].isnan().any())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("kind", ["noise", "patterns", "zeros", "small", "large"])
@pytest.mark.parametrize("n", [1, 4099, 5_000_001])
def test_ulp_kernel_equals_bits_on_every_number(dtype: torch.dtype, kind: str, n: int) -> None:
    from kernel_data import pairs, ulp_differences

    a, b = pairs(n, kind=kind, dtype=dtype)
    assert ulp_differences(a.cuda(), b.cuda()) == {}


def test_ulp_kernel_takes_strided_and_unaligned_tensors() -> None:
    from kernel_data import pairs, ulp_differences

    a, b = (t.cuda() for t in pairs(40_000, kind="noise", dtype=torch.bfloat16))
    assert ulp_differences(a[1:], b[1:]) == {}
    assert ulp_differences(a[::3], b[::3]) == {}
    assert ulp_differences(a.view(200, 200).t(), b.view(200, 200).t()) == {}
