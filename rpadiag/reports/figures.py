"""What every figure of a report shares: Plotly layout and axes as plain data in light colours.

Plotly itself is only needed in the page. Text that comes from a prompt or a model goes through :func:`label`,
because Plotly reads labels as markup.
"""

from __future__ import annotations

import html
from typing import Any

from rpadiag.reports.theme import LIGHT, SANS


def layout(height: int, **over: Any) -> dict[str, Any]:
    """Layout that every figure starts from: transparent, quiet, legend above the plot."""
    base: dict[str, Any] = {
        "height": height,
        "autosize": True,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44, "pad": 4},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": SANS, "size": 12, "color": LIGHT.soft},
        "hoverlabel": {
            "bgcolor": LIGHT.panel,
            "bordercolor": LIGHT.line,
            "font": {"family": SANS, "size": 12, "color": LIGHT.ink},
            "align": "left",
        },
        "hovermode": "closest",
        "showlegend": False,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)",
        },
    }
    return base | over


def axis(title: str = "", **over: Any) -> dict[str, Any]:
    """A quiet axis: hairline grid, no zero line unless asked for."""
    base: dict[str, Any] = {
        "title": {"text": title, "font": {"size": 12, "color": LIGHT.soft}, "standoff": 8},
        "gridcolor": LIGHT.grid,
        "linecolor": LIGHT.line,
        "zeroline": False,
        "zerolinecolor": LIGHT.muted,
        "tickfont": {"size": 11, "color": LIGHT.faint},
        "ticks": "",
        "tickangle": 0,
        "automargin": True,
        "exponentformat": "power",
    }
    return base | over


def label(text: object) -> str:
    """Text of a prompt, model or file name, safe inside a Plotly label."""
    return html.escape(str(text), quote=False).replace("\n", "\u23ce")


def rule(*, x0: float | None = None, y0: float | None = None, colour: str = LIGHT.muted) -> dict[str, Any]:
    across = {"x0": x0, "x1": x0, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
    along = {"y0": y0, "y1": y0, "yref": "y", "x0": 0, "x1": 1, "xref": "paper"}
    line = {"color": colour, "width": 1, "dash": "dot"}
    return {"type": "line", "layer": "below", "line": line, **(across if x0 is not None else along)}
