"""The search of a fingerprint shares intermediates and counts no contract further than to the runner-up: same answers, less work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rpadiag.contracts import Contract, RmsNormContract, RopeContract
from rpadiag.regions import qk_norm, rmsnorm, rope
from rpadiag.regions.fingerprint import Evaluate, Fingerprint, Search, identify
from rpadiag.regions.fingerprint_qk import NormsAndRotations, joint_candidates
from rpadiag.regions.fingerprint_rmsnorm import Norms, candidates
from rpadiag.regions.fingerprint_rope import Rotations, rope_table

EPS = 1e-5


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, RESIDUAL, WEIGHT = normal(1, 120, 384), normal(2, 120, 384), normal(3, 384) * 0.3 + 0.6
QUERY, HEAD_WEIGHT = normal(4, 40, 2, 32), normal(5, 32) * 0.3 + 0.6
COS, SIN = (t[:, None] for t in rope_table(torch.arange(40) * 7, 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rotations_that_share_halves_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    x = QUERY.to(dtype)
    rotations = Rotations(x, COS[..., :12], SIN[..., :12], lp=dtype)
    for contract in RopeContract.space(levels=(1, 2)):
        assert same_bits(rotations(contract), rope.rotate(x, COS[..., :12], SIN[..., :12], contract=contract))


@pytest.mark.parametrize("residual", [None, RESIDUAL], ids=["plain", "residual"])
def test_norms_that_share_intermediates_have_the_bits_of_the_reference(residual: Tensor | None) -> None:
    norms = Norms(X, WEIGHT, eps=EPS, residual=residual)
    for contract in (*RmsNormContract.space(levels=(1,)), *RmsNormContract.space(levels=(2,), scale="fp32")):
        weight = None if contract.weight == "none" else WEIGHT
        y = rmsnorm.reference(X, weight, eps=EPS, contract=contract, residual=residual)
        assert same_bits(norms(contract), y[0] if isinstance(y, tuple) else y)


def test_joint_contracts_that_share_norms_have_the_bits_of_the_reference() -> None:
    shared = NormsAndRotations(QUERY, HEAD_WEIGHT, COS, SIN, eps=EPS)
    for joint in joint_candidates():
        own = qk_norm.reference(
            QUERY, HEAD_WEIGHT, COS, SIN, eps=EPS, norm=joint.norm, rope=joint.rope, mid=joint.mid.mid
        )
        assert same_bits(shared(joint), own)  # type: ignore[arg-type]


class Watched:
    """A search for a residual norm that counts the rows it evaluates."""

    def __init__(self) -> None:
        self.num_rows = 0

    def at(self, rows: Tensor) -> Evaluate:
        norms = Norms(X[rows], WEIGHT, eps=EPS, residual=RESIDUAL[rows])

        def evaluate(contract: Contract) -> Tensor:
            self.num_rows += len(rows)
            return norms(contract)

        return evaluate

    def find(self, out: Tensor, *, piecewise: bool) -> Fingerprint:
        space = candidates(has_weight=True, has_residual=True)
        search = Search(region="rmsnorm", candidates=space, at=self.at, blind_spot=lambda _: None, piecewise=piecewise)
        return identify(search, out)


def planted(contract: RmsNormContract, *, flipped: int) -> Tensor:
    """Output of a contract, the last ``flipped`` elements of which are one ULP off."""
    y = rmsnorm.reference(X, WEIGHT, eps=EPS, contract=contract, residual=RESIDUAL)
    out = y[0].clone()
    if flipped:
        out.view(torch.int16).view(-1)[-flipped:] += 1
    return out


@pytest.mark.parametrize("flipped", [0, 3, 12, 40, 20_000], ids=lambda n: f"{n} flipped")
@pytest.mark.parametrize("contract", list(RmsNormContract.space(weight="w", sum="fp32", variance="unrounded")), ids=str)
def test_counting_no_further_than_to_the_runner_up_changes_no_answer(contract: RmsNormContract, flipped: int) -> None:
    out = planted(contract, flipped=flipped)
    pieces, whole = Watched(), Watched()
    assert pieces.find(out, piecewise=True) == whole.find(out, piecewise=False)
    if not flipped:
        assert pieces.num_rows < 0.5 * whole.num_rows


def test_contracts_that_all_fit_are_all_counted_to_the_end() -> None:
    rows = torch.zeros_like(X)
    space = candidates(has_weight=True, has_residual=True)
    search = Search(
        region="rmsnorm",
        candidates=space,
        at=lambda index: Norms(rows[index], WEIGHT, eps=EPS, residual=rows[index]),
        blind_spot=lambda _: None,
        piecewise=True,
    )
    found = identify(search, rows)
    assert found.matches == space and found.runner_up is None
    assert found == identify(replace(search, piecewise=False), rows)
