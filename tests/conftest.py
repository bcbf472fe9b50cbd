"""Session fixtures: tiny checkpoints of every family, and SmolLM2 from rpadiag's own model cache."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A background job of a shell inherits SIGINT ignored, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `from tiny import ...` in every test folder; importlib mode adds no folder to the path by itself.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# Files that take longest, longest first. Workers take whole files, and one that is begun last leaves the other core idle.
# The files that share a vLLM process go to one worker, before all others: a second process would import vLLM for nothing.
LONGEST = (
    "cli/test_readme.py",
    "cli/test_commands.py",
    "engines/test_sharded_trainer.py",
    "examples/test_rl_training.py",
    "trainers/test_trl.py",
    "engines/test_vllm.py",
    "engines/test_vllm_failures.py",
    "engines/test_vllm_sharded.py",
    "engines/test_vllm_bundle.py",
    "engines/test_vllm_families.py",
    "engines/test_verdicts.py",
    "engines/test_bisect_vllm.py",
    "engines/test_fingerprint_workflow.py",
    "engines/test_vllm_hangs.py",
    "unit/regions/test_align.py",
    "unit/regions/test_kernel_references.py",
    "kernels/test_interpreter.py",
    "engines/test_trainer_aligned.py",
    "engines/test_vllm_compiled.py",
    "engines/test_decoding.py",
    "engines/test_bisect_controls.py",
    "cli/test_capture.py",
    "cli/test_run.py",
    "cli/test_workflow_example.py",
    "cli/test_report_browser.py",
    "cli/test_report_access.py",
    "kernels/test_operators.py",
    "unit/test_smollm2.py",
    "unit/test_api.py",
    "engines/test_trainer.py",
    "unit/regions/test_vllm_cpu_contracts.py",
    "architecture/test_without_torch.py",
)
SHARING = {
    HERE / "engines" / f"test_{name}.py"
    for name in (
        "bisect_vllm", "decoding", "fingerprint_workflow", "full_alignment", "rollouts_scored", "verdicts", "vllm", "vllm_bundle",
        "vllm_families", "vllm_sharded", "vllm_weights",
    )
}  # fmt: skip
PLACES = {HERE / name: place for place, name in enumerate(LONGEST)}
assert all(path.exists() for path in (*PLACES, *SHARING)), "a file of LONGEST or SHARING is gone"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sharing = {item.path for item in items if "vllm_on" in getattr(item, "fixturenames", ())}
    assert sharing <= SHARING, f"not in SHARING: {sharing - SHARING}"
    items.sort(key=lambda item: (item.path not in SHARING, PLACES.get(item.path, len(PLACES))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: whole files to a worker, and those that share a vLLM process to one. Other ways stay as they are."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    shared = {path.relative_to(config.rootpath).as_posix() for path in SHARING}

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "shared vLLM" if file in shared else file

    return Files(config, log)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported and collected stays: no test's garbage is among it


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
