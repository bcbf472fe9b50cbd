"""Where a token's bits first depend on its batch: vLLM alone against itself in a batch, site by site."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
from random_models import Setting

from rpadiag.engines.bundle import open_bundle
from rpadiag.sites import split_site


@contextlib.contextmanager
def batch_invariance(on: bool) -> Iterator[None]:
    """VLLM_BATCH_INVARIANT as asked while the block runs; a vLLM that is started in it inherits it."""
    before = os.environ.get("VLLM_BATCH_INVARIANT")
    os.environ["VLLM_BATCH_INVARIANT"] = "1" if on else "0"
    try:
        yield
    finally:
        os.environ.pop("VLLM_BATCH_INVARIANT")
        if before is not None:
            os.environ["VLLM_BATCH_INVARIANT"] = before


def batch_invariant_sites(setting: Setting, found: dict[str, Any]) -> None:
    """Four prompts alone, alone again and in one batch; the first site whose bits differ, with the mode and without."""
    sequences = setting.sequences("0.6b", 4, setting.short)
    for name, on in (("invariant", True), ("plain", False)):
        with batch_invariance(on), setting.engine("0.6b", setting.short) as engine:
            sites = [s for s in engine.sites if split_site(s)[1] not in ("logits", "logprob")]
            scores = {}
            for way, how in (("alone", {}), ("again", {}), ("together", {"together": True})):
                done = engine.score(sequences, sites=sites, bundle_dir=setting.work / f"{name}-{way}", **how)
                scores[way] = np.concatenate([r.scores.logprob for r in done])
        found[name] = {
            way: {
                "logprobs_that_differ": int((scores["alone"] != scores[way]).sum()),
                "num_tokens": len(scores[way]),
                **first_differing(setting, f"{name}-alone", f"{name}-{way}", len(sequences)),
            }
            for way in ("again", "together")
        }
        for way in scores:
            shutil.rmtree(setting.work / f"{name}-{way}")


def first_differing(setting: Setting, one: str, other: str, num: int) -> dict[str, Any]:
    """The first site in the order of the forward pass, and shares per point of layer 0 and of all layers."""
    a, b = open_bundle(setting.work / one), open_bundle(setting.work / other)
    counts: dict[str, tuple[int, int]] = {}
    for index in range(num):
        x, y = a.capture(index), b.capture(index)
        for site in x.sites:
            u, v = x.bits(site), y.bits(site)
            differ, total = counts.get(site, (0, 0))
            counts[site] = differ + int((u != v).sum()), total + u.size
    shares = {site: differ / total for site, (differ, total) in counts.items()}
    return {
        "first_site": next((s for s in counts if counts[s][0]), None),
        "layer_0": {s: v for s, v in shares.items() if split_site(s)[0] == 0},
        "layer_1": {s: v for s, v in shares.items() if split_site(s)[0] == 1 and v},
    }
