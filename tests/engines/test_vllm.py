"""The real vLLM engine: scores to the last bit, every site of every family, packed, chunked and decoded.

One engine serves all tests here (a start costs tens of seconds, a reload a few). It computes deterministically where
the machine can, but no test relies on that: what must be equal is computed in the same batch, or compared by
relations between sites that hold exactly (an add is an add, a split is a split).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import STARTED_AMID
from tiny import FAMILIES, HEAD_DIM, HEADS, KV_HEADS, VOCAB, token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import BundleCapture, open_bundle
from rpadiag.engines.scoring import score_logits
from rpadiag.engines.vllm import RolloutResult, VllmEngine
from rpadiag.errors import InputError, UsageError

pytestmark = pytest.mark.vllm
LIMIT = 200


def sequence(length: int, *, prompt: int = 0, seed: int | None = None) -> TokenSequence:
    ids = tuple(token_ids(length, seed=prompt if seed is None else seed))
    return TokenSequence(prompt=prompt, token_ids=ids, num_prompt_tokens=length)


SEQUENCES = [sequence(n, prompt=i) for i, n in enumerate((37, 5, 64, 1))]


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], vllm_on: Callable[..., VllmEngine]) -> VllmEngine:
    return vllm_on(tiny("llama"), max_model_len=LIMIT + 1, max_num_batched_tokens=48)


@pytest.fixture
def llama(engine: VllmEngine, tiny: Callable[[str], Path]) -> VllmEngine:
    """The engine with the Llama checkpoint in BF16, whatever the test before loaded."""
    manifest = engine.manifest()
    as_started = (manifest["model"], manifest["dtype"], manifest["max_model_len"]) == (
        str(tiny("llama")),
        "bfloat16",
        LIMIT + 1,
    )
    if not as_started or "hf_overrides" in manifest["arguments"]:
        engine.reload(
            model=tiny("llama"),
            dtype="bfloat16",
            max_model_len=LIMIT + 1,
            hf_overrides=None,
            max_num_batched_tokens=48,
        )
    return engine


def same_scores(a: RolloutResult, b: RolloutResult) -> bool:
    names = ("logprob", "entropy", "rank", "argmax")
    return all(getattr(a.scores, n).tobytes() == getattr(b.scores, n).tobytes() for n in names)


def relations_hold(capture: BundleCapture, *, layers: int = 2) -> None:
    """Check what must hold exactly between captured sites of one sequence, whatever the kernels round."""

    def read(site: str) -> torch.Tensor:
        return capture.read(site)

    below = read("embed")
    for n in range(layers):
        at = f"layers.{n}."
        added = (("attn_norm", "o"), ("mlp_norm", "expert_out", "down"))
        for names, stream in zip(added, ("resid_attn", "resid_mlp"), strict=True):
            branch = next(name for name in names if at + name in capture.sites)
            assert torch.equal(below + read(at + branch), read(at + stream)), f"{at}{stream} is not the rounded sum"
            below = read(at + stream)
        # RoPE turns pairs and leaves position 0 alone: a captured q that RoPE had already turned would fail
        source = at + ("q_norm" if at + "q_norm" in capture.sites else "q")
        assert torch.equal(read(source)[0], read(at + "q_rope")[0])
        if len(below) > 1:
            assert not torch.equal(read(source)[1], read(at + "q_rope")[1])
        # the first token attends to itself alone: its attention output is its value
        heads = read(at + "v")[0].view(KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, dim=0)
        assert torch.equal(read(at + "attn")[0], heads.reshape(-1))


def test_prompt_logprobs_equal_a_direct_call_of_vllm_to_the_last_bit(
    llama: VllmEngine, smollm2: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.json", tmp_path / "out.json"
    several = [sequence(n, prompt=n) for n in (24, 9)]
    prompts.write_text(json.dumps([s.token_ids for s in several]))
    script = Path(__file__).with_name("direct_vllm.py")
    subprocess.run([sys.executable, script, smollm2, prompts, out], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)
    direct = json.loads(out.read_text())
    llama.reload(model=smollm2)
    for result, expected in zip(llama.score(several), direct, strict=True):
        assert result.scores.logprob.tolist() == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_every_family_is_captured_and_fits_its_neighbours(
    engine: VllmEngine, tiny: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    engine.reload(model=tiny(family), dtype="bfloat16")
    results = engine.score(SEQUENCES, sites=engine.facts.sites, bundle_dir=tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert bundle.meta["dtype"] == "bfloat16"
    for index, result in enumerate(results):
        capture = bundle.capture(index)
        assert capture.sites == engine.facts.sites
        assert result.sequence == SEQUENCES[index]
        assert result.positions.tolist() == list(range(len(result.sequence.token_ids)))
        relations_hold(capture)


def test_scores_follow_from_the_captured_logits(llama: VllmEngine, tmp_path: Path) -> None:
    results = llama.score(SEQUENCES, sites=["logits", "logprob"], bundle_dir=tmp_path / "b")
    for index, result in enumerate(results):
        capture = open_bundle(tmp_path / "b").capture(index)
        expected = score_logits(capture.read("logits"), result.sequence.token_ids)
        assert result.scores.logprob.tolist() == expected.logprob.tolist()
        assert capture.read("logprob").reshape(-1).tolist() == expected.logprob.tolist()
        assert result.scores.rank.tolist() == expected.rank.tolist()
        assert result.scores.argmax.tolist() == expected.argmax.tolist()
        # a sum over the vocabulary in float32, in another order
        np.testing.assert_allclose(result.scores.entropy, expected.entropy, rtol=1e-5, atol=1e-5)


def test_capturing_changes_no_score_and_leaves_no_hook(llama: VllmEngine, tmp_path: Path) -> None:
    plain = llama.score(SEQUENCES)
    captured = llama.score(SEQUENCES, sites=llama.facts.sites, bundle_dir=tmp_path / "b")
    again = llama.score(SEQUENCES)
    for a, b, c in zip(plain, captured, again, strict=True):
        assert same_scores(a, b) and same_scores(a, c)


def test_only_requested_sites_are_captured(llama: VllmEngine, tmp_path: Path) -> None:
    llama.score(SEQUENCES[:1], sites=["layers.1.k_rope", "layers.0.gate"], bundle_dir=tmp_path / "b")
    capture = open_bundle(tmp_path / "b").capture(0)
    assert capture.sites == ("layers.0.gate", "layers.1.k_rope")
    assert capture.read("layers.1.k_rope").shape == (37, KV_HEADS * HEAD_DIM)


def test_a_packed_batch_is_taken_apart_into_its_prompts(llama: VllmEngine, tmp_path: Path) -> None:
    # 48 tokens a step: prompts 37 + 5 share one with the start of the third, which takes three steps
    results = llama.score(SEQUENCES, sites=llama.facts.sites, bundle_dir=tmp_path / "b", together=True)
    alone = llama.score(SEQUENCES, sites=["embed"], bundle_dir=tmp_path / "alone")
    for index, result in enumerate(results):
        capture = open_bundle(tmp_path / "b").capture(index)
        relations_hold(capture)
        assert torch.equal(capture.read("embed"), open_bundle(tmp_path / "alone").capture(index).read("embed"))
        expected = score_logits(capture.read("logits"), result.sequence.token_ids)
        assert result.scores.logprob.tolist() == expected.logprob.tolist()
        assert result.positions.tolist() == list(range(len(result.sequence.token_ids)))
        # the batch changes roundings, and nothing else
        np.testing.assert_allclose(result.scores.logprob, alone[index].scores.logprob, atol=1.0)


@pytest.mark.parametrize("together", [False, True])
def test_generated_tokens_are_captured_behind_their_prompt(llama: VllmEngine, tmp_path: Path, together: bool) -> None:
    results = llama.score(
        SEQUENCES, sites=llama.facts.sites, bundle_dir=tmp_path / "b", num_generate=6, together=together
    )
    for index, (given, result) in enumerate(zip(SEQUENCES, results, strict=True)):
        ids = result.sequence.token_ids
        assert ids[: len(given.token_ids)] == given.token_ids and len(ids) == len(given.token_ids) + 6
        assert result.sequence.num_prompt_tokens == len(given.token_ids)
        assert result.positions.tolist() == list(range(len(ids)))
        assert len(result.scores) == len(ids) - 1
        capture = open_bundle(tmp_path / "b").capture(index)
        relations_hold(capture)
        expected = score_logits(capture.read("logits"), ids)
        assert result.scores.logprob.tolist() == expected.logprob.tolist()
        assert result.scores.argmax.tolist() == expected.argmax.tolist()


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_given_tokens_are_decoded_step_by_step_each_with_rows_of_its_own(llama: VllmEngine, tmp_path: Path) -> None:
    """In FP32, where rounding cannot hide a repeated or shifted buffer: a decode step's rows are those of its own token."""
    llama.reload(dtype="float32")
    sites = llama.facts.sites
    given = [TokenSequence(prompt=i, token_ids=sequence(40, seed=i).token_ids, num_prompt_tokens=25) for i in range(3)]
    llama.score(given, sites=sites, bundle_dir=tmp_path / "prompt")
    for together in (False, True):
        directory = tmp_path / f"decoded-{together}"
        results = llama.score(given, sites=sites, bundle_dir=directory, decode=True, together=together)
        for index, result in enumerate(results):
            assert result.sequence == given[index]
            assert result.positions.tolist() == list(range(40))
            decoded, prefilled = (open_bundle(d).capture(index) for d in (directory, tmp_path / "prompt"))
            for site in sites:
                a, b = decoded.read(site), prefilled.read(site)
                assert a.shape == b.shape
                # measured 2e-6 at most; the rows of another token differ by about 1
                assert max(relative_l2(x, y) for x, y in zip(a[24:], b[24:], strict=True)) < 1e-4, site
                assert all(relative_l2(x, y) > 1e-2 for x, y in pairwise(a[25:])) or a.shape[1] == 1, site
            expected = score_logits(decoded.read("logits"), given[index].token_ids)
            assert result.scores.logprob.tolist() == expected.logprob.tolist()


