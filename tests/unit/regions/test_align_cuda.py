"""align on a GPU, where it runs the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aligned_models import WAYS, assert_same, make_model

import rpadiag
from rpadiag.regions.ops import kernels_installed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not kernels_installed(), reason="needs the Triton kernels"),
]
IDS = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(1))


def model_on_gpu(family: str = "llama", **config: Any) -> Any:
    return make_model(family, **config).cuda()


def step(model: Any, forward: Any = None) -> Any:
    """Logits and gradients with deterministic library kernels."""
    model.zero_grad()
    out = (model if forward is None else forward)(input_ids=IDS.cuda(), labels=IDS.cuda())
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("preset", ["hf-eager", "fp32-output", "liger", "flashinfer"])
@pytest.mark.parametrize("region", ["rope", "swiglu"])
def test_kernels_and_references_give_one_model(preset: str, region: str) -> None:
    model = model_on_gpu("qwen3")
    with rpadiag.align(model, regions=(region,), contract=preset, kernels="reference"):
        expected = step(model)
    with rpadiag.align(model, regions=(region,), contract=preset, kernels="triton"):
        assert_same(expected, step(model))


@pytest.mark.parametrize("preset", WAYS)
def test_kernels_run_twice_and_under_checkpointing_give_the_same_bits(preset: str) -> None:
    model = model_on_gpu("llama")
    with rpadiag.align(model, contract=preset, kernels="triton"):
        expected = step(model)
        assert_same(expected, step(model))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(expected, step(model))


@pytest.mark.parametrize("preset", ["fp32-output", "vllm-eager"])
def test_kernels_stay_whole_under_torch_compile(preset: str) -> None:
    model = model_on_gpu("llama")
    with rpadiag.align(model, contract=preset, kernels="triton"):
        expected = step(model)
        torch._dynamo.reset()
        assert_same(expected, step(model, torch.compile(model, backend="aot_eager")))


def test_undo_on_a_gpu_brings_every_bit_back() -> None:
    model = model_on_gpu("qwen3")
    before = step(model)
    with rpadiag.align(model):
        step(model)
    assert_same(before, step(model))
