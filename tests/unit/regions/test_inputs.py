"""Bad input to the references: a clear error, or a defined result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rpadiag.contracts import RmsNormContract, RopeContract, SwigluContract
from rpadiag.errors import InputError
from rpadiag.regions import rmsnorm, rope, swiglu

BF16 = torch.bfloat16


def _norm(x: Tensor, factor: Tensor | None, residual: Tensor | None = None, **axes: str) -> Any:
    return rmsnorm.aligned(x, factor, eps=1e-5, contract=RmsNormContract(**axes), residual=residual)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, **axes: str) -> Tensor:
    return rope.reference(x, cos, sin, contract=RopeContract(**axes))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu.aligned(gate, up, contract=SwigluContract())


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _norm(zeros(2, 4, dtype=torch.float64), None, weight="none"), "rmsnorm takes bfloat16, float16"),
        (lambda: _norm(zeros(2, 4, dtype=torch.int32), None, weight="none"), "rmsnorm takes bfloat16, float16"),
        (lambda: _norm(zeros(2, 0), zeros(0)), "at least one column"),
        (lambda: _norm(zeros(2, 4), zeros(5)), "the weight does not fit"),
        (lambda: _norm(zeros(2, 4), None), "contract says weight=w, and no weight was given"),
        (lambda: _norm(zeros(2, 4), zeros(4), weight="none"), "contract says weight=none, and a weight was given"),
        (lambda: _norm(zeros(2, 4), zeros(4, dtype=torch.float16)), "weight is torch.float16 and x is torch.bfloat16"),
        (lambda: _norm(zeros(2, 4), zeros(4), zeros(3, 4)), "the residual does not fit"),
        (lambda: _norm(zeros(2, 4), zeros(4), zeros(2, 4, dtype=torch.float32)), "the residual does not fit"),
        (lambda: _rope(zeros(2, 8), zeros(2, 4), zeros(2, 4)), r"shape \[tokens, heads, head size\]"),
        (lambda: _rope(zeros(2, 1, 8), zeros(2, 5), zeros(2, 5)), "do not fit a head size of 8"),
        (lambda: _rope(zeros(2, 1, 8), zeros(2, 0), zeros(2, 0)), "do not fit a head size of 8"),
        (lambda: _rope(zeros(2, 1, 8), zeros(2, 4), zeros(2, 3)), "cos is"),
        (lambda: _rope(zeros(2, 1, 8), zeros(2, 4), zeros(2, 4), cache="fp32"), "says cache=fp32 and the tables are"),
        (lambda: _rope(zeros(2, 1, 8), *[zeros(2, 4, dtype=torch.float16)] * 2), "tables are torch.float16"),
        (lambda: _rope(zeros(2, 1, 8, device="meta"), zeros(2, 4), zeros(2, 4)), "x is on meta, the tables are on cpu"),
        (lambda: _swiglu(zeros(2, 4), zeros(2, 5)), "gate and up do not fit"),
        (lambda: _swiglu(zeros(2, 4), zeros(2, 4, dtype=torch.float16)), "gate and up do not fit"),
        (lambda: _swiglu(zeros(2, 4, dtype=torch.int64), zeros(2, 4, dtype=torch.int64)), "swiglu takes bfloat16"),
    ],
)
def test_what_does_not_fit_is_an_error_that_shows_both_sides(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_no_rows_give_no_rows() -> None:
    y, stored = _norm(zeros(0, 4), zeros(4), zeros(0, 4))
    assert y.shape == stored.shape == (0, 4)
    assert _swiglu(zeros(0, 4), zeros(0, 4)).shape == (0, 4)
    assert _rope(zeros(0, 2, 8), zeros(0, 4), zeros(0, 4)).shape == (0, 2, 8)


@pytest.mark.parametrize("mode", ["rne", "truncate"])
def test_nan_and_infinity_stay_in_their_row(mode: str) -> None:
    x = torch.ones(3, 8, dtype=BF16)
    x[0, 0], x[1, 0] = float("nan"), float("inf")
    y = _norm(x, torch.ones(8, dtype=BF16), store=mode)
    assert y[0].isnan().all() and y[1, 0].isnan() and (y[1, 1:] == 0).all() and y[2].isfinite().all()
    act = swiglu.reference(x, x, contract=SwigluContract(store=mode))
    assert act[0, 0].isnan() and act[1, 0] == float("inf") and act[2].isfinite().all()
    turned = _rope(x[:, None], torch.ones(3, 4), torch.ones(3, 4), store=mode)
    assert turned[0].isnan().sum() == 2 and turned[1].isinf().sum() == 2 and turned[2].isfinite().all()


def test_weight_in_float32_is_used_as_it_is() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    weight = torch.full((64,), 1.0 + 2.0**-12)
    fine, coarse = (_norm(x, w, scale="fp32") for w in (weight, weight.to(BF16)))
    assert fine.dtype == BF16 and not torch.equal(fine, coarse)


@pytest.mark.parametrize("strided", ["columns", "transposed"])
def test_strided_input_gives_the_bits_of_contiguous_input(strided: str) -> None:
    base = torch.randn(40, 6, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    x = base[..., ::2] if strided == "columns" else base.transpose(0, 1)
    weight, copy = torch.randn(x.shape[-1]).to(BF16), x.contiguous()
    assert torch.equal(_norm(x, weight), _norm(copy, weight))
    assert torch.equal(_swiglu(x, x), _swiglu(copy, copy))
    tables = torch.randn(x.shape[0], 4), torch.randn(x.shape[0], 4)
    assert torch.equal(_rope(x, *tables), _rope(copy, *tables))
