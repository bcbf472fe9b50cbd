"""Prompts and bundles that several command-line tests of a module share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import EMULATED, PROMPTS

from rpadiag.cli.app import run


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundles(tiny: Callable[[str], Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``trainer`` and ``rollout``, and both in FP32."""
    root = tmp_path_factory.mktemp("bundles")
    for name, extra in (("", ()), ("-fp32", ("--dtype", "float32"))):
        for stack, engine in (("trainer", ("--engine", "trainer")), ("rollout", EMULATED)):
            arguments = ["capture", str(tiny("llama")), str(prompts), *engine, *extra]
            assert run([*arguments, "--bundle", str(root / f"{stack}{name}")]) == 0
    return root
