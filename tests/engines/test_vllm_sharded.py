"""Tensor parallelism with the real engine: two ranks, one bundle, against the same engine on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_checkpoint, token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.trainer import TrainerEngine

pytest.importorskip("vllm")
from rpadiag.engines.vllm import VllmEngine

SEQUENCES = [
    TokenSequence(prompt=n, token_ids=tuple(token_ids(t, seed=n)), num_prompt_tokens=t) for n, t in enumerate((40, 70))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sharded") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def captured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """Bundles of one and of two ranks, in FP32, and the two engines' weight digests and manifests."""
    home = tmp_path_factory.mktemp("ranks")
    found = {}
    for ranks in (1, 2):
        with VllmEngine.start(
            checkpoint, dtype="float32", max_model_len=128, tensor_parallel_size=ranks, max_num_batched_tokens=32,
            log_path=home / f"{ranks}.log",
        ) as engine:  # fmt: skip
            results = engine.score(SEQUENCES, sites=engine.sites, bundle_dir=home / f"{ranks}", num_generate=3)
            found[ranks] = (results, open_bundle(home / f"{ranks}"), engine.weight_digests(), engine.manifest())
    return found


def test_two_ranks_show_every_site_in_full_width_and_agree_with_one(captured) -> None:
    (_, one, _, _), (_, two, _, _) = captured[1], captured[2]
    for index in range(len(SEQUENCES)):
        a, b = one.capture(index), two.capture(index)
        assert set(a.sites) == set(b.sites)
        if one.sequences[index].token_ids != two.sequences[index].token_ids:
            continue  # a sampled token differed
        for site in a.sites:
            x, y = a.read(site), b.read(site)
            assert x.shape == y.shape, site
            assert torch.allclose(x, y, rtol=1e-3, atol=1e-3 * float(x.abs().max())), site


def test_columns_of_a_rank_are_in_the_order_of_heads(captured, checkpoint: Path) -> None:
    trainer = TrainerEngine.load(checkpoint, dtype="float32")
    bundle = captured[2][1]
    seen = {}
    trainer.forward(
        bundle.sequences[0].token_ids, sites=["layers.0.q", "layers.0.k_rope", "layers.1.act"],
        on_site=lambda site, t: seen.__setitem__(site, t.clone()),
    )  # fmt: skip
    for site, tensor in seen.items():
        assert torch.allclose(bundle.capture(0).read(site), tensor, atol=1e-3 * float(tensor.abs().max())), site


def test_sharded_scores_and_weights_are_those_of_one_rank(captured, checkpoint: Path) -> None:
    (ours, _, digests, _), (theirs, _, sharded, manifest) = captured[1], captured[2]
    assert sharded == digests
    assert manifest["tensor_parallel_size"] == 2
    for a, b in zip(ours, theirs, strict=True):
        prompt = a.sequence.num_prompt_tokens - 1
        assert abs(a.scores.logprob[:prompt] - b.scores.logprob[:prompt]).max() < 1e-3
        assert (a.scores.argmax[:prompt] == b.scores.argmax[:prompt]).mean() > 0.95


def test_ranks_agree_on_what_was_reduced_and_leave_no_files(captured) -> None:
    bundle = captured[2][1]
    assert bundle.meta["ranks_unequal"] == []
    assert not list(bundle.directory.glob("rank-*"))
