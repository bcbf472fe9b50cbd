"""vLLM as it runs in production: compiled. Only attention and what follows the model is seen, and that is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import HEAD_DIM, HEADS, KV_HEADS, token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.scoring import score_logits
from rpadiag.engines.vllm import VllmEngine
from rpadiag.errors import CaptureError


@pytest.mark.vllm
def test_a_compiled_model_shows_attention_and_head_and_refuses_the_rest(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    sequences = [TokenSequence(prompt=n, token_ids=tuple(token_ids(n, seed=n)), num_prompt_tokens=n) for n in (37, 5)]
    with VllmEngine.start(
        tiny("llama"), enforce_eager=False, max_model_len=101, max_num_batched_tokens=32, log_path=tmp_path / "log"
    ) as engine:
        assert engine.manifest()["compile_mode"] != "NONE"
        points = {site.rsplit(".", 1)[-1] for site in engine.sites}
        assert points == {"q_rope", "k_rope", "v", "attn", "final_norm", "logits", "logprob"}
        with pytest.raises(CaptureError, match=r"layers\.0\.gate was requested but cannot fire") as caught:
            engine.score(sequences, sites=["layers.0.gate"])
        assert "enforce_eager=True" in str(caught.value)

        plain = engine.score(sequences)
        results = engine.score(sequences, sites=engine.sites, bundle_dir=tmp_path / "prompts")
        for a, b in zip(plain, results, strict=True):
            assert a.scores.logprob.tolist() == b.scores.logprob.tolist()
        results = engine.score(sequences, sites=engine.sites, bundle_dir=tmp_path / "b", num_generate=3, together=True)
    for index, result in enumerate(results):
        capture = open_bundle(tmp_path / "b").capture(index)
        assert capture.sites == engine.sites
        for layer in (0, 1):
            heads = capture.read(f"layers.{layer}.v")[0].view(KV_HEADS, HEAD_DIM)
            expected = heads.repeat_interleave(HEADS // KV_HEADS, dim=0).reshape(-1)
            assert torch.equal(capture.read(f"layers.{layer}.attn")[0], expected)
        scores = score_logits(capture.read("logits"), result.sequence.token_ids)
        np.testing.assert_array_equal(result.scores.logprob, scores.logprob)
        assert capture.read("final_norm").shape == (len(result.sequence.token_ids), HEADS * HEAD_DIM)
