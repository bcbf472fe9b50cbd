"""Contracts as data: names, JSON, enumeration, refusals."""

from __future__ import annotations

import json

import pytest

from rpadiag.contracts import (
    CONTRACT_TYPES,
    Contract,
    QkRopeContract,
    RmsNormContract,
    RopeContract,
    SwigluContract,
    contract_from_dict,
)
from rpadiag.errors import RpadiagError, UsageError

LEVELS: tuple[int | str, ...] = (1, 2, "backward")


def test_name_reads_from_input_to_output() -> None:
    contract = RmsNormContract(sum="lp", variance="rounded", scale="fp32")
    assert contract.name() == "rmsnorm: sum=bf16 variance=rounded scale=fp32 -> bf16"
    assert contract.name("fp16") == "rmsnorm: sum=fp16 variance=rounded scale=fp32 -> fp16"


def test_name_shows_an_unusual_value_of_any_axis() -> None:
    assert "store=truncate" in RopeContract(store="truncate").name()
    assert "weight=1+w" in RmsNormContract(weight="1+w").name()


@pytest.mark.parametrize("kind", CONTRACT_TYPES.values(), ids=CONTRACT_TYPES)
def test_every_contract_survives_json_and_has_its_own_name(kind: type[Contract]) -> None:
    names = set()
    count = 0
    for contract in kind.space(levels=(1,)):
        assert contract_from_dict(json.loads(json.dumps(contract.to_dict()))) == contract
        names.add(contract.name())
        count += 1
    assert len(names) == count


def test_level_one_spaces_have_the_size_of_their_axes() -> None:
    assert len(list(RmsNormContract.space())) == 2 * 2 * 2 * 4 * 2 * 2
    assert len(list(SwigluContract.space())) == 2 * 2 * 2
    assert len(list(RopeContract.space())) == 2 * (2 + 4) * 2 * 2
    assert len(list(QkRopeContract.space())) == 2


def test_rope_backward_space_holds_no_contradiction() -> None:
    found = [(c.grad_products, c.grad_fused) for c in RopeContract.space(levels=("backward",))]
    assert found == [("lp", "cc"), ("fp32", "cc"), *(("lp-fma", f) for f in ("cc", "cs", "sc", "ss"))]


def test_fixed_axes_pin_the_space() -> None:
    assert {c.weight for c in RmsNormContract.space(weight="1+w")} == {"1+w"}


def test_absent_axes_of_old_json_take_their_defaults() -> None:
    assert contract_from_dict({"region": "rmsnorm", "sum": "fp32"}) == RmsNormContract(sum="fp32")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"region": "rmsnorm", "sums": "lp"}, "sum"),
        ({"region": "rmsnorm", "sum": "bf17"}, "fp32"),
        ({"region": "rmsnom"}, "rmsnorm"),
    ],
)
def test_unknown_names_list_the_known_ones(data: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        contract_from_dict(data)
    assert named in str(caught.value.detail)


def test_replace_refuses_an_unknown_axis() -> None:
    with pytest.raises(UsageError, match="unknown axis of swiglu: silo"):
        SwigluContract().replace(silo="lp")


def test_fused_without_lp_fma_is_a_contradiction() -> None:
    with pytest.raises(RpadiagError, match="contradict"):
        RopeContract(products="fp32", fused="cc")
    with pytest.raises(RpadiagError, match="contradict"):
        RopeContract(products="lp-fma")


def test_canonical_form_drops_axes_that_cannot_matter() -> None:
    assert RmsNormContract(sum="fp32", variance="unrounded").canonical(residual=False) == RmsNormContract()
    assert RopeContract(products="fp32", fma="cc").canonical() == RopeContract(products="fp32")
    assert RopeContract(cache="fp32", products="fp32", fma="cc").canonical().fma == "cc"
    assert RmsNormContract(order="x*(r*w)").canonical() == RmsNormContract()


@pytest.mark.parametrize("kind", CONTRACT_TYPES.values(), ids=CONTRACT_TYPES)
def test_canonical_is_idempotent(kind: type[Contract]) -> None:
    for contract in kind.space(levels=(1, 2)):
        assert contract.canonical().canonical() == contract.canonical()
