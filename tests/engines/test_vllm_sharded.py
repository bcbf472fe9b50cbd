"""Tensor parallelism with the real engine: two ranks, one bundle, against the same engine on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import HIDDEN, make_checkpoint, token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.vllm import VllmEngine
from rpadiag.runs import create_run, open_run
from rpadiag.sites import reduced_site
from rpadiag.workflows.compare import run_compare
from rpadiag.workflows.inputs import Prompted
from rpadiag.workflows.options import CompareOptions
from rpadiag.workflows.rollout import start_rollout

# not importorskip: that imports vLLM into every worker that collects this file
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
SEQUENCES = [
    TokenSequence(prompt=n, token_ids=tuple(token_ids(t, seed=n)), num_prompt_tokens=t) for n, t in enumerate((40, 70))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sharded") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """The engine as ``--tp 2`` starts it, in FP32: three processes that import vLLM, so there is one for all tests."""
    home = tmp_path_factory.mktemp("two")
    options = CompareOptions(
        model=str(checkpoint), prompts=home / "none", run=home / "run", device="cpu", dtype="float32", tp=2,
        generate=128 - max(len(s.token_ids) for s in SEQUENCES) - 1, engine_args=("max_num_batched_tokens=32",),
    )  # fmt: skip
    inputs = Prompted(model=str(checkpoint), device="cpu", dtype="float32", prompts=(), sequences=tuple(SEQUENCES))
    with create_run(home / "run", command="compare", options={}) as run, start_rollout(options, inputs, run) as rollout:
        yield rollout.engine


@pytest.fixture(scope="module")
def captured(
    checkpoint: Path, two_ranks: VllmEngine, vllm_on: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
):
    """Bundles of one and of two ranks, in FP32, and the two engines' weight digests and manifests."""
    home = tmp_path_factory.mktemp("ranks")
    one_rank = vllm_on(checkpoint, max_model_len=128, max_num_batched_tokens=32)
    one_rank.reload(dtype="float32")
    found = {}
    for ranks, engine in ((1, one_rank), (2, two_ranks)):
        results = engine.score(SEQUENCES, sites=engine.sites, bundle_dir=home / f"{ranks}", num_generate=3)
        found[ranks] = (results, open_bundle(home / f"{ranks}"), engine.weight_digests(), engine.manifest())
    return found


def test_two_ranks_show_every_site_in_full_width_and_agree_with_one(captured) -> None:
    (_, one, _, _), (_, two, _, _) = captured[1], captured[2]
    for index in range(len(SEQUENCES)):
        a, b = one.capture(index), two.capture(index)
        assert set(b.sites) - set(a.sites) == {s for s in b.sites if reduced_site(s)}
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


def test_partial_products_of_the_ranks_sum_to_what_the_engine_gave(captured) -> None:
    capture = captured[2][1].capture(0)
    for layer in (0, 1):
        for point, given in (("o_reduce", "o"), ("down_reduce", "down")):
            first, second = capture.read(f"layers.{layer}.{point}").split(HIDDEN, dim=1)
            assert not torch.equal(first, second)
            assert torch.equal(first + second, capture.read(f"layers.{layer}.{given}"))


def test_a_comparison_over_two_ranks_says_what_the_all_reduce_rounds(
    captured, checkpoint: Path, two_ranks: VllmEngine, tmp_path: Path
) -> None:
    """Last: the engine goes on in BF16."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": token_ids(24, seed=n)}) + "\n" for n in range(2)))
    run_compare(
        CompareOptions(
            model=str(checkpoint), prompts=prompts, run=tmp_path / "run", device="cpu", tp=2, control="none",
            sites=("o_reduce", "down_reduce", "o"),
        ),
        running=two_ranks,
    )  # fmt: skip
    run = open_run(tmp_path / "run")
    rows = run.sites().query("region == 'all_reduce'")
    assert set(rows["site"]) == {f"layers.{n}.{p}" for n in (0, 1) for p in ("o_reduce", "down_reduce")}
    assert (rows["local_n"] == 24 * HIDDEN).all() and rows["n"].isna().all()
    (finding,) = [f for f in run.findings if f["code"] == "all-reduce"]
    assert "over 2 ranks (o_proj, down_proj)" in finding["text"]
    assert finding["numbers"]["reproduced_by"] is not None
    assert finding["numbers"]["num_elements"] == 2 * 24 * HIDDEN * 4
    assert "o_reduce" not in run.manifest["sites"]["absent"]
