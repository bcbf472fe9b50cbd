"""The scorer: the same bits as whole forwards, with fewer layers run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import make_checkpoint, token_ids

import rpadiag
from rpadiag.attribution.design import (
    Replicate,
    Switch,
    Variant,
    layers_by_region,
    parts_of,
    replicates_of,
    variants_of,
)
from rpadiag.engines import noise
from rpadiag.engines.base import TokenSequence
from rpadiag.engines.switches import TrainerSwitches
from rpadiag.engines.trainer import TrainerEngine, move_by_ulps
from rpadiag.workflows.bisect_score import PrefixScorer

LAYERS = 6


def sequences(*lengths):
    return [
        TokenSequence(prompt=i, token_ids=tuple(token_ids(n, seed=i)), num_prompt_tokens=n)
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return TrainerEngine.load(make_checkpoint(tmp_path_factory.mktemp("deep") / "llama", num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """Layers below, between and above where variants part; a forward for every one of them is compared with."""
    return TrainerEngine.load(make_checkpoint(tmp_path_factory.mktemp("shallow") / "llama", num_hidden_layers=3))


def scorer(trainer, given, contract="fp32-output", **options):
    return PrefixScorer(trainer, given, TrainerSwitches(trainer.model, contract=contract), **options)


def whole_forward(trainer, given, replicate, contract):
    """The replicate without any sharing: one forward per sequence, the embedding moved by a hook of its own."""
    out = []
    switches = TrainerSwitches(trainer.model, contract=contract)
    for number, sequence in enumerate(given):
        embedded = trainer.model.get_input_embeddings()(torch.tensor([sequence.token_ids])).detach()
        drawn = noise.ulp_draws(len(sequence.token_ids), embedded.shape[-1], seed=replicate.seed, number=number)
        offsets = noise.ulp_offsets(embedded, torch.from_numpy(drawn)[None])[0]
        with switches.aligned(layers_by_region(replicate.variant.aligned, trainer.facts.num_layers)):
            out.append(trainer.forward_with_embedding_offset(sequence.token_ids, offsets.to(torch.int8)).logprob)
    return np.concatenate(out).astype(np.float64)


@pytest.mark.parametrize("contract", ["fp32-output", "vllm-cpu-avx2", "flashinfer"])
@pytest.mark.parametrize("by", [("region",), ("layer",), ("region", "layer")])
def test_shared_layers_give_the_bits_of_whole_forwards(shallow, contract, by):
    given = sequences(20, 33)
    parts = parts_of(("rope", "rmsnorm", "swiglu", "attention", "lm_head"), by=by, num_layers=shallow.facts.num_layers)
    asked = list(replicates_of(variants_of(parts), [1], seed=5))
    found = dict(scorer(shallow, given, contract)(asked))
    assert set(found) == set(asked)
    for replicate in asked:
        assert np.array_equal(found[replicate], whole_forward(shallow, given, replicate, contract)), replicate


def test_ranges_of_layers_share_half_of_the_layers_and_regions_share_the_reference_alone(trainer):
    given = sequences(20, 20)
    costs = {}
    for by, groups in ((("region",), None), (("layer",), LAYERS), (("region", "layer"), LAYERS)):
        parts = parts_of(("rope", "rmsnorm", "swiglu"), by=by, num_layers=LAYERS, num_groups=groups)
        variants = [v for v in variants_of(parts) if v.design in ("reference", "each", "all")]
        score = scorer(trainer, given)
        list(score(list(replicates_of(variants, range(4), seed=0))))
        costs[by] = score.cost
    whole = costs[("region",)]
    assert whole.num_forwards == 5 * 4 * 2 and whole.num_layer_evaluations == whole.num_layers_whole == 40 * LAYERS
    assert whole.saved_by_prefix == 1.0 and whole.saved_in_all == 2 * 4 / 5
    # The reference runs 6 layers, ranges 6 + 5 + ... + 1, and "all" 5: it agrees with the first range in layer 0.
    assert costs[("layer",)].num_layer_evaluations == 4 * 2 * (6 + 21 + 5)
    assert costs[("layer",)].saved_by_prefix == 1.5 and costs[("layer",)].saved_in_all > 2.5
    assert costs[("region", "layer")].saved_by_prefix == 1.6


def test_the_heads_switch_shares_every_layer(trainer):
    parts = parts_of(("lm_head",))
    score = scorer(trainer, sequences(20))
    found = dict(score(list(replicates_of(variants_of(parts), range(2), seed=0))))
    references = {r.seed: x for r, x in found.items() if r.variant.design == "reference"}
    left = {r.seed: x for r, x in found.items() if r.variant.design == "each"}
    assert all(0 < np.abs(left[s] - references[s]).max() < 0.1 for s in references)
    assert score.cost.saved_by_prefix == 2.0  # reference, each and all cost one forward, self another


def test_a_replicate_does_not_depend_on_what_else_is_asked_for(trainer):
    given = sequences(20, 25)
    asked = list(replicates_of(variants_of(parts_of(("rope", "swiglu"))), range(5), seed=1))
    for fill in (False, True):
        score = scorer(trainer, given, fill=fill, block_replicates=3)
        together = dict(score(asked))
        for chosen in (asked[3:4], asked[1:7], asked[::-2]):
            for replicate, logprobs in score(chosen):
                assert np.array_equal(logprobs, together[replicate])


def test_filled_batches_have_one_size_and_unfilled_ones_are_used_where_batching_changes_no_bit(trainer):
    given = sequences(20)
    (one,) = replicates_of(variants_of(parts_of(("rope",)))[:1], [7], seed=0)
    filled, plain = scorer(trainer, given, fill=True, block_replicates=4), scorer(trainer, given)
    list(filled([one]))
    list(plain([one]))
    assert filled.cost.num_layer_evaluations == 4 * LAYERS
    assert plain.fill or plain.cost.num_layer_evaluations == LAYERS


def test_ulp_noise_has_no_mean_whatever_the_value():
    values = torch.arange(-32639, 32640, dtype=torch.int32)
    every = torch.where(values < 0, -32768 - values, values).to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() < torch.finfo(torch.bfloat16).max]
    moved = [
        move_by_ulps(every, noise.ulp_offsets(every, torch.full(every.shape, d, dtype=torch.int8))) for d in range(6)
    ]
    assert torch.equal(torch.stack(moved).double().sum(0), 6 * every.double())
    assert (torch.stack(moved) != every).double().mean() == pytest.approx(2 / 3, abs=0.01)


def test_order_noise_moves_logprobs_by_rounding_and_follows_its_seed(trainer):
    given = sequences(400, 400)  # a sum in another order flips about one output in 20,000 of so narrow a model
    score = scorer(trainer, given)
    variant = Variant(design="reference", name="reference", aligned=(Switch(region="rope"),))
    by_seed = {}
    for seed in (1, 2, 1):
        ((_, logprobs),) = score([Replicate(variant=variant, index=0, seed=seed, kind="order")])
        assert seed not in by_seed or np.array_equal(by_seed[seed], logprobs)
        by_seed[seed] = logprobs
    ((_, plain),) = score([Replicate(variant=variant, index=0, seed=1, kind="none")])
    assert 0 < np.abs(by_seed[1] - plain).mean() < 0.5 and not np.array_equal(by_seed[1], by_seed[2])


def test_equivalent_batches_score_the_same_sequence(trainer):
    given = sequences(30, 22)
    score = scorer(trainer, given)
    variant = Variant(design="reference", name="reference", aligned=(Switch(region="rope"), Switch(region="rmsnorm")))
    ((_, plain),) = score([Replicate(variant=variant, index=0, seed=1, kind="none")])
    ((_, mixed),) = score([Replicate(variant=variant, index=0, seed=1, kind="batch")])
    assert (
        np.abs(mixed - plain).max() < 1.0
    )  # rounding at most: a wrong mask or position moves logprobs by several nats


def test_the_model_is_as_before_after_scoring_and_after_an_error(trainer):
    before = trainer.forward(token_ids(20)).logprob
    score = scorer(trainer, sequences(20, 24))
    asked = list(replicates_of(variants_of(parts_of(("rope", "matmul", "attention"))), range(2), seed=0))
    answers = score(asked)
    next(answers)
    answers.close()
    broken = scorer(trainer, sequences(20), on_forward=lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(broken(asked))
    assert all("forward" not in m.__dict__ for m in trainer.model.modules())
    assert np.array_equal(trainer.forward(token_ids(20)).logprob, before)
    with rpadiag.align(trainer.model):
        pass
