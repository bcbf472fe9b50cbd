"""Models, prompts and options that cannot be used: exit code 2, a message that says what to do, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import planted_copy

from rpadiag.cli.app import run

Refused = Callable[..., str]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.txt"
    path.write_text("The quick brown fox.\n", encoding="utf-8")
    return path


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a comparison that must be refused; what it says. No run directory may be left."""

    def check(model: Path | str, prompts: Path, *arguments: str) -> str:
        where = tmp_path / "run"
        given = [str(model), str(prompts), "--run", str(where), "--rollout", "emulated", "--control", "none"]
        assert run(["compare", *given, *arguments]) == 2
        said = capsys.readouterr().err
        assert "error: " in said and "Traceback" not in said
        assert not where.exists()
        return said.partition("error: ")[2]

    return check


@pytest.fixture
def broken(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny Llama with configuration values replaced."""

    def copy(**config: Any) -> Path:
        return planted_copy(tiny("llama"), tmp_path / "model", config=config)

    return copy


def test_unknown_architecture_is_named_with_the_known_ones(
    broken: Callable[..., Path], prompts: Path, refused: Refused
) -> None:
    said = refused(broken(architectures=["FooForCausalLM"], model_type="foo"), prompts)
    assert said.startswith("unsupported architecture: FooForCausalLM\n") and "LlamaForCausalLM" in said


@pytest.mark.parametrize("content", ["{broken", "[]", ""])
def test_configuration_that_is_no_json_object_is_named(
    broken: Callable[..., Path], prompts: Path, refused: Refused, content: str
) -> None:
    model = broken()
    (model / "config.json").write_text(content, encoding="utf-8")
    assert f"{model / 'config.json'} is not " in refused(model, prompts)


def test_pickled_weights_are_not_read(broken: Callable[..., Path], prompts: Path, refused: Refused) -> None:
    model = broken()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "has only pickled weights (pytorch_model.bin)" in refused(model, prompts)


@pytest.mark.parametrize("kept", [0, 7, 4000])
def test_half_a_weight_file_is_half_a_model(
    broken: Callable[..., Path], prompts: Path, refused: Refused, kept: int
) -> None:
    model = broken()
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    said = refused(model, prompts)
    assert said.startswith("half a model") and f"the file has {kept}" in said and "hint: download" in said


def test_code_of_a_checkpoint_is_not_run_unless_asked_for(
    broken: Callable[..., Path], prompts: Path, refused: Refused
) -> None:
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    said = refused(broken(auto_map=code, model_type="xyz"), prompts)
    assert "--trust-remote-code" in said.partition("hint:")[2]


def test_weights_that_are_not_finite_are_named(
    tiny: Callable[[str], Path], tmp_path: Path, prompts: Path, refused: Refused
) -> None:
    def poison(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    model = planted_copy(tiny("llama"), tmp_path / "model", tensors=poison)
    said = refused(model, prompts)
    assert said.startswith("weight model.layers.1.mlp.up_proj.weight has 1 values that are not finite")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a b c"}', '{"prompt": '], "p.jsonl:2: not valid JSON"),
        (['{"prompt": "a b c"}', ""], "p.jsonl:2: blank line"),
        (['{"prompt": ""}'], "p.jsonl:1: prompt is empty"),
        (['{"text": "a"}'], "p.jsonl:1: needs exactly one of prompt, messages, token_ids"),
        (['{"messages": [{"role": "user", "content": 5}]}'], "content of message 1 is a number, not a string"),
        ([], "has no prompts"),
    ],
)
def test_prompt_file_at_fault_is_named_by_its_line(
    tiny: Callable[[str], Path], tmp_path: Path, refused: Refused, lines: list[str], said: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert said in refused(tiny("llama"), file)


@pytest.mark.parametrize(
    ("ids", "arguments", "said"),
    [
        ([5] * 600, [], "hint: --max-tokens 512 keeps the first 512 tokens"),
        ([5] * 600, ["--generate", "600"], "hint: generate fewer tokens"),
        ([5, 6, 512], [], "token id 512 at position 2 is outside the vocabulary"),
        ([5, 6, -1], [], "token id -1 at position 2 is outside the vocabulary"),
        ([5, 6, 2**70], [], "is outside the vocabulary"),
        ([5], [], "1 token, at least 2 needed"),
    ],
)
def test_tokens_that_the_model_does_not_take_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path, refused: Refused, ids: list[int], arguments: list[str], said: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"token_ids": ids}) + "\n", encoding="utf-8")
    assert said in refused(tiny("llama"), file, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", str(2**32)], "--seed must be from 0 to 4294967295"),
        (["--device", "cuda:x"], "known devices: auto, cpu, cuda, cuda:N"),
        (["--dtype", "fp8"], "known dtypes: bfloat16"),
        (["--align", "ropes"], "did you mean rope?"),
        (["--align", "all", "--contract", "nope.json"], "cannot read the contract file nope.json"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
    ],
)
def test_option_that_means_nothing_is_refused_before_the_model_is_looked_at(
    prompts: Path, refused: Refused, arguments: list[str], said: str
) -> None:
    assert said in refused("no/model/at/all", prompts, *arguments)


def test_bisect_begins_no_run_for_a_model_that_is_not_there(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    assert run(["bisect", str(tmp_path / "none"), str(prompts), "--run", str(where)]) == 2
    assert f"error: no model at {tmp_path / 'none'}" in capsys.readouterr().err
    assert not where.exists()


def test_fingerprint_of_no_region_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fingerprint", str(tmp_path), "--regions", ""]) == 2
    assert "error: no region to fingerprint\nhint: --regions rope" in capsys.readouterr().err


def test_device_that_is_not_there_is_refused_with_what_to_do(
    tiny: Callable[[str], Path], prompts: Path, refused: Refused
) -> None:
    said = refused(tiny("llama"), prompts, "--device", "cuda:63")
    assert "the trainer cannot use device 'cuda:63'" in said and "rpadiag doctor" in said


@pytest.mark.parametrize(
    ("model", "hint"),
    [("nobody/nothing", "give a directory with config.json"), ("SmolM2-135M", "did you mean smollm2-135m?")],
)
def test_hub_that_cannot_be_reached_is_asked_once_and_no_run_is_begun(
    model: str, hint: str, tmp_path: Path, prompts: Path
) -> None:
    """Loading would try six times over half a minute; port 9 of this machine refuses at once."""
    where = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "rpadiag", "compare", model, str(prompts), "--run", str(where)]
        + ["--rollout", "emulated"],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not where.exists()
    assert f"error: there is no model {model}\n" in done.stderr and "the hub cannot be reached" in done.stderr
    assert f"\nhint: {hint}" in done.stderr
    assert "Retrying" not in done.stderr
