"""The GitHub Actions example: its shell steps run here, in order, with the emulated rollout in place of the real engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from rpadiag.gates import load_policy

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "github-actions"
WORKFLOW = (EXAMPLE / "rpadiag.yml").read_text(encoding="utf-8")

# What differs here: no network to install from, a tiny checkpoint, and no engine to wait for.
REPLACED = {" --max-tokens 128": " --max-tokens 24 --rollout emulated --emulate vllm-cpu --dtype bfloat16"}


def steps() -> dict[str, str]:
    """Name of each step that runs shell lines -> those lines."""
    found = {}
    for block in re.split(r"\n      - (?=name|uses)", WORKFLOW)[1:]:
        name = re.match(r"name: (.+)", block)
        lines = re.search(r"\n        run: \|\n((?:          .*\n?|\n)+)", block)
        if name and lines:
            found[name[1]] = re.sub(r"^ {10}", "", lines[1], flags=re.MULTILINE)
    return found


def env() -> dict[str, str]:
    """The workflow's own environment entries."""
    block = re.search(r"\nenv:\n((?:  .+\n)+)", WORKFLOW)
    assert block is not None
    pairs = re.findall(r"^  (\w+): \"?([^\"#\s]+)\"?", block[1], flags=re.MULTILINE)
    return dict(pairs)


@pytest.fixture
def checkout(tmp_path: Path, tiny: Callable[[str], Path]) -> Path:
    """A repository as the documentation asks for, with a tiny model under the name that MODEL has."""
    there = tmp_path / "checkout"
    (there / ".github" / "rpadiag").mkdir(parents=True)
    (there / ".github" / "rpadiag" / "prompts.txt").write_text("the quick brown fox\njumps over the lazy dog\n" * 5)
    (there / ".github" / "rpadiag" / "gates.toml").write_text((EXAMPLE / "gates.toml").read_text())
    (there / "model").symlink_to(tiny("llama"))
    return there


def run_step(name: str, checkout: Path) -> subprocess.CompletedProcess[str]:
    lines = steps()[name]
    for old, new in REPLACED.items():
        lines = lines.replace(old, new)
    environment = {
        **os.environ, **env(), "MODEL": "model", "GITHUB_STEP_SUMMARY": str(checkout / "summary.md"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    # as GitHub runs a step with the default shell of Linux
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", lines],
        cwd=checkout, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_steps_of_the_workflow_run_one_after_another(checkout: Path) -> None:
    compared = run_step("Compare", checkout)
    assert compared.returncode == 0, compared.stderr
    gated = run_step("Gate", checkout)  # a tiny model is no SmolLM2: its k3 is what it is, the gates are answered
    assert gated.returncode in (0, 1), gated.stderr
    assert (checkout / "summary.md").read_text(encoding="utf-8").startswith("## Gates: 3 gates")
    assert ET.parse(checkout / "rpadiag.xml").getroot().get("errors") == "0"
    assert (checkout / "rpadiag.html").stat().st_size > 100_000
    assert run_step("Next baseline", checkout).returncode == 0
    policy = checkout / ".github" / "rpadiag" / "gates.toml"
    policy.write_text(policy.read_text() + '\n[gates.no-regression]\ngate = "k3_kl <= baseline"\n')
    again = run_step("Gate", checkout)
    assert "pass: no-regression: k3_kl <= baseline" in again.stdout, again.stderr
    assert "Against the baseline" in (checkout / "summary.md").read_text(encoding="utf-8")
    policy.write_text("[gates.none]\ngate = 'k3_kl < 0'\n")
    failed = run_step("Gate", checkout)
    assert failed.returncode == 1 and "FAILED: none: k3_kl < 0" in failed.stdout


def test_example_names_only_what_exists() -> None:
    assert set(steps()) == {"Install", "Compare", "Gate", "Next baseline"}
    assert [g.name for g in load_policy(EXAMPLE / "gates.toml").gates] == ["rounding-only", "mismatch", "fp32-control"]
    known = (ROOT / "tests" / "golden" / "cli_surface.json").read_text(encoding="utf-8")
    text = " ".join(line for s in steps().values() for line in s.splitlines() if "rpadiag " in line or "--html" in line)
    assert [o for o in re.findall(r"--[a-z][a-z-]+", text) if f'"option {o} ' not in known and o != "--quiet"] == []


def test_workflow_is_yaml_that_github_can_read() -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(WORKFLOW)
    job = content["jobs"]["compare"]
    assert content["permissions"] == {"contents": "read"}
    assert all("uses" in step or "run" in step for step in job["steps"])
