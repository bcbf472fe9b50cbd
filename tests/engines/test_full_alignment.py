"""The strongest test there is: a transformers forward that equals the real vLLM engine to the last bit.

It holds only if the site maps, the capture, the contracts and align are all right at once. Leaving one region out must
show as a first divergent site inside that region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.borrowed import borrowed_attention
from rpadiag.engines.bundle import Bundle, open_bundle
from rpadiag.engines.merged import merged_projections
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.regions.align import align
from rpadiag.regions.presets import vllm_cpu_preset
from rpadiag.sites import region_of

REGIONS = ("rope", "swiglu", "rmsnorm")
TEXTS = (
    "Continents move a few centimetres a year, about as fast as fingernails grow, and nobody believed it at first.",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
)


@pytest.fixture(scope="module")
def captured(engine: VllmEngine, trainer: TrainerEngine, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two prompts, every site, from the real engine."""
    directory = tmp_path_factory.mktemp("full") / "bundle"
    sequences = []
    for index, text in enumerate(TEXTS):
        ids = tuple(trainer.tokenizer(text)["input_ids"])
        sequences.append(TokenSequence(prompt=index, token_ids=ids, num_prompt_tokens=len(ids)))
    sites = [s for s in trainer.facts.sites if s != "logprob"]
    engine.score(sequences, sites=sites, bundle_dir=directory)
    return open_bundle(directory)


def divergence(
    trainer: TrainerEngine, bundle: Bundle, engine: VllmEngine, *, without: str | None = None
) -> tuple[str | None, np.ndarray]:
    """First site with any differing element, and |d| of every logprob, with all regions but one aligned."""
    first: str | None = None
    differences = []
    for index, sequence in enumerate(bundle.sequences):
        capture = bundle.capture(index)
        found: list[str] = []

        def on_site(site: str, tensor: torch.Tensor, capture=capture, found=found) -> None:
            if not torch.equal(tensor.contiguous().view(torch.int16), capture.read(site).view(torch.int16)):
                found.append(site)

        sites = [s for s in trainer.facts.sites if s != "logprob"]
        with aligned(trainer, engine, len(sequence.token_ids), without=without):
            scores = trainer.forward(sequence.token_ids, sites=sites, on_site=on_site)
        assert capture.scores is not None
        differences.append(np.abs(scores.logprob - capture.scores.logprob))
        first = first or (found[0] if found else None)
    return first, np.concatenate(differences)


@contextlib.contextmanager
def aligned(trainer: TrainerEngine, engine: VllmEngine, num_tokens: int, *, without: str | None) -> Iterator[None]:
    regions = tuple(r for r in REGIONS if r != without)
    with contextlib.ExitStack() as stack:
        stack.enter_context(merged_projections(trainer.model))
        if without != "attention":
            stack.enter_context(borrowed_attention(trainer.model, stack.enter_context(engine.attention(num_tokens))))
        stack.enter_context(align(trainer.model, regions=regions, contract=vllm_cpu_preset("bfloat16")))
        yield


def test_fully_aligned_transformers_equals_the_vllm_engine_to_the_last_bit(
    trainer: TrainerEngine, captured: Bundle, engine: VllmEngine
) -> None:
    first, differences = divergence(trainer, captured, engine)
    assert first is None
    assert len(differences) > 40
    assert (differences == 0.0).all()


@pytest.mark.parametrize("left_out", ["rope", "rmsnorm", "attention"])
def test_a_region_left_out_is_the_first_to_diverge(
    trainer: TrainerEngine, captured: Bundle, engine: VllmEngine, left_out: str
) -> None:
    first, differences = divergence(trainer, captured, engine, without=left_out)
    assert first is not None
    assert region_of(first) == left_out
    assert differences.mean() > 1e-3


def test_swiglu_is_the_same_on_both_stacks_so_leaving_it_out_changes_nothing(
    trainer: TrainerEngine, captured: Bundle, engine: VllmEngine
) -> None:
    first, differences = divergence(trainer, captured, engine, without="swiglu")
    assert first is None
    assert (differences == 0.0).all()