def test_decoded_logprobs_are_those_of_sampling_when_the_sampled_tokens_are_given(llama: VllmEngine) -> None:
    prompts = [sequence(n, prompt=i) for i, n in enumerate((20, 7))]
    sampled = llama.score(prompts, num_generate=9, seed=5)
    again = llama.score([r.sequence for r in sampled], decode=True)
    for a, b in zip(sampled, again, strict=True):
        assert same_scores(a, b)


def test_top_p_draws_from_the_nucleus_and_scores_stay_raw(llama: VllmEngine) -> None:
    (narrow,) = llama.score([sequence(20)], num_generate=8, top_p=1e-6)
    (greedy,) = llama.score([sequence(20)], num_generate=8, temperature=0.0)
    assert same_scores(narrow, greedy)  # the smallest nucleus is the most likely token
    assert narrow.scores.logprob[20:].max() < -1e-3  # processed logprobs would all be 0
    with pytest.raises(UsageError, match="ask for one of them"):
        llama.score([sequence(20)], num_generate=8, decode=True)


def test_a_prompt_split_over_steps_has_the_sites_of_a_whole_one(llama: VllmEngine, tmp_path: Path) -> None:
    """Chunked prefill in FP32: the same rows in the same order."""
    long = [sequence(100, prompt=0, seed=3), sequence(70, prompt=1, seed=4)]
    llama.reload(dtype="float32", max_num_batched_tokens=512)
    llama.score(long, sites=llama.facts.sites, bundle_dir=tmp_path / "whole")
    llama.reload(dtype="float32", max_num_batched_tokens=16)
    assert llama.manifest()["chunked_prefill"] is True
    llama.score(long, sites=llama.facts.sites, bundle_dir=tmp_path / "split", together=True)
    for index, given in enumerate(long):
        whole, split = (open_bundle(tmp_path / d).capture(index) for d in ("whole", "split"))
        assert whole.positions.tolist() == split.positions.tolist() == list(range(len(given.token_ids)))
        for site in llama.facts.sites:
            # measured 2e-6 at most
            assert relative_l2(split.read(site), whole.read(site)) < 1e-5, site


