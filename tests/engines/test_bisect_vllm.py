"""The zero-noise test bed: the real vLLM CPU engine, whose floors are exactly zero here, and one mismatch.

The trainer is brought to the engine's bits in everything but two regions, one of which the two stacks compute alike. Against the
engine's own logprobs the attribution has to find exactly the other one, without replicates and without a tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest

from rpadiag.attribution.design import parts_of, replicates_of, variants_of
from rpadiag.engines.base import TokenSequence
from rpadiag.engines.switches import TrainerSwitches
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.regions.presets import vllm_cpu_preset
from rpadiag.workflows.bisect_score import PrefixScorer

TEXTS = (
    "Continents move a few centimetres a year, about as fast as fingernails grow, and nobody believed it at first.",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
)
NUM_TOKENS = 16
MISMATCHES = ("rope", "rmsnorm", "attention")
ALL = (*MISMATCHES, "swiglu", "matmul")


@pytest.fixture(scope="module")
def sequences(trainer: TrainerEngine) -> list[TokenSequence]:
    ids = [tuple(trainer.tokenizer(text)["input_ids"][:NUM_TOKENS]) for text in TEXTS]
    return [TokenSequence(prompt=i, token_ids=x, num_prompt_tokens=NUM_TOKENS) for i, x in enumerate(ids)]


@pytest.fixture(scope="module")
def rollout(engine: VllmEngine, sequences: list[TokenSequence]) -> np.ndarray:
    scored = engine.score(sequences)
    batched = engine.score(sequences, together=True)
    assert all(np.array_equal(a.scores.logprob, b.scores.logprob) for a, b in zip(scored, batched, strict=True))
    return np.concatenate([r.scores.logprob for r in scored]).astype(np.float64)


def test_a_replicate_of_the_engine_is_that_of_the_trainer_to_the_last_bit_where_all_is_aligned(
    trainer: TrainerEngine, engine: VllmEngine, sequences: list[TokenSequence], rollout: np.ndarray
) -> None:
    """Both stacks draw the same noise: under it the fully aligned trainer still gives the engine's bits."""
    variants = [v for v in variants_of(parts_of(ALL)) if v.design == "reference"]
    asked = list(replicates_of(variants, range(2), seed=5))
    with engine.attention(NUM_TOKENS) as attend:
        switches = TrainerSwitches(trainer.model, contract=vllm_cpu_preset("bfloat16"), attention=attend)
        scored = {r.seed: x for r, x in PrefixScorer(trainer, sequences, switches, fill=False)(asked)}
    for seed in (5, 6):
        theirs = np.concatenate(engine.replicate(sequences, seed=seed))
        assert np.array_equal(scored[seed], theirs)
        assert np.abs(theirs - rollout).mean() > 1e-3  # the noise has moved it
    assert np.array_equal(np.concatenate(engine.replicate(sequences, seed=None)), rollout)


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_exactly_the_one_mismatch_with_the_real_engine_is_found(
    trainer: TrainerEngine, engine: VllmEngine, sequences: list[TokenSequence], rollout: np.ndarray, mismatch: str
) -> None:
    parts = parts_of((mismatch, "swiglu"))
    variants = [v for v in variants_of(parts) if v.design in ("reference", "each")]
    asked = list(replicates_of(variants, [0], seed=0, kind="none"))
    with engine.attention(NUM_TOKENS) as attend:
        switches = TrainerSwitches(trainer.model, contract=vllm_cpu_preset("bfloat16"), attention=attend)
        # The inner switches of a scorer and the outer ones that hold everything else must not meet in a region.
        with switches.aligned(dict.fromkeys(r for r in ALL if r not in (mismatch, "swiglu"))):
            scored = {r.variant.name: x for r, x in PrefixScorer(trainer, sequences, switches, fill=False)(asked)}
    assert np.array_equal(scored["reference"], rollout)
    assert np.array_equal(scored["swiglu"], rollout)  # both stacks round silu alike: nothing is planted there
    assert np.abs(scored[mismatch] - rollout).mean() > 1e-3
