"""Captures into bundles from end to end, on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import PROMPTS

from rpadiag.cli.app import run
from rpadiag.engines.bundle import open_bundle


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.glob("*.safetensors")}


def test_the_size_that_is_printed_first_is_exact(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "b"
    arguments = ["--engine", "trainer", "--bundle", str(where), "--sites", "layers.0.*", "--format", "json"]
    assert run(["capture", str(tiny("qwen2")), str(prompts), *arguments]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    # q, attn, resid_attn, ... 128 wide ten times; k, v and k_rope 64; gate, up and act 256
    elements = 9 * 128 + 3 * 64 + 3 * 256
    assert f"{answer['num_tokens']} tokens x {elements:,} elements x 2 bytes" in shown.err
    assert shown.err.index("this bundle takes") < shown.err.index("load trainer")
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in where.glob("*.safetensors"))
    tokens = answer["num_tokens"]
    assert answer["num_bytes"] - headers == tokens * (elements * 2 + 8) + (tokens - 3) * 16


def test_a_bundle_is_plain_safetensors_with_the_facts_of_its_stack(bundles: Path) -> None:
    from safetensors.torch import load_file

    assert sorted(p.name for p in (bundles / "trainer").iterdir()) == [
        "bundle.json", "sequence-00000.safetensors", "sequence-00001.safetensors", "sequence-00002.safetensors",
    ]  # fmt: skip
    bundle = open_bundle(bundles / "trainer")
    tensors = load_file(bundles / "trainer" / "sequence-00001.safetensors")
    assert tensors["layers.1.q_rope"].shape == (len(bundle.sequences[1].token_ids), 128)
    assert tensors["scores.logprob"].shape == (len(bundle.sequences[1].token_ids) - 1,)
    assert tensors["positions"].tolist() == list(range(len(bundle.sequences[1].token_ids)))
    meta = bundle.meta
    assert (meta["stack"], meta["engine"], meta["dtype"]) == ("trainer", "transformers", "bfloat16")
    assert meta["config"]["rms_eps"] == 1e-5 and meta["config"]["rope"] == {"theta": 10000.0, "type": "default"}
    assert meta["weights"]["num_tensors"] == len(meta["weights"]["tensors"]) == 21
    assert meta["options"]["given"]["engine"] == "trainer" and meta["options"]["effective"]["device"] == "cpu"
    assert meta["environment"]["packages"]["rpadiag"]
    assert bundle.text(1) == PROMPTS.splitlines()[1]
    assert "".join(bundle.token_texts(1) or []) == PROMPTS.splitlines()[1]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_loaded(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    assert (
        run(["capture", str(tiny("llama")), str(prompts), "--engine", "trainer", "--bundle", str(tmp_path / "b")]) == 2
    )
    problem = capsys.readouterr().err
    assert "needs 0." in problem and "its disk has 0.1 MiB free" in problem and "without logits it is" in problem
    assert "load trainer" not in problem and not (tmp_path / "b").exists()


def test_a_capture_that_is_killed_goes_on_with_resume_and_ends_the_same(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "many.txt"
    lines.write_text("".join(f"{PROMPTS.splitlines()[i % 3]} {i}\n" for i in range(60)), encoding="utf-8")
    where, whole = tmp_path / "killed", tmp_path / "whole"
    command = ["capture", str(tiny("llama")), str(lines), "--engine", "trainer", "--bundle"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rpadiag", *command, str(where)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 120
    while not (where / "sequence-00003.safetensors").exists():
        assert time.monotonic() < end and process.poll() is None, "it never got there"
        time.sleep(0.002)
    process.kill()
    process.wait()
    content = load(where / "bundle.json")
    assert content["status"] == "writing", "it was faster than the kill; give it more prompts"
    kept = {name: (where / name).stat().st_mtime_ns for name in contents(where)}
    with pytest.raises(Exception, match="is not complete: its status is writing"):
        open_bundle(where)
    assert run([*command, str(where)]) == 2
    assert "--resume" in capsys.readouterr().err

    assert run([*command, str(where), "--resume", "--format", "json"]) == 0  # in another process than the killed one
    assert 3 <= json.loads(capsys.readouterr().out)["num_resumed"] <= len(kept)
    assert run([*command, str(whole)]) == 0
    assert contents(where) == contents(whole)
    assert load(where / "bundle.json")["sequences"] == load(whole / "bundle.json")["sequences"]
    same = [name for name in kept if (where / name).stat().st_mtime_ns == kept[name]]
    assert len(same) >= 3  # what was finished was not made again
    assert {p.suffix for p in where.iterdir()} == {".json", ".safetensors"}


def interrupted(source: Path, directory: Path, *, keep: int) -> Path:
    """A copy of a bundle as a kill after ``keep`` sequences would leave it."""
    shutil.copytree(source, directory)
    content = load(directory / "bundle.json")
    lines = [json.dumps({"number": i, **e}) for i, e in enumerate(content["sequences"][:keep])]
    (directory / "finished.jsonl").write_text("\n".join(lines) + '\n{"number": 9, "fi', encoding="utf-8")
    (directory / "bundle.json").write_text(json.dumps({**content, "status": "writing", "sequences": []}))
    return directory


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--dtype", "float16"], "dtype: bfloat16 there, float16 now"),
        (["--sites", "q"], "sites: "),
        (["--attention", "eager"], "attention: sdpa there, eager now"),
        (["--align", "rope"], "--align: [] there, ['rope'] now"),
        (["--max-tokens", "5"], "sequence 0 has other tokens there"),
    ],
)
def test_going_on_with_another_command_is_refused(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    changed: list[str], said: str,
) -> None:  # fmt: skip
    where = interrupted(bundles / "trainer", tmp_path / "b", keep=2)
    before = contents(where)
    arguments = ["--engine", "trainer", "--bundle", str(where), "--resume", *changed]
    assert run(["capture", str(tiny("llama")), str(prompts), *arguments]) == 2
    problem = capsys.readouterr().err
    assert "cannot go on with bundle" in problem and said in problem
    assert contents(where) == before


def test_going_on_with_other_weights_is_refused(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny import planted_copy

    where = interrupted(bundles / "trainer", tmp_path / "b", keep=1)
    stale = planted_copy(tiny("llama"), tmp_path / "stale", tensors=lambda t: t["model.norm.weight"].mul_(1.5))
    arguments = ["--engine", "trainer", "--bundle", str(where), "--resume"]
    assert run(["capture", str(stale), str(prompts), *arguments]) == 2
    assert "begun with another weights" in capsys.readouterr().err


def test_a_file_cut_short_is_captured_again(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path
) -> None:
    where = interrupted(bundles / "trainer", tmp_path / "b", keep=2)
    file = where / "sequence-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    arguments = ["--engine", "trainer", "--bundle", str(where), "--resume"]
    assert run(["capture", str(tiny("llama")), str(prompts), *arguments]) == 0
    assert contents(where) == contents(bundles / "trainer")


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    lines = tmp_path / "many.txt"
    lines.write_text("".join(f"{PROMPTS.splitlines()[0]} {i}\n" for i in range(200)), encoding="utf-8")
    where = tmp_path / "b"
    command = [sys.executable, "-m", "rpadiag", "capture", str(tiny("llama")), str(lines), "--engine", "trainer"]
    process = subprocess.Popen([*command, "--bundle", str(where)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (where / "sequence-00001.safetensors").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    _, problem = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "keeps the sequences that were finished" in problem and "--resume goes on" in problem
    assert not (where / "scratch").exists()


def test_a_capture_that_failed_before_its_first_sequence_can_be_begun_again(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    where = tmp_path / "b"
    arguments = ["capture", str(tiny("llama")), str(prompts), "--engine", "trainer", "--bundle", str(where)]
    assert run([*arguments, "--device", "cuda:99"]) == 2
    assert where.exists()
    assert run(arguments) == 0


def test_generate_with_the_trainer_says_how_it_is_done(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--engine", "trainer", "--generate", "3", "--bundle", str(tmp_path / "b")]
    assert run(["capture", str(tiny("llama")), str(prompts), *arguments]) == 2
    assert "name that bundle in place of PROMPTS" in capsys.readouterr().err