def test_sampling_follows_its_seed_and_greedy_takes_the_argmax(llama: VllmEngine) -> None:
    def tokens(**options: float) -> list[tuple[int, ...]]:
        return [r.sequence.token_ids for r in llama.score(SEQUENCES[:2], num_generate=8, **options)]  # type: ignore[arg-type]

    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    (greedy,) = llama.score(SEQUENCES[:1], num_generate=8, temperature=0.0)
    assert list(greedy.sequence.token_ids[37:]) == greedy.scores.argmax[36:].tolist()
    assert greedy.scores.rank[36:].tolist() == [1] * 8


def test_fp32_comes_in_the_same_process(llama: VllmEngine, tmp_path: Path) -> None:
    half = llama.score(SEQUENCES)
    llama.reload(dtype="float32")
    full = llama.score(SEQUENCES, sites=["layers.0.q_rope", "logits"], bundle_dir=tmp_path / "b")
    assert llama.manifest()["dtype"] == "float32"
    assert open_bundle(tmp_path / "b").capture(0).read("layers.0.q_rope").dtype == torch.float32
    for a, b in zip(half, full, strict=True):
        np.testing.assert_allclose(a.scores.logprob, b.scores.logprob, atol=1.0)


def test_fp32_scores_equal_the_trainers_up_to_fp32_rounding(llama: VllmEngine, tiny: Callable[[str], Path]) -> None:
    from rpadiag.engines.trainer import TrainerEngine

    llama.reload(dtype="float32")
    trainer = TrainerEngine.load(tiny("llama"), dtype="float32")
    for result in llama.score(SEQUENCES[:3]):
        expected = trainer.forward(result.sequence.token_ids)
        # measured 1e-5; a wrong slice or position moves logprobs by more than 1
        np.testing.assert_allclose(result.scores.logprob, expected.logprob, atol=1e-3)
        np.testing.assert_allclose(result.scores.entropy, expected.entropy, atol=1e-3)


