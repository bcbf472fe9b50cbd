"""Figures are valid Plotly, and their sums over prompts and layers are right."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.reports import figures_attribution, pooling, theme
from rpadiag.reports.sections import build
from rpadiag.reports.view import Figure
from rpadiag.runs import open_run


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[Figure]:
    root = tmp_path_factory.mktemp("runs")
    runs = [open_run(write_compare(root / "compare")), open_run(write_bisect(root / "bisect"))]
    return [f for b in build(runs, "s0").blocks for f in b.figures]


def site_rows(**columns: list[object]) -> pd.DataFrame:
    base = {
        "precision": "model", "point": "q_rope", "region": "rope", "max_ulp": 1, "rel_l2": 0.0, "num_nonfinite_trainer": 0,
        "num_nonfinite_rollout": 0, "local_n": np.nan, "local_num_differing": np.nan, "local_max_ulp": np.nan, "local_rel_l2": np.nan, "local_reason": None, "magnitude_balance": np.nan, "local_magnitude_balance": np.nan,
    }  # fmt: skip
    size = len(next(iter(columns.values())))
    return pd.DataFrame({k: [v] * size for k, v in base.items() if k not in columns} | columns)


def test_every_figure_is_valid_plotly(figures: list[Figure]) -> None:
    import plotly.graph_objects as go

    assert len(figures) == 8
    for figure in figures:
        go.Figure(data=list(figure.data), layout=dict(figure.layout))
        go.Figure(layout=dict(figure.narrow))
        for choice in figure.choices:
            go.Figure(layout=dict(choice.layout))


def test_every_trace_behind_a_switch_is_reachable_and_the_first_choice_is_what_is_drawn(figures: list[Figure]) -> None:
    for figure in (f for f in figures if f.choices):
        assert {i for c in figure.choices for i in c.traces} == set(range(len(figure.data)))
        assert [i for i, t in enumerate(figure.data) if t["visible"]] == list(figure.choices[0].traces)


def test_shares_are_pooled_as_counts_over_counts() -> None:
    frame = site_rows(layer=[0, 0], n=[100, 300], num_differing=[100, 0])
    (row,) = pooling.pool_sites(frame, precision="model", by=("layer", "point")).to_dict("records")
    assert row["differing"] == 0.25
    assert np.isnan(row["local_differing"])


def test_relative_l2_is_pooled_by_elements() -> None:
    frame = site_rows(layer=[0, 1], n=[100, 300], num_differing=[1, 1], rel_l2=[0.2, 0.0])
    (row,) = pooling.pool_sites(frame, precision="model", by=("point",)).to_dict("records")
    assert row["rel_l2"] == pytest.approx(0.1, rel=1e-12)


def test_sites_outside_the_layers_keep_a_row_of_their_own() -> None:
    frame = site_rows(
        layer=pd.array([None, 0], dtype="Int32"), point=["embed", "q_rope"], n=[1, 1], num_differing=[0, 0]
    )
    pooled = pooling.pool_sites(frame, precision="model", by=("layer", "point"))
    assert list(pooled["point"]) == ["embed", "q_rope"]
    assert np.isnan(pooled["layer"][0])


def test_histogram_counts_every_token_and_puts_zero_mid_bin() -> None:
    d = np.array([0.0, 0.0, 0.4, -9.0, 9.0])
    centres, counts = pooling.histogram(d, 5, 1.0)
    assert counts.sum() == 5
    assert counts[2] == 2 and abs(centres[2]) < 1e-15
    assert counts[0] == 1 and counts[-1] == 1


def test_sample_of_tokens_always_holds_the_largest_differences() -> None:
    d = np.arange(10_000) / 1e4
    sample = pooling.spread_sample(pd.DataFrame({"d": -d}), 100)
    assert len(sample) == 100
    assert set(d[-10:]) <= set(-sample["d"])


def test_context_marks_the_token_and_shows_line_ends() -> None:
    tokens = pd.DataFrame({"position": [1, 2, 3], "text": ["a\n", " b", None], "token": [7, 8, 9]})
    assert pooling.context_of(tokens, 2) == ("\u2026a\u23ce", " b", "\u27e89\u27e9 ")  # the first token has no row


def test_trainers_against_the_engine_are_drawn_from_their_own_rows() -> None:
    values = {"all": 8.7e-4, "rope": 2.4e-4, "reference": 1.4e-4}
    rows = pd.DataFrame(
        {
            "region": [*values, "rope"], "design": [*["rollout"] * 3, "each"], "kind": "ulp", "systematic_sq": [*values.values(), 9.0],
            "systematic_sq_se": [4.2e-4, 0.6e-4, np.inf, 1.0], "detectable": [True, True, False, True],
        }
    )  # fmt: skip
    figure = figures_attribution.against_rollout("k", rows)
    (trace,) = figure.data
    assert trace["x"] == list(values.values())
    assert trace["y"] == ["nothing aligned", "rope aligned", "everything aligned"]
    assert trace["marker"]["color"][2] == theme.LIGHT.panel != trace["marker"]["color"][1]
    assert "everything aligned: 1.40e\u22124" in figure.alt


def test_each_light_colour_has_one_role() -> None:
    assert len(theme.dark_twins()) == len(fields(theme.Palette))


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_colours_reach_wcag_aa_contrast_on_their_surfaces(palette: theme.Palette) -> None:
    pairs = [
        (text, surface)
        for text in (palette.ink, palette.soft, palette.faint)
        for surface in (palette.page, palette.panel)
    ]
    pairs += [(palette.ink, palette.sunken), (palette.soft, palette.sunken), (palette.ink, palette.wash)]
    pairs += [(palette.ink, getattr(palette, f"{side}{i}")) for side in ("less", "more") for i in (1, 2, 3)]
    for name in ("good", "info", "caution", "bad"):
        pairs += [
            (getattr(palette, name), getattr(palette, f"{name}_wash")),
            (palette.ink, getattr(palette, f"{name}_wash")),
        ]
    low = {pair: round(contrast(*pair), 2) for pair in pairs if contrast(*pair) < 4.5}
    assert not low


def test_lines_of_plots_stand_out_from_the_panel() -> None:
    for palette in (theme.LIGHT, theme.DARK):
        assert contrast(palette.local, palette.panel) >= 3
        assert contrast(palette.second, palette.panel) >= 3


def test_runs_directory_paths_do_not_reach_the_page(tmp_path: Path) -> None:
    section = build([open_run(write_compare(tmp_path / "compare"))], "s0")
    assert str(tmp_path) not in repr(section)
