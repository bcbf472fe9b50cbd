"""Shell completion as the shell asks for it, and the examples at the end of every help text."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rpadiag.cli import completion
from rpadiag.cli.app import app
from rpadiag.cli.app import run as rpadiag
from rpadiag.cli.examples import EXAMPLES

ROOT: Any = typer.main.get_command(app)
HEAVY = ("torch", "numpy", "pandas", "transformers", "pyarrow")


def completed(line: str, cwd: Path | None = None) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), completion.VARIABLE: "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "rpadiag"],
        env={**os.environ, **words}, cwd=cwd, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rpadiag comp", ["compare"]),
        ("rpadiag bisect m p --regions rope,s", ["rope,swiglu"]),
        ("rpadiag bisect m p --regions ma", ["matmul"]),
        ("rpadiag compare m p --align rope,swiglu,r", ["rope,swiglu,rmsnorm"]),
        ("rpadiag compare m p --contract vllm-e", ["vllm-eager", "vllm-eager-0.19"]),
        ("rpadiag compare m p --emulate vllm-co", ["vllm-compiled"]),
        ("rpadiag compare m p --sites q_", ["q_norm", "q_rope"]),
        ("rpadiag compare m p --sites layers.3.q_r", ["layers.3.q_rope"]),
        ("rpadiag compare m p --attention fl", ["flash_attention_2"]),
        ("rpadiag rollouts f --schema ver", ["verl"]),
        ("rpadiag fingerprint runs/a --stack t", ["trainer"]),
    ],
)
def test_names_are_completed(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


def test_contract_files_are_completed_along_a_path(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "contract.json").write_text("{}")
    (tmp_path / "found" / "notes.txt").write_text("")
    assert completed("rpadiag compare m p --contract fo", tmp_path) == ["found/"]
    assert completed("rpadiag compare m p --contract found/", tmp_path) == ["found/contract.json"]


def test_names_of_a_list_are_offered_once() -> None:
    assert completion.regions("") == ["all", "rope", "swiglu", "rmsnorm", "qk_norm"]
    assert completion.regions("rope,") == ["rope,swiglu", "rope,rmsnorm", "rope,qk_norm"]


def test_every_offered_name_is_known() -> None:
    from rpadiag.regions.presets import PRESETS
    from rpadiag.sites import LAYER_POINTS

    assert set(completion.contracts("")) == set(PRESETS)
    assert {p.name for p in LAYER_POINTS} < set(completion.sites(""))


def test_completing_imports_nothing_heavy() -> None:
    code = (
        "import sys, atexit; atexit.register(lambda: print([m for m in sys.modules if m in sys.argv[1:]]));"
        "from rpadiag.cli.app import run; run([])"
    )
    words = {"COMP_WORDS": "rpadiag compare m p --contract v", "COMP_CWORD": "5", completion.VARIABLE: "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code, *HEAVY], env={**os.environ, **words}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_installs_for_the_shell_that_runs(shell: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for flag in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            [sys.executable, "-m", "rpadiag", flag, shell], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert completion.VARIABLE in done.stdout or "completion installed in" in done.stdout
    installed = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert completion.VARIABLE in installed


def test_every_command_has_examples_and_no_others() -> None:
    assert set(EXAMPLES) == set(ROOT.commands) and all(EXAMPLES.values())


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rpadiag([command, "--help"]) == 0
    shown = capsys.readouterr().out.rstrip().splitlines()
    expected = ["Examples:", *(f"  {line}" for line in EXAMPLES[command])]
    assert [line.removeprefix("  ") for line in shown[-len(expected) :]] == expected


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_example_parses(line: str) -> None:
    program, name, *arguments = shlex.split(line)
    assert program == "rpadiag"
    ROOT.commands[name].make_context(name, arguments)  # raises for an unknown option, a missing argument, a wrong value


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines if "--contract" in line])
def test_contract_of_an_example_exists(line: str) -> None:
    from rpadiag.regions.presets import PRESETS

    words = shlex.split(line)
    assert words[words.index("--contract") + 1] in PRESETS