def test_hf_overrides_reach_the_model(llama: VllmEngine) -> None:
    plain = llama.score(SEQUENCES[:1])
    llama.reload(hf_overrides={"rms_norm_eps": 0.5})
    changed = llama.score(SEQUENCES[:1])
    facts, manifest = llama.facts, llama.manifest()
    assert facts.rms_eps == 0.5 and manifest["arguments"]["hf_overrides"] == {"rms_norm_eps": 0.5}
    assert not same_scores(plain[0], changed[0])


def test_the_manifest_names_what_decides_the_numbers(llama: VllmEngine) -> None:
    manifest = llama.manifest()
    json.dumps(manifest, allow_nan=False)
    assert manifest["engine"] == "vllm" and manifest["vllm_version"]
    assert manifest["attention_backend"] == "CPU_ATTN"
    assert manifest["logprobs_mode"] == "raw_logprobs"
    assert manifest["prefix_caching"] is False and manifest["enforce_eager"] is True
    assert manifest["max_num_batched_tokens"] == 48
    assert manifest["arguments"]["max_num_batched_tokens"] == 48
    assert manifest["env"]["OMP_NUM_THREADS"] == "1"
    assert manifest["max_model_len"] == LIMIT + 1


def test_the_callers_environment_is_untouched(llama: VllmEngine) -> None:
    environment, imported = STARTED_AMID["before"]
    assert STARTED_AMID["after"] == (environment, imported)
    assert not imported  # no test may import vLLM into its worker: it replaces functions of torch


def test_a_prompt_past_the_limit_is_named(llama: VllmEngine) -> None:
    with pytest.raises(InputError, match="prompt 7 has 201 tokens, the engine takes 200") as caught:
        llama.score([sequence(3), sequence(LIMIT - 5, prompt=7)], num_generate=6)
    assert caught.value.hint is not None and "max_model_len=202" in caught.value.hint


def test_a_prompt_of_exactly_the_limit_is_scored(llama: VllmEngine) -> None:
    (result,) = llama.score([sequence(LIMIT)])
    assert len(result.scores) == LIMIT - 1


def test_the_models_own_limit_can_be_filled(llama: VllmEngine) -> None:
    llama.reload(max_model_len=10_000)
    (result,) = llama.score([sequence(512)])
    assert len(result.scores) == 511 and llama.manifest()["max_model_len"] == 513


def test_a_token_outside_the_vocabulary_is_named(llama: VllmEngine) -> None:
    bad = TokenSequence(prompt=4, token_ids=(5, VOCAB), num_prompt_tokens=2)
    with pytest.raises(InputError, match="prompt 4 has token id 512, the vocabulary has 512"):
        llama.score([bad])


def test_an_unknown_site_lists_the_known_ones(llama: VllmEngine) -> None:
    with pytest.raises(UsageError, match=r"unknown site: layers\.0\.q_norm"):
        llama.score(SEQUENCES[:1], sites=["layers.0.q_norm"])


def test_a_bundle_that_cannot_be_written_is_an_error_and_the_engine_goes_on(llama: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write bundle"):
        llama.score(SEQUENCES[:1], sites=["embed"], bundle_dir="/proc/no/bundle")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "something").touch()
    with pytest.raises(InputError, match="already exists"):
        llama.score(SEQUENCES[:1], sites=["embed"], bundle_dir=tmp_path / "b")
    assert len(llama.score(SEQUENCES)) == len(SEQUENCES)


def test_the_attention_operator_gives_what_the_forward_got(llama: VllmEngine, tmp_path: Path) -> None:
    given = sequence(40)
    llama.score([given], sites=llama.facts.sites, bundle_dir=tmp_path / "b")
    capture = open_bundle(tmp_path / "b").capture(0)
    with llama.attention(40) as attend:
        for layer in (1, 0, 1):
            qkv = [capture.read(f"layers.{layer}.{p}") for p in ("q_rope", "k_rope", "v")]
            assert torch.equal(attend(layer, *qkv), capture.read(f"layers.{layer}.attn"))
    with pytest.raises(UsageError, match="49 tokens does not fit in one step of 48"), llama.attention(49):
        pass
    assert len(llama.score([given])) == 1


def test_more_sequences_than_the_cache_holds_are_scored_in_groups(llama: VllmEngine) -> None:
    blocks = llama.manifest()["num_cache_blocks"]
    many = [sequence(3, prompt=i) for i in range(blocks + 3)]  # each takes a block of its own
    results = llama.score(many, together=True)
    assert [r.sequence for r in results] == many


def test_progress_names_each_sequence_as_it_finishes(llama: VllmEngine) -> None:
    finished: list[int] = []
    llama.score(SEQUENCES, on_finished=finished.append)
    assert finished == [0, 1, 2, 3]


def test_nothing_to_score_is_nothing(llama: VllmEngine) -> None:
    assert llama.score([]) == []
