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


@pytest.mark.parametrize("region", ["rmsnorm", "swiglu", "rope", "ulp"])
def test_kernel_in_the_interpreter_equals_its_reference(region: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    path = os.pathsep.join((str(ROOT / "kernels"), str(HERE), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "interpreter_checks.py"), region],
        capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == [0] * len(found), found
