"""A small complete run with every table, and rows to write; makes ``run_parts`` importable by the tests beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpadiag.bits import ulp_stats
from rpadiag.findings import Finding, Verdict
from rpadiag.runs import Run, RunWriter, create_run, open_run

sys.path.insert(0, str(Path(__file__).parent))

TOKEN_IDS = ([5, 6, 7, 8], [9, 10])


def site_rows() -> list[dict[str, Any]]:
    """One layered site with a local view, one head site without."""
    a = np.linspace(-1, 1, 64, dtype=np.float32)
    stats = ulp_stats(a, np.nextafter(a, np.float32(2)))
    base = {"prompt": 0, "precision": "model", "source": "prefill", "pair": "trainer|rollout", **stats.columns()}
    local = {**stats.columns("local_"), "inherited_differing": 0.0}
    return [
        {**base, **local, "layer": 3, "site": "layers.3.q_rope", "point": "q_rope", "region": "rope"},
        {**base, "layer": None, "site": "embed", "point": "embed", "region": "embed", "local_reason": "reads no site"},
    ]


def write_everything(run: RunWriter) -> None:
    """Fill every table and file of the run."""
    run.add_prompts(
        {"prompt": i, "num_prompt_tokens": len(ids), "text": f"text {i} \u2713", "token_ids": ids}
        for i, ids in enumerate(TOKEN_IDS)
    )
    for i, ids in enumerate(TOKEN_IDS):
        n = len(ids) - 1
        run.add_tokens(
            {
                "prompt": np.full(n, i, np.int32),
                "position": np.arange(1, n + 1, dtype=np.int32),
                "token": np.array(ids[1:], np.int32),
                "text": ["<script>"] * n,
                "source": ["prefill"] * n,
                "p": np.full(n, -1.5, np.float32),
                "q": np.full(n, -1.25, np.float32),
                "p_rank": np.ones(n, np.int32),
            }
        )
    run.add_sites(site_rows())
    run.add_attribution(
        [
            {
                "region": "rope",
                "design": "each",
                "systematic_sq": 5e-5,
                "systematic_sq_se": 1e-5,
                "num_replicates": 32,
                "num_tokens": 4,
                "detectable": True,
            }
        ]
    )
    run.add_effects([{"region": "rope", "metric": "k3_kl", "as_is": 2e-3, "aligned": 1.9e-3, "change": -1e-4}])
    run.add_replicates(
        [
            {
                "design": "each",
                "region": "rope",
                "kind": "ulp",
                "replicate": 0,
                "seed": 0,
                "logprobs": [-1.5, -0.5, -2.0, -1.0],
            }
        ]
    )
    run.set_weights("trainer", {"lm_head.weight": "00ff", "model.norm.weight": "aa"})
    run.set_weights("rollout", {"lm_head.weight": "00ff", "model.norm.weight": "aa"})
    run.set_metrics({"logprob": {"all": {"kl": 0.25, "chi2_seq": float("inf")}}})
    run.set_metrics({"floors": []})
    run.set_verdict(Verdict(kind="rounding only", sentence="Only rounding differs."))
    run.add_finding(Finding(code="second", severity="info", text="Second.", rank=2))
    run.add_finding(Finding(code="first", severity="notice", text="First.", numbers={"share": float("nan")}, rank=1))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Writes a complete run, changed by ``fill``."""

    def make(name: str = "run", fill: Callable[[RunWriter], None] = write_everything) -> Run:
        with create_run(tmp_path / name, command="compare", options={"seed": 0}, given={"seed": 0}) as run:
            fill(run)
        return open_run(tmp_path / name)

    return make


@pytest.fixture
def fill_run() -> Callable[[RunWriter], None]:
    """Fills every table and file of an open run."""
    return write_everything
