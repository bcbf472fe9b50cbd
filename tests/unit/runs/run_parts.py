"""Beginnings of runs, for the tests of the writer beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rpadiag.runs import RunWriter, create_run


def start(path: Path) -> RunWriter:
    return create_run(path, command="compare", options={})


def token_columns(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "prompt": np.zeros(n, np.int32),
        "position": np.arange(n, dtype=np.int32),
        "token": np.arange(n, dtype=np.int32),
        "source": ["prefill"] * n,
        "p": rng.standard_normal(n).astype(np.float32),
    }


def status(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["status"])
