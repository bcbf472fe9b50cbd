"""The Hugging Face kernels library can put contracts into a model."""

from __future__ import annotations

import pytest
import torch
from aligned_models import IDS, make_model, step

import rpadiag
from rpadiag.contracts import RmsNormContract
from rpadiag.errors import UsageError
from rpadiag.regions.hf_kernels import kernel_mapping

kernels = pytest.importorskip("kernels", reason="the kernels library is not installed")


def _kernelized(mapping: dict[str, dict[str, object]]) -> torch.Tensor:
    model = make_model("mistral").eval()
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    try:
        with torch.no_grad():
            return model(input_ids=IDS).logits
    finally:  # the RoPE function is one per process: give it back
        with kernels.use_kernel_mapping({}, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")


@pytest.mark.parametrize("regions", [("rmsnorm",), ("rope",), ("rmsnorm", "rope")], ids="+".join)
def test_kernelized_model_equals_the_aligned_one(regions: tuple[str, ...]) -> None:
    model = make_model("mistral").eval()
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with rpadiag.align(model, regions=regions, contract="vllm-eager"):
            expected = model(input_ids=IDS).logits
    got = _kernelized(kernel_mapping("vllm-eager", device="cpu", regions=regions))
    assert torch.equal(got, expected) and not torch.equal(got, plain)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, plain)


def test_kernelized_model_trains() -> None:
    model = make_model("llama")
    with kernels.use_kernel_mapping(kernel_mapping(device="cpu", regions=("rmsnorm",)), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert all(bool(g.isfinite().all()) for g in step(model)[1].values())


@pytest.mark.parametrize(
    ("contract", "region", "message"),
    [
        ("fp32-output", "rmsnorm", "cannot follow rmsnorm: sum=fp32"),
        ("sglang", "rope", "cannot follow rope: cache=fp32"),
        ("vllm-eager", "swiglu", "unknown region of the kernels library"),
        (RmsNormContract(), "rope", "says nothing about region rope"),
    ],
)
def test_what_one_module_cannot_follow_is_refused(contract: object, region: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kernel_mapping(contract, regions=(region,))  # type: ignore[arg-type]
