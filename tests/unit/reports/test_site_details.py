"""What opens behind a cell of the map: every site once, pooled rows, histograms summed over prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.reports.written_runs import write_compare

from rpadiag.reports import pooling, site_details
from rpadiag.reports.reading import read_histograms, read_sites
from rpadiag.runs import Run, open_run
from rpadiag.sites import all_sites

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(write_compare(tmp_path_factory.mktemp("runs") / "run", num_layers=NUM_LAYERS))


@pytest.fixture(scope="module")
def opened(run: Run) -> dict[str, Any]:
    sites = read_sites(run)
    pools = [pooling.pool_sites(sites, precision=p, by=by) for p, by in (("model", ("layer", "point")), ("model", ("point",)), ("fp32", ("layer", "point")))]  # fmt: skip
    return site_details.explorer(*pools, read_histograms(run), NUM_LAYERS)


def facts(cell: dict[str, Any]) -> dict[str, str]:
    return dict(cell["facts"])


def test_every_site_of_the_run_has_a_cell_and_every_layer_point_a_pooled_one(opened: dict[str, Any]) -> None:
    cells = opened["cells"]
    single = {c["site"] for key, c in cells.items() if not key.startswith("all:")}
    assert single == set(all_sites(NUM_LAYERS, qk_norm=False))
    assert {c["site"] for key, c in cells.items() if key.startswith("all:")} == {f"layers.*.{p['name']}" for p in opened["points"]} - {f"layers.*.{p}" for p in ("embed", "final_norm", "logits", "logprob")}  # fmt: skip
    assert opened["start"] in cells


def test_cell_says_what_is_made_what_is_inherited_and_what_the_site_reads(opened: dict[str, Any]) -> None:
    rows = {p["name"]: i for i, p in enumerate(opened["points"])}
    cell = opened["cells"][f"2:{rows['q_rope']}"]
    made, inherited, total = (share for share, _ in cell["shares"])
    assert cell["site"] == "layers.1.q_rope"
    assert 0.2 < made < 0.26 and total == pytest.approx(made + inherited, abs=1e-3)
    assert opened["points"][rows["q_rope"]] == {
        "name": "q_rope", "text": "query after RoPE", "region": "rope", "reads": "q_norm or q",
    }  # fmt: skip
    assert facts(cell)["direction, made here"] == "balanced (0)"
    assert "relative L2 in FP32, made here" in facts(cell)


def test_site_that_was_not_measured_locally_says_why(opened: dict[str, Any]) -> None:
    rows = {p["name"]: i for i, p in enumerate(opened["points"])}
    cell = opened["cells"][f"0:{rows['embed']}"]
    assert cell["shares"][0] == [None, "–"] and facts(cell)["not measured locally"].startswith("nothing to feed")


def test_histograms_are_summed_over_prompts_and_drawn_as_shares_of_what_differs(run: Run) -> None:
    summed = read_histograms(run)["layers.0.q_rope"]
    rows = run.sites(["site", "precision", "local_ulp_hist"])
    chosen = rows[(rows["site"] == "layers.0.q_rope") & (rows["precision"] == "model")]
    assert summed.tolist() == np.sum(np.stack(chosen["local_ulp_hist"].to_numpy()), axis=0).tolist()
    bins = site_details._bins(np.array([900, 60, 0, 20, 0, 20] + [0] * 11))
    assert [b[0] for b in bins] == ["1 ULP", "2–3", "4–7", "8–15", "16 or more"]
    assert [b[1] for b in bins] == [0.6, 0.0, 0.2, 0.0, 0.2]
    assert site_details._bins(np.array([9] + [0] * 16)) == []


@pytest.mark.parametrize(
    ("balance", "words"),
    [(-0.95, "toward zero in the rollout (balance −0.95), as truncation makes it"), (0.5, "more often toward zero in the trainer (0.50)"), (0.0, "balanced (0)")],
)  # fmt: skip
def test_direction_tells_truncation_from_rounding_elsewhere(balance: float, words: str) -> None:
    assert site_details._direction(balance, 0.2) == words
    assert site_details._direction(balance, 0.0) == ""


def test_page_of_a_run_without_histograms_is_still_made(tmp_path: Path, run: Run) -> None:
    sites = read_sites(run)
    by_site = pooling.pool_sites(sites, precision="model", by=("layer", "point"))
    by_point = pooling.pool_sites(sites, precision="model", by=("point",))
    made = site_details.explorer(by_site, by_point, by_site.head(0), {}, NUM_LAYERS)
    assert all(cell["ulp"] == [] for cell in made["cells"].values())
