"""The modules of examples/rl, importable by their own names as its scripts import them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "rl"))
