"""The fingerprint finds planted contracts, says what it cannot tell and why, and never guesses."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from rpadiag.contracts import Contract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.errors import UsageError
from rpadiag.regions import rmsnorm, rope, swiglu
from rpadiag.regions.fingerprint import Fingerprint
from rpadiag.regions.fingerprint_rmsnorm import candidates, fingerprint_rmsnorm
from rpadiag.regions.fingerprint_rope import fingerprint_rope, rope_table
from rpadiag.regions.fingerprint_swiglu import fingerprint_swiglu

BF16 = torch.bfloat16
ROWS, COLUMNS, EPS = 128, 384, 1e-5


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


X, RESIDUAL, WEIGHT = normal(1, ROWS, COLUMNS), normal(2, ROWS, COLUMNS, scale=3), normal(3, COLUMNS, scale=0.3) + 0.6
GATE, UP = normal(4, 96, 512), normal(5, 96, 512)
QUERY, POSITIONS = normal(6, 64, 2, 64), torch.arange(64) * 11
INV_FREQ = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)


def normed(
    contract: RmsNormContract, x: Tensor = X, weight: Tensor = WEIGHT, residual: Tensor | None = RESIDUAL
) -> Tensor:
    y = rmsnorm.reference(
        x, None if contract.weight == "none" else weight, eps=EPS, contract=contract, residual=residual
    )
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("contract", list(RmsNormContract.space(weight="w", rstd="fp32")), ids=str)
def test_planted_residual_rmsnorm_contract_is_the_only_match(contract: RmsNormContract) -> None:
    found = fingerprint_rmsnorm(X, WEIGHT, normed(contract), eps=EPS, residual=RESIDUAL)
    assert found.contract == contract
    assert found.runner_up_differing is not None and found.runner_up_differing > 1e-3


@pytest.mark.parametrize("contract", list(candidates(has_weight=True, has_residual=False)), ids=str)
def test_planted_plain_rmsnorm_contract_is_the_only_match(contract: RmsNormContract) -> None:
    found = fingerprint_rmsnorm(X, WEIGHT, normed(contract, residual=None), eps=EPS)
    assert found.matches == (contract,)


@pytest.mark.parametrize("contract", list(RopeContract.space(store="rne")), ids=str)
def test_planted_rope_contract_is_the_only_match(contract: RopeContract) -> None:
    out = rope.reference(QUERY, *rope_table(POSITIONS, INV_FREQ), contract=contract)
    assert fingerprint_rope(QUERY, POSITIONS, out, inv_freq=INV_FREQ).matches == (contract,)


@pytest.mark.parametrize("contract", list(RopeContract.space(layout="neox", store="truncate", cache="lp")), ids=str)
def test_planted_truncating_fp16_rope_contract_is_the_only_match(contract: RopeContract) -> None:
    x = QUERY.half()
    out = rope.reference(x, *rope_table(POSITIONS, INV_FREQ), contract=contract)
    assert fingerprint_rope(x, POSITIONS, out, inv_freq=INV_FREQ).matches == (contract,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("contract", list(SwigluContract.space()), ids=str)
def test_planted_swiglu_contract_is_the_only_match(contract: SwigluContract, dtype: torch.dtype) -> None:
    gate, up = GATE.to(dtype), UP.to(dtype)
    assert fingerprint_swiglu(gate, up, swiglu.reference(gate, up, contract=contract)).matches == (contract,)


def test_partial_rotary_is_fingerprinted_on_the_rotated_columns() -> None:
    cos, sin = rope_table(POSITIONS, INV_FREQ[:16])
    contract = RopeContract(cache="lp", products="fp32")
    out = rope.reference(QUERY, cos, sin, contract=contract, rotary_dim=32)
    assert fingerprint_rope(QUERY, POSITIONS, out, cos=cos, sin=sin, rotary_dim=32).contract == contract


def axes_of(found: Fingerprint) -> dict[str, str]:
    assert found.status == "not determined" and found.contract is None
    return {a.axis: a.reason for a in found.ambiguities}


def test_power_of_two_weights_leave_the_scale_axis_untold() -> None:
    ones = torch.ones(COLUMNS, dtype=BF16)
    found = fingerprint_rmsnorm(X, ones, normed(RmsNormContract(), weight=ones), eps=EPS, residual=RESIDUAL)
    reasons = axes_of(found)
    assert "power of two" in reasons["scale"]
    assert RmsNormContract() in found.matches


def test_zero_residual_leaves_the_sum_axes_untold() -> None:
    zero = torch.zeros_like(X)
    found = fingerprint_rmsnorm(X, WEIGHT, normed(RmsNormContract(), residual=zero), eps=EPS, residual=zero)
    reasons = axes_of(found)
    assert "residual is zero" in reasons["sum"] and "residual is zero" in reasons["variance"]


def test_sums_that_are_exact_leave_the_sum_axes_untold() -> None:
    x = torch.randint(-8, 9, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(9)).to(BF16)
    found = fingerprint_rmsnorm(x, WEIGHT, normed(RmsNormContract(), x=x, residual=x), eps=EPS, residual=x)
    assert "exact" in axes_of(found)["sum"]


def test_weights_on_a_coarse_grid_leave_the_rounding_of_one_plus_weight_untold() -> None:
    weight = (torch.randint(-60, 60, (COLUMNS,), generator=torch.Generator().manual_seed(8)) / 128).to(BF16)
    contract = RmsNormContract(weight="1+w", scale="fp32")
    found = fingerprint_rmsnorm(X, weight, normed(contract, weight=weight, residual=None), eps=EPS)
    assert "1+w is exact" in axes_of(found)["weight"]


def test_position_zero_alone_determines_nothing() -> None:
    found = fingerprint_rope(QUERY, torch.zeros(64, dtype=torch.int64), QUERY, inv_freq=INV_FREQ)
    assert found.status == "not determined"
    assert "position 0" in found.text


def test_a_table_given_rounded_leaves_the_cache_axis_untold() -> None:
    cos, sin = (t.to(BF16) for t in rope_table(POSITIONS, INV_FREQ))
    out = rope.reference(QUERY, cos, sin, contract=RopeContract(cache="lp", products="fp32"))
    assert "already rounded" in axes_of(fingerprint_rope(QUERY, POSITIONS, out, cos=cos, sin=sin))["cache"]


def test_up_of_powers_of_two_leaves_the_silu_axis_untold() -> None:
    up = torch.ones_like(GATE) * 2
    out = swiglu.reference(GATE, up, contract=SwigluContract(silu="fp32"))
    assert "power of two" in axes_of(fingerprint_swiglu(GATE, up, out))["silu"]


def test_fewer_than_64_rows_do_not_determine_a_residual_norm() -> None:
    out = normed(RmsNormContract(), x=X[:63], residual=RESIDUAL[:63])
    found = fingerprint_rmsnorm(X[:63], WEIGHT, out, eps=EPS, residual=RESIDUAL[:63])
    assert found.status == "not determined"
    assert "too few rows: 63" in found.text and "at least 64" in found.text


def test_float32_output_determines_nothing() -> None:
    found = fingerprint_swiglu(GATE.float(), UP.float(), GATE.float())
    assert found.status == "not determined" and "float32" in found.text


def test_rare_mismatches_name_the_level_two_variant_that_removes_them() -> None:
    x, residual = normal(11, 256, 2048), normal(12, 256, 2048, scale=2)
    weight = normal(13, 2048, scale=0.3) + 0.6
    planted = RmsNormContract(scale="fp32", order="x*(r*w)")
    out = normed(planted, x=x, weight=weight, residual=residual)
    found = fingerprint_rmsnorm(x, weight, out, eps=EPS, residual=residual)
    assert found.contract == RmsNormContract(scale="fp32")
    assert found.level_two is not None
    assert 0 < found.level_two.num_differing <= 1e-4 * x.numel()
    assert found.level_two.cause == "order=x*(r*w)" and found.level_two.contract == planted


def test_rare_mismatches_that_no_variant_removes_are_called_by_the_usual_cause() -> None:
    out = normed(RmsNormContract())
    out[7, 5] = out[7, 5] * 1.01
    found = fingerprint_rmsnorm(X, WEIGHT, out, eps=EPS, residual=RESIDUAL)
    assert found.contract == RmsNormContract()
    assert found.level_two is not None and "reduction order" in found.level_two.cause


def test_truncating_kernel_outside_the_space_is_one_sided() -> None:
    exact = GATE.double() * UP.double() * 0.5  # no swiglu at all
    near = exact.to(BF16)
    found = fingerprint_swiglu(GATE, UP, near)
    assert found.status == "no known contract" and found.contract is None and found.matches == ()

    y = rmsnorm.reference(X, WEIGHT, eps=EPS, contract=RmsNormContract(rstd="lp", scale="fp32"))
    assert isinstance(y, Tensor)
    fifth = (torch.arange(y.numel()).reshape(y.shape) % 5 == 0).to(torch.int16)
    truncated = (y.view(torch.int16) - fifth).view(BF16)
    found = fingerprint_rmsnorm(X, WEIGHT, truncated, eps=EPS)
    assert found.status == "no known contract"
    assert found.structure is not None and found.structure.kind == "one-sided"
    assert "toward zero" in found.text


def test_wrong_epsilon_is_no_known_contract_and_per_row() -> None:
    x = normal(20, ROWS, COLUMNS) * torch.logspace(-2, 0, ROWS)[:, None].to(BF16)
    y = rmsnorm.reference(x, WEIGHT, eps=1e-6, contract=RmsNormContract())
    shaken = rmsnorm.reference(x, WEIGHT, eps=1e-4, contract=RmsNormContract())
    assert isinstance(y, Tensor) and isinstance(shaken, Tensor)
    mixed = torch.where(torch.arange(ROWS)[:, None] % 2 == 0, y, shaken)
    found = fingerprint_rmsnorm(x, WEIGHT, mixed, eps=1e-5)
    assert found.status == "no known contract"
    assert found.structure is not None and found.structure.kind == "per-row"


def test_other_weight_is_no_known_contract_and_per_column() -> None:
    other = (WEIGHT.float() * (1 + 0.004 * torch.sign(normal(30, COLUMNS).float()))).to(BF16)
    found = fingerprint_rmsnorm(X, WEIGHT, normed(RmsNormContract(), weight=other), eps=EPS, residual=RESIDUAL)
    assert found.status == "no known contract"
    assert found.structure is not None and found.structure.kind == "per-column"


@pytest.mark.parametrize("planted", [RmsNormContract(), RmsNormContract(scale="fp32")], ids=str)
def test_fingerprint_survives_json(planted: Contract) -> None:
    assert isinstance(planted, RmsNormContract)
    for rows in (20, ROWS):
        out = normed(planted, x=X[:rows], residual=RESIDUAL[:rows])
        found = fingerprint_rmsnorm(X[:rows], WEIGHT, out, eps=EPS, residual=RESIDUAL[:rows])
        assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_nan_and_infinity_are_matched_where_the_reference_has_them() -> None:
    x = X.clone()
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    found = fingerprint_rmsnorm(x, WEIGHT, normed(RmsNormContract(), x=x), eps=EPS, residual=RESIDUAL)
    assert found.contract == RmsNormContract()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fingerprint_rmsnorm(X, WEIGHT, X[:5], eps=EPS), "128 input rows for 5 output rows"),
        (lambda: fingerprint_rmsnorm(X[:0], WEIGHT, X[:0], eps=EPS), "empty"),
        (lambda: fingerprint_rmsnorm(X, WEIGHT[:7], X, eps=EPS), "weight"),
        (lambda: fingerprint_swiglu(GATE, UP[:, :5], GATE), "differ in shape"),
        (lambda: fingerprint_rope(QUERY[:, 0], POSITIONS, QUERY[:, 0], inv_freq=INV_FREQ), "heads"),
        (lambda: fingerprint_rope(QUERY, POSITIONS, QUERY), "inv_freq"),
    ],
    ids=["rows", "empty", "weight", "shape", "rank", "no table"],
)
def test_captures_that_do_not_fit_together_are_errors(call: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()  # type: ignore[operator]
