"""Colours of a report, for the style sheet and for the plots, light and dark.

A plot is built once, with the light colours; the page exchanges each light colour for its dark twin when the
reader's system asks for a dark page. For that every light colour must have exactly one role, which a test checks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

SANS = '-apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace'


@dataclass(frozen=True, kw_only=True)
class Palette:
    """One colour per role, as ``#rrggbb``.

    page, panel, sunken: surfaces; ink, soft, faint: text; line, grid: rules; local: what is made at a site, and
    the main series; second: a second series; muted: context (inherited, noise floors); wash: tint under the main
    series; scale0..scale4: shares from 0 to 100 %; good, info, caution, bad: verdicts; *_wash: their surfaces;
    less1..less3, more1..more3: tints under a token that the trainer finds less or more likely than the rollout.
    """

    page: str
    panel: str
    sunken: str
    ink: str
    soft: str
    faint: str
    line: str
    grid: str
    local: str
    second: str
    muted: str
    wash: str
    scale0: str
    scale1: str
    scale2: str
    scale3: str
    scale4: str
    good: str
    good_wash: str
    info: str
    info_wash: str
    caution: str
    caution_wash: str
    bad: str
    bad_wash: str
    less1: str
    less2: str
    less3: str
    more1: str
    more2: str
    more3: str


LIGHT = Palette(
    page="#f7f7f5",
    panel="#ffffff",
    sunken="#f1f2f0",
    ink="#191c20",
    soft="#4b525b",
    faint="#686f78",
    line="#dfe1e3",
    grid="#e9ebec",
    local="#1d5fa8",
    second="#bd5b12",
    muted="#98a0a8",
    wash="#d9e6f4",
    scale0="#eff2f5",
    scale1="#c3d8ee",
    scale2="#79aedb",
    scale3="#2e75b8",
    scale4="#0c3566",
    good="#1b6e41",
    good_wash="#e2f2e8",
    info="#19579b",
    info_wash="#e4eef9",
    caution="#8a5300",
    caution_wash="#fbf0dc",
    bad="#a92323",
    bad_wash="#fbe7e5",
    less1="#fcebd9",
    less2="#f8cfa4",
    less3="#f0a55f",
    more1="#e2edf9",
    more2="#b9d5f2",
    more3="#84b4e6",
)

DARK = Palette(
    page="#111316",
    panel="#181b1f",
    sunken="#20242a",
    ink="#e8eaed",
    soft="#b4bac2",
    faint="#929aa4",
    line="#2d3238",
    grid="#272b31",
    local="#6fa8ea",
    second="#ee9a55",
    muted="#727b86",
    wash="#213449",
    scale0="#2b3139",
    scale1="#1d3d5f",
    scale2="#2a649e",
    scale3="#63a1df",
    scale4="#d3e7fb",
    good="#6fcf97",
    good_wash="#16301f",
    info="#86b8f2",
    info_wash="#182b42",
    caution="#ecb765",
    caution_wash="#36290f",
    bad="#f28b82",
    bad_wash="#3d1b1a",
    less1="#35281c",
    less2="#57391b",
    less3="#854d15",
    more1="#1c2a3a",
    more2="#1f4063",
    more3="#245c94",
)


def css_variables(palette: Palette) -> str:
    """Declarations for a style rule: ``--page: #f7f7f5; ...``."""
    return " ".join(f"--{f.name.replace('_', '-')}: {getattr(palette, f.name)};" for f in fields(palette))


def dark_twins() -> dict[str, str]:
    """Light colour -> dark colour of the same role, for exchanging colours inside a drawn plot."""
    return {getattr(LIGHT, f.name): getattr(DARK, f.name) for f in fields(Palette)}


def share_scale() -> list[list[float | str]]:
    """Plotly colour scale from 0 (fades into the page) to 1."""
    stops = (LIGHT.scale0, LIGHT.scale1, LIGHT.scale2, LIGHT.scale3, LIGHT.scale4)
    return [[i / (len(stops) - 1), colour] for i, colour in enumerate(stops)]
