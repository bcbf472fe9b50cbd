"""The Triton kernels themselves on a CPU, through Triton's interpreter: a few contracts, shapes with a remainder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


REGIONS = ("rmsnorm", "swiglu", "rope", "ulp")


@pytest.fixture(scope="module")
def differing() -> dict[str, list[int]]:
    """By region, the elements that differ in each check. One process: what it imports takes longer than what it checks."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = os.pathsep.join((str(ROOT / "kernels"), str(HERE), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "interpreter_checks.py"), *REGIONS],
        capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("region", REGIONS)
def test_kernel_in_the_interpreter_equals_its_reference(differing: dict[str, list[int]], region: str) -> None:
    assert differing[region] and differing[region] == [0] * len(differing[region])
