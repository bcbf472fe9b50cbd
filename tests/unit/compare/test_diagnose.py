"""The diagnosis as a whole: order, regions given and guessed, odd tensors, and statistics where nothing stronger holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rpadiag.compare.diagnose import diagnose_site, diagnose_sites
from rpadiag.compare.explain import FINDING_SEVERITY, SITE_SEVERITIES
from rpadiag.compare.roles import DIAGNOSED_REGIONS, REGION_WORDS, find_role
from rpadiag.errors import UsageError
from rpadiag.sites import all_sites, region_of

BF16 = torch.bfloat16


def normal(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flipped(x: Tensor, share: float, seed: int = 0) -> Tensor:
    """A share of the elements moved by one ULP, half of them up."""
    g = torch.Generator().manual_seed(seed)
    step = (torch.rand(x.shape, generator=g) < share).int() * (2 * torch.randint(0, 2, x.shape, generator=g) - 1)
    return (x.view(torch.int16) + step.to(torch.int16)).view(x.dtype)


def test_every_severity_has_a_finding_severity_and_every_region_a_word() -> None:
    assert set(SITE_SEVERITIES) == set(FINDING_SEVERITY)
    assert set(DIAGNOSED_REGIONS) == set(REGION_WORDS)


@pytest.mark.parametrize("site", all_sites(2, qk_norm=True))
def test_own_sites_have_the_region_that_sites_py_gives_them(site: str) -> None:
    assert find_role(site).region == region_of(site)


@pytest.mark.parametrize(
    ("name", "region", "kind"),
    [
        ("input_ids", "data", "tokens"),
        ("positionIds", "data", "positions"),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", "rope", "table"),
        ("q_rope", "rope", "output"),
        ("k_norm", "qk_norm", "output"),
        ("q_final", "qk_norm", "rotated"),
        ("input_layernorm", "rmsnorm", "output"),
        ("residual_after_72", "rmsnorm", "residual"),
        ("rstd", "rmsnorm", "rstd"),
        ("act_fp32", "swiglu", "output"),
        ("scores_d128", "attention", "scores"),
        ("v_cache", "attention", "cache"),
        ("router_logits", "router", "output"),
        ("topk_weights", "router", "combine"),
        ("lm_head.logits", "lm_head", "logits"),
        ("completion_logprobs", "sampling", "logprob"),
        ("embed_scaled", "embed", "output"),
        ("weights_l0", "weights", "weights"),
        ("o_proj", "matmul", "output"),
    ],
)
def test_foreign_names_are_understood(name: str, region: str, kind: str) -> None:
    role = find_role(name)
    assert (role.region, role.kind) == (region, kind)


def test_first_divergent_site_leads_and_its_consequences_are_called_so() -> None:
    x, y = normal(1, 64, 64), normal(2, 64, 64)
    found = diagnose_sites(
        {"embed": x, "o_proj": x, "hidden": y}, {"embed": x, "o_proj": flipped(x, 0.2), "hidden": flipped(y, 0.4)}
    )
    assert found.first_site == "o_proj" and found.equal_sites == ("embed",)
    assert [f.site for f in found.findings] == ["o_proj"]
    assert "downstream: hidden" in found.text


def test_data_stop_the_diagnosis_before_numerics() -> None:
    ids = torch.arange(30)
    found = diagnose_sites(
        {"input_ids": ids[1:], "hidden": normal(1, 29, 8)}, {"input_ids": ids, "hidden": normal(2, 30, 8)}
    )
    assert found.severity == "data" and [f.site for f in found.findings] == ["input_ids"]


def test_equal_sites_give_no_finding() -> None:
    found = diagnose_sites({"act": normal(1, 8, 8)}, {"act": normal(1, 8, 8)})
    assert found.findings == () and found.severity == "control" and found.first_site is None
    assert diagnose_site(normal(1, 8, 8), normal(1, 8, 8), site="act") == []


def test_sign_of_zero_and_dtype_alone_are_no_difference() -> None:
    x = torch.tensor([0.0, 1.0, -2.0])
    assert diagnose_site(x, torch.tensor([-0.0, 1.0, -2.0]), site="act") == []
    assert diagnose_site(x, x.to(BF16), site="act") == []


def test_region_can_be_given_and_an_unknown_one_lists_the_known() -> None:
    x = normal(1, 64, 64)
    (finding,) = diagnose_site(x, flipped(x, 0.2), site="tensor_17", region="matmul")
    assert finding.region == "matmul"
    assert diagnose_site(x, flipped(x, 0.2), site="tensor_17")[0].region == "unknown"
    with pytest.raises(UsageError, match="unknown region"):
        diagnose_site(x, x, site="act", region="glue")


def test_site_on_one_side_only_is_an_error() -> None:
    with pytest.raises(UsageError, match="one side only"):
        diagnose_sites({"act": normal(1, 4, 4)}, {"hidden": normal(1, 4, 4)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "site", ["q_rope", "act", "norm_out", "attn_out", "logits", "o_proj", "q_norm", "embed", "hidden"]
)
@pytest.mark.parametrize(
    ("share", "severity"), [(3e-4, "ulp-noise"), (0.02, "rounding-contract"), (0.4, "rounding-contract")]
)
def test_random_one_ulp_flips_are_never_called_a_fault(
    dtype: torch.dtype, site: str, share: float, severity: str
) -> None:
    x = normal(3, 192, 256, dtype=dtype)
    for seed in range(2):
        found = diagnose_sites({site: x}, {site: flipped(x, share, seed)})
        assert found.severity == severity, found.text
        assert "unbiased" in found.text


@pytest.mark.parametrize("scale", [1e-7, 3e-7, 1e-6])
def test_float32_noise_of_any_long_sum_is_order_noise(scale: float) -> None:
    x = normal(4, 128, 256, dtype=torch.float32)
    found = diagnose_sites({"o_proj": x}, {"o_proj": x * (1 + scale * normal(5, 128, 256, dtype=torch.float32))})
    assert found.severity == "ulp-noise", found.text


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)
SHAPES = ((), (1,), (0,), (33,), (16, 32), (4, 16, 32), (2, 2, 8, 8))
NAMES = (
    "input_ids",
    "inv_freq",
    "q_rope",
    "act",
    "norm_out",
    "rstd",
    "logits",
    "logprob",
    "k_cache",
    "expert_ids",
    "weight",
    "x7",
)


@pytest.mark.parametrize(("dtype", "shape"), list(itertools.product(DTYPES, SHAPES)), ids=str)
def test_tensors_of_any_dtype_and_shape_get_an_answer(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    a, b = (normal(i, *shape, dtype=torch.float32) * 3 for i in (7, 8))
    b = torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(9)) < 0.2, torch.tensor(0.0), b)
    cast = [(t > 0) if dtype == torch.bool else t.to(dtype) for t in (a, b)]
    for name in NAMES:
        found = diagnose_sites({name: cast[0]}, {name: cast[1]}, {"x": cast[0], "weight": torch.ones(32)})
        assert found.severity in SITE_SEVERITIES


def test_complex_tables_are_compared_as_pairs() -> None:
    angle = torch.arange(40)[:, None] * torch.logspace(0, -3, 8)[None]
    table = torch.polar(torch.ones_like(angle), angle)
    found = diagnose_sites({"freqs_cis": table}, {"freqs_cis": table.conj().resolve_conj()})
    assert found.region == "rope" and found.severity == "semantic"
