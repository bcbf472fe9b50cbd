"""Session fixtures: tiny checkpoints of every family, and SmolLM2 from rpadiag's own model cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A background job of a shell inherits SIGINT ignored, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `from tiny import ...` in every test folder; importlib mode adds no folder to the path by itself.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny("qwen3")``: directory of that family's tiny checkpoint, made on first use; never write to it."""
    from tiny import make_checkpoint

    root = tmp_path_factory.mktemp("tiny")

    def checkpoint(family: str) -> Path:
        directory = root / family
        return directory if directory.exists() else make_checkpoint(directory, family)

    return checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct as BF16 safetensors; converted once per machine."""
    from rpadiag.workflows.smollm2 import ensure_model

    return Path(ensure_model())
