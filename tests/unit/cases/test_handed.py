"""The collected cases of public bug reports, where they lie beside the checkout: the diagnosis says what each report says."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rpadiag.workflows.diagnose import diagnose

PLACES = [p / "shared" / "cases" / "handed.py" for p in Path(__file__).resolve().parents[4:5]]
FILE = next((p for p in PLACES if p.is_file()), None)

REGIONS = {
    "residual-rmsnorm": ("rmsnorm",),
    "qk-norm": ("qk_norm",),
    "data-alignment": ("data",),
    "moe": ("router",),
    "other": ("embed", "weights"),
}

# What each report says that a program can look for: phrases and numbers of the diagnosis.
SAYS: dict[str, tuple[str, ...]] = {
    "rope-01": ("B.cos == bf16(A.cos) bit for bit", "table is rounded", "products are not rounded", "position 0 is exact", "unbiased"),
    "rope-03": ("inv_freq differs by a few fp32 ULP", "proportional to position", "small fraction at long positions"),
    "rope-05": ("products are rounded on A and are not rounded", "the table is rounded on both", "unbiased", "large ULP only where the two products cancel"),
    "rope-07": ("position 0 is exact", "norm preserved", "permuting the head dim", "layout, not precision"),
    "rope-10": ("two stacked contracts", "the table is not rounded on A and is rounded on B", "on A and are rounded on B"),
    "swiglu-01": ("is rounded before the product with up on B", "bit for bit", "at most 1 ULP", "unbiased", "; 27."),
    "swiglu-03": ("few float32 ULP", "same contract on both sides", "0.001 %", "at most 1 ULP"),
    "norm-01": ("residual stream bit-equal", "fused-add contract", "at most 2 ULP", "unbiased", "B == rmsnorm: sum=bf16 variance=rounded"),
    "norm-02": ("0/-1 magnitude ULP only", "mean magnitude -0.46 ULP", "value-signed mean is +0.00", "grows linearly with depth", "truncates"),
    "norm-04": ("at most 1 ULP", "unbiased", "24.7 %", "columns with w exactly 1 are equal", "weight-multiply cast order"),
    "norm-06": ("eps A = 1e-05, B = 1e-06", "one-sided gain sqrt((ms + 1e-05) / (ms + 1e-06)) per row", "none for large-rms rows"),
    "norm-08": ("row-coherent sign", "bf16(inv)/inv", "is rounded before the weight multiply on B"),
    "qk-01": ("order of norm and rope swapped", "position 0 agrees to rounding", "spread of the norm weight", "order, not precision"),
    "head-01": ("B.logits == bf16(A.logits) bit for bit",),
    "head-03": ("each vocabulary row is off by a constant factor", "same for every token", "per-channel", "scale is missing"),
    "head-05": ("no finding",),
    "attn-01": ("rows 0..63 bit-equal", "every row from 64 on differs", "one extra key at distance 64"),
    "attn-03": ("saturates at exactly +-448", "multiples of 2^-9", "unit scale", "attention arithmetic itself is fine"),
    "attn-05": ("head_dim 128", "not a power of two", "pre-scaled query rounding", "scores_d64"),
    "mm-01": ("row-parallel", "few ULP, larger where partials cancel", "unbiased", "column-parallel GEMMs are equal", "2 partial sums"),
    "mm-03": ("few float32 ULP", "unbiased", "accumulation order", "not a precision downgrade"),
    "samp-01": ("logits bit-equal", "T = 0.6 on A", "mostly negative"),
    "samp-03": ("logits equal", "delta >= 0 at every token", "-log(kept mass)", "0.801", "solved: 0.8"),
    "data-01": ("stop before numerics", "differ in length by one", "suffixes equal after dropping one leading", "BOS"),
    "data-03": ("lag-1 correlation is exactly 1", "B[t] == A[t+1]", "no model-side finding"),
    "data-06": ("first document bit-equal", "everything after the boundary differs", "index 13"),
    "moe-01": ("router", "B.probs == bf16(A.probs)", "tie or near-tie at the k-th place", "rank by flipped tokens", "router_logits"),
    "moe-03": ("expert ids equal", "not a distribution", "sum > 1, can be negative", "softmax over all experts"),
    "other-01": ("first site of the network", "0.99866", "-0.134 %", "before rounding", "same way in magnitude"),
    "other-03": ("weights differ before any activation", "W1_0", "do not attribute to kernels"),
}  # fmt: skip


@cache
def handed() -> ModuleType:
    assert FILE is not None
    spec = importlib.util.spec_from_file_location("handed_cases", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(FILE is None, reason="the collected cases are not beside this checkout (../shared/cases/handed.py)")
def test_every_collected_case_has_its_phrases() -> None:
    assert set(handed().CASES) <= set(SAYS)


@pytest.mark.skipif(FILE is None, reason="the collected cases are not beside this checkout (../shared/cases/handed.py)")
@pytest.mark.parametrize("name", list(SAYS))
def test_collected_case_is_diagnosed_as_its_report_says(name: str) -> None:
    make_a, make_b, make_inputs, expected = handed().CASES[name]
    inputs = make_inputs()
    a, b = make_a(inputs), make_b(inputs)
    if name == "swiglu-01":  # 9.4 million elements; a tenth says the same
        inputs = {k: v[:384] for k, v in inputs.items()}
        a, b = ({k: v[:384] for k, v in side.items()} for side in (a, b))
    found = diagnose(a, b, {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor | float | int)})
    assert found.first_site == expected["first_site"], found.text
    assert found.severity == expected["severity"], found.text
    if expected["severity"] != "control":
        assert found.region in REGIONS.get(expected["region"], (expected["region"],)), found.text
    for site in expected["equal_sites"]:
        assert site in found.equal_sites
    for phrase in SAYS[name]:
        assert phrase in found.text
