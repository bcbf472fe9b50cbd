"""What a user sees when a command ends: exit code, where each kind of text goes, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rpadiag.cli.app import app, run
from rpadiag.errors import InputError

RPADIAG = [sys.executable, "-m", "rpadiag"]


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RPADIAG, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@contextmanager
def crashing(error: BaseException) -> Iterator[None]:
    """A command ``crash`` that raises ``error``, for as long as the block runs."""

    def crash() -> None:
        raise error

    app.command("crash")(crash)
    try:
        yield
    finally:
        app.registered_commands.pop()


def test_version_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    from rpadiag import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"rpadiag {__version__}\n"


def test_no_command_shows_the_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    shown = capsys.readouterr()
    assert "Commands:" in shown.err and shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compar"], "no such command 'compar'"),
        (["bisect"], "missing argument 'MODEL'"),
        (["compare", "m", "p.txt"], "missing option '--run'"),
        (["compare", "m", "p.txt", "--run", "r", "--seed", "x"], "invalid value for '--seed'"),
        (["compare", "m", "p.txt", "--run", "r", "--nope"], "no such option: --nope"),
        (["report", "--html", "x.html"], "missing argument 'RUN'"),
    ],
)
def test_usage_error_of_the_parser_leaves_with_two(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {says}") and "hint: rpadiag" in shown.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["report", "r", "--md", "f"], "--markdown"),
        (["report", "r", "--makdown", "f"], "--markdown"),
        (["bisect", "m", "p.txt", "--run", "r", "--rep", "3"], "--replicates"),
        (["compare", "m", "p.txt", "--run", "r", "--trainer-fp", "b"], "--trainer-fp32"),
        (["compare", "m", "p.txt", "--run", "r", "--max_tokens", "3"], "--max-tokens"),
    ],
)
def test_option_that_is_nearly_another_is_told_so(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("error: no such option: --") and third.startswith("hint: rpadiag ")
    assert second == f"hint: did you mean {meant}?"


def test_option_like_no_other_has_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "r", "--zzz"]) == 2
    assert capsys.readouterr().err == "error: no such option: --zzz\nhint: rpadiag report --help\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dtype", "bf16"], "unknown dtype: bf16"),
        (["--align", "ropee"], "unknown region: ropee"),
        (["--rollout", "sglang"], "unknown rollout: sglang"),
        (["--device", "gpu"], "unknown device: gpu"),
        (["--mode", "fast"], "unknown mode: fast"),
        (["--control", "fp64"], "unknown control: fp64"),
        (["--attention", "sdpaa"], "unknown attention: sdpaa"),
        (["--format", "yaml"], "unknown format: yaml"),
        (["--align", "all", "--contract", "fp32"], "unknown contract preset: fp32"),
        (["--align", "all", "--contract", "none.json"], "cannot read the contract file none.json"),
        (["--rollout", "emulated", "--emulate", "vllm"], "unknown contract preset: vllm"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2, not 1"),
        (["--generate", "-1"], "--generate must be at least 0, not -1"),
        (["--emulate", "vllm-cpu"], "--emulate names what an emulated rollout follows"),
        (["--rollout", "emulated", "--mode", "compiled"], "--mode compiled needs the real engine"),
        (
            ["--sites", "q_rope", "--sites", "q_ropee"],
            "site pattern 'q_ropee' matches nothing\nknown sites: input_norm, q, ",
        ),
    ],
)
def test_value_that_means_nothing_is_refused_before_any_work(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", "model", "p.txt", "--run", str(tmp_path / "run"), *options]) == 2
    shown = capsys.readouterr()
    assert f"error: {says}" in shown.err
    assert not (tmp_path / "run").exists()


def test_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "m", "p.txt", "--run", "r", "--dtype", "bf16"]) == 2
    assert "known dtypes: bfloat16, float16, float32, auto" in capsys.readouterr().err


def test_broken_prompt_file_is_refused_before_a_run_directory_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "p.jsonl"
    broken.write_text('{"prompt": "fine"}\n{"prompt": \n', encoding="utf-8")
    for command in ("compare", "bisect"):
        assert run([command, "model", str(broken), "--run", str(tmp_path / "run")]) == 2
        assert f"error: {broken}:2: not valid JSON" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_expected_error_shows_message_detail_and_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with crashing(InputError("site [x] is gone", detail="63 of 64 fired", hint="ask for fewer")):
        assert run(["crash"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: site [x] is gone\n63 of 64 fired\nhint: ask for fewer\n"
    assert shown.out == ""


def test_anything_else_is_a_bug_with_its_traceback_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with crashing(ZeroDivisionError("oh")):
        assert run(["crash"]) == 3
    shown = capsys.readouterr().err
    assert "error: this is a bug in rpadiag: ZeroDivisionError: oh" in shown and "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("the traceback is in ")]
    file = Path(line.removeprefix("the traceback is in "))
    assert "ZeroDivisionError: oh" in file.read_text(encoding="utf-8")
    file.unlink()


def test_debug_prints_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with crashing(ZeroDivisionError("oh")):
        assert run(["--debug", "crash"]) == 3
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c_leaves_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with crashing(KeyboardInterrupt()):
        assert run(["crash"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_interrupted_command_says_what_is_left_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rpadiag.cli.output import interruptible
    from rpadiag.runs import create_run, open_run

    where = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        with interruptible(where), create_run(where, command="compare", options={}):
            raise KeyboardInterrupt
    shown = capsys.readouterr().err
    assert f"{where} is left with status interrupted" in shown and f"hint: remove {where}" in shown
    with pytest.raises(InputError, match="interrupted"):
        open_run(where)


def test_closed_pipe_is_not_an_error() -> None:
    """As in ``rpadiag doctor | head -1``: the reader is gone before anything is written."""
    read, write = os.pipe()
    os.close(read)
    child = subprocess.Popen([*RPADIAG, "doctor", "--format", "json"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert child.stderr is not None
    problems = child.stderr.read()
    assert child.wait() == 0 and problems == ""


def test_sigint_while_working_leaves_with_130_and_says_so(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("the lazy dog\n" * 4, encoding="utf-8")
    where = tmp_path / "run"
    child = subprocess.Popen(
        [*RPADIAG, "bisect", str(tiny("llama")), str(prompts), "--run", str(where), "--replicates", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    try:
        for line in child.stderr:
            if line.startswith("rounding replicates"):
                break
        child.send_signal(signal.SIGINT)
        _, problems = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert f"{where} is left with status interrupted" in problems
    assert json.loads((where / "manifest.json").read_text(encoding="utf-8"))["status"] == "interrupted"


def test_site_pattern_brackets_survive_in_help_and_errors() -> None:
    shown = shell("compare", "--help").stdout
    assert "[default: every" in shown and "[required]" in shown


def test_help_is_plain_text_even_when_colour_is_forced() -> None:
    assert "\x1b[" not in shell("compare", "--help", FORCE_COLOR="1").stdout


def test_no_color_is_respected_when_a_terminal_is_forced() -> None:
    assert "\x1b[" in shell("doctor", FORCE_COLOR="1").stdout
    plain = shell("doctor", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert not any(f"\x1b[{code}m" in plain for code in range(30, 48))


def test_module_and_script_are_the_same_command() -> None:
    assert (
        shell("--version").stdout
        == subprocess.run(
            [Path(sys.executable).with_name("rpadiag"), "--version"], capture_output=True, text=True, check=True
        ).stdout
    )


def unparsed(value: str) -> Any:
    raise AssertionError(f"{value} is not strict JSON")


def test_doctor_answers_in_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=unparsed)
    assert found["version"] and {a["name"] for a in found["abilities"]} >= {"trainer stack", "rollout stack (vllm)"}


def test_doctor_table_names_versions_devices_and_sites(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    for part in ("rpadiag ", "cpu: ", "cuda", "transformers", "q_rope", "LlamaForCausalLM"):
        assert part in shown
