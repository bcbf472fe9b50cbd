"""align on a GPU, where it runs the Triton kernels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from aligned_models import WAYS, assert_same, make_model

import rpadiag
from rpadiag.regions.ops import kernels_installed
from rpadiag.regions.presets import PRESETS

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


NATIVE_WAYS = [way for way in WAYS if getattr(PRESETS[way].regions.get("rmsnorm"), "reduction", "native") == "native"]


def test_kernels_refuse_another_order_of_addition() -> None:
    (other,) = set(WAYS) - set(NATIVE_WAYS)
    model = model_on_gpu("llama")
    with rpadiag.align(model, contract=other, kernels="triton"), pytest.raises(ValueError, match="reduction=native"):
        step(model)


@pytest.mark.parametrize("preset", NATIVE_WAYS)
def test_kernels_run_twice_and_under_checkpointing_give_the_same_bits(preset: str) -> None:
    model = model_on_gpu("llama")
    with rpadiag.align(model, contract=preset, kernels="triton"):
        expected = step(model)
        assert_same(expected, step(model))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(expected, step(model))


def operators_in(graphs: list[Any]) -> set[str]:
    """Names of the rpadiag operators in captured graphs."""
    return {str(n.target) for graph in graphs for n in graph.nodes if str(n.target).startswith("rpadiag.")}


@pytest.mark.parametrize("preset", [None, "fp32-output", "vllm-eager"])
def test_kernels_stay_whole_under_torch_compile(preset: str | None) -> None:
    """Bits of logits and gradients, with eager attention: compiled, transformers hands SDPA another mask, and the gradients of
    the unaligned model differ too."""
    from torch._dynamo.backends.common import aot_autograd

    model = model_on_gpu("llama")
    model.set_attn_implementation("eager")
    graphs: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    with nullcontext() if preset is None else rpadiag.align(model, contract=preset, kernels="triton"):
        expected = step(model)
        for backend in ("eager", aot_autograd(fw_compiler=keep, bw_compiler=keep)):
            torch._dynamo.reset()
            assert_same(expected, step(model, torch.compile(model, backend=backend)))
    regions = {"rmsnorm", "rope", "swiglu"}
    whole = {f"rpadiag.{region}{way}.default" for region in regions for way in ("", "_backward")}
    assert operators_in(graphs) == (set() if preset is None else whole)


def test_undo_on_a_gpu_brings_every_bit_back() -> None:
    model = model_on_gpu("qwen3")
    before = step(model)
    with rpadiag.align(model):
        step(model)
    assert_same(before, step(model))
