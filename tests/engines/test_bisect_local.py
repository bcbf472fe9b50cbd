"""Local evidence: what a region makes, which way it points, and where it leads to first order."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import make_checkpoint, token_ids

from rpadiag.attribution.design import parts_of, replicates_of, variants_of
from rpadiag.engines.base import TokenSequence
from rpadiag.engines.products import fp32_products
from rpadiag.engines.switches import TrainerSwitches
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.regions.presets import PRESETS
from rpadiag.workflows.bisect_local import local_evidence
from rpadiag.workflows.bisect_score import PrefixScorer

REGIONS = ("rope", "swiglu", "rmsnorm")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return TrainerEngine.load(make_checkpoint(tmp_path_factory.mktemp("local") / "llama", num_hidden_layers=3))


@pytest.fixture(scope="module")
def sequences():
    return [TokenSequence(prompt=i, token_ids=tuple(token_ids(30 + i, seed=i)), num_prompt_tokens=30) for i in range(6)]


def planted(**regions):
    """A contract that is transformers' own but for the regions given."""
    return {**{r: PRESETS["hf-eager"].regions[r] for r in REGIONS}, **regions}


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_makes_something_only_where_its_contract_is_another(trainer, sequences, region):
    contract = planted(**{region: PRESETS["fp32-output"].regions[region]})
    found = local_evidence(trainer, sequences, TrainerSwitches(trainer.model, contract=contract), parts_of(REGIONS))
    for other in REGIONS:
        made = found.of_region(other)
        assert made.num_elements > 0
        assert (made.num_differing > 0) == (other == region)
        assert (np.abs(found.effects[other]).max() > 0) == (other == region)
        assert not made.one_sided
    assert found.reason is None and len(found.effects[region]) == sum(len(s.token_ids) - 1 for s in sequences)


@pytest.mark.parametrize(
    ("region", "contract"),
    [
        ("rope", planted(rope=PRESETS["hf-eager"].regions["rope"].replace(products="fp32", store="truncate"))),
        ("swiglu", planted(swiglu=PRESETS["hf-eager"].regions["swiglu"].replace(store="truncate"))),
    ],
)
def test_a_planted_truncation_is_called_one_sided(trainer, sequences, region, contract):
    found = local_evidence(trainer, sequences, TrainerSwitches(trainer.model, contract=contract), parts_of(REGIONS))
    if region == "swiglu":
        assert found.of_region(region).one_sided
        (sentence,) = found.one_sided_sentences()
        assert sentence.startswith("swiglu: one-sided") and "nearer to zero in the aligned computation" in sentence
    else:  # the trainer's own rope rounds its products first, so some differences point the other way
        assert found.of_region(region).balance > 0.2


def test_effects_by_layer_add_up_to_those_by_region_and_to_one_backward_pass(trainer, sequences):
    switches = TrainerSwitches(trainer.model, contract="vllm-compiled")
    whole = local_evidence(trainer, sequences, switches, parts_of(REGIONS))
    split = local_evidence(trainer, sequences, switches, parts_of(REGIONS, by=("region", "layer"), num_layers=3))
    num_tokens = len(whole.effects["rope"])
    for region in REGIONS:
        summed = sum(effect for name, effect in split.effects.items() if name.startswith(region))
        np.testing.assert_allclose(summed, whole.effects[region], atol=2e-4 * np.abs(whole.effects[region]).max())
        shift = sum(m.shift for m in whole.made if m.region == region)
        assert shift * num_tokens == pytest.approx(whole.effects[region].sum(), abs=1e-3)


def test_first_order_effects_agree_with_replicates_where_rounding_is_all_that_follows(trainer, sequences):
    # A region that errs by much more than a rounding: chaos is small beside it, and the change of each logprob is seen.
    contract = planted(swiglu=PRESETS["hf-eager"].regions["swiglu"].replace(sigmoid="lp", store="truncate"))
    switches = TrainerSwitches(trainer.model, contract=contract)
    parts = parts_of(("swiglu",))
    found = local_evidence(trainer, sequences, switches, parts, num_draws=8).effects["swiglu"]
    variants = [v for v in variants_of(parts) if v.design in ("reference", "each")]
    scored = dict(PrefixScorer(trainer, sequences, switches)(list(replicates_of(variants, range(64), seed=0))))
    means = {d: np.mean([x for r, x in scored.items() if r.variant.design == d], axis=0) for d in ("reference", "each")}
    seen = means["each"] - means["reference"]
    slope = float((found * seen).sum() / (found * found).sum())
    assert 0.5 < slope < 1.3
    assert np.corrcoef(found, seen)[0, 1] > 0.6


def test_every_switchable_region_has_evidence(tmp_path, sequences):
    trainer = TrainerEngine.load(make_checkpoint(tmp_path / "qwen3", "qwen3"))
    regions = (*REGIONS, "qk_norm", "attention", "matmul", "lm_head")
    with fp32_products(trainer.model):
        switches = TrainerSwitches(trainer.model, contract="fp32-output", wide_products=True)
        found = local_evidence(trainer, sequences[:2], switches, parts_of(regions), num_draws=2)
    assert {m.region for m in found.made} == set(regions)
    for region in ("rope", "rmsnorm", "attention", "lm_head"):
        assert found.of_region(region).num_differing > 0 and np.abs(found.effects[region]).max() > 0
    assert found.of_region("lm_head").num_elements == 2 * (30 + 31) * 512
    assert all("forward" not in m.__dict__ for m in trainer.model.modules())
