"""Where, why and how much a trainer's and a rollout engine's forward passes disagree.

``rpadiag.align(model, ...)`` is the Python surface; everything else is the command line. Importing the
package imports nothing heavy: names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpadiag.regions.align import align as align
    from rpadiag.runs.reader import open_run as open_run

__version__ = "0.1.0"

_PUBLIC = {"align": "rpadiag.regions.align", "open_run": "rpadiag.runs.reader"}

__all__ = ["__version__", "align", "open_run"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
