"""Captures and comparisons of bundles from end to end, on a tiny checkpoint: trainer and emulated rollout."""

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

from rpadiag.cli.app import run
from rpadiag.engines.bundle import open_bundle
from rpadiag.runs import open_run

PROMPTS = "The quick brown fox jumps over [the] lazy dog.\nRounding once at the end is [not/the] same.\n1 + 1 = 2\n"
EMULATED = ("--engine", "emulated", "--emulate", "vllm-compiled")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundles(tiny: Callable[[str], Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``trainer`` and ``rollout``, and both in FP32."""
    root = tmp_path_factory.mktemp("bundles")
    for name, extra in (("", ()), ("-fp32", ("--dtype", "float32"))):
        for stack, engine in (("trainer", ("--engine", "trainer")), ("rollout", EMULATED)):
            arguments = ["capture", str(tiny("llama")), str(prompts), *engine, *extra]
            assert run([*arguments, "--bundle", str(root / f"{stack}{name}")]) == 0
    return root


def compare(bundles: Path, where: Path, *further: str) -> int:
    pair = ["--trainer", str(bundles / "trainer"), "--rollout", str(bundles / "rollout")]
    return run(["compare", *pair, "--run", str(where), *further])


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


def test_totals_of_two_bundles_are_those_of_a_direct_comparison(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path
) -> None:
    direct = ["--run", str(tmp_path / "direct"), "--rollout", "emulated", "--emulate", "vllm-compiled"]
    assert run(["compare", str(tiny("llama")), str(prompts), *direct, "--control", "none"]) == 0
    assert compare(bundles, tmp_path / "apart", str(tiny("llama"))) == 0
    ours, theirs = open_run(tmp_path / "apart"), open_run(tmp_path / "direct")
    # with MODEL the local columns are equal, too
    assert ours.table("sites").to_pylist() == theirs.table("sites").to_pylist()
    assert ours.table("tokens").to_pylist() == theirs.table("tokens").to_pylist()
    assert ours.table("prompts").to_pylist() == theirs.table("prompts").to_pylist()
    assert ours.metrics["logprob"] == theirs.metrics["logprob"]
    assert ours.weights == theirs.weights
    assert ours.verdict is not None and ours.verdict["kind"] == "rounding only"


def test_without_model_only_what_reads_equal_inputs_has_a_local_divergence(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(bundles, tmp_path / "run") == 2
    shown = capsys.readouterr().out
    assert shown.startswith("Inconclusive: ") and "--trainer-fp32 and --rollout-fp32 were not given" in shown
    sites = open_run(tmp_path / "run").sites()
    local = sites[sites["local_n"].notna()]
    assert set(local["site"]) == {"layers.0.input_norm"}  # it reads the embedding, and differs itself
    assert (local["local_num_differing"] == local["num_differing"]).all()
    reasons = set(sites[sites["local_n"].isna()]["local_reason"])
    assert any("without MODEL" in reason for reason in reasons)


def test_bundles_in_fp32_are_the_control(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp32 = ["--trainer-fp32", str(bundles / "trainer-fp32"), "--rollout-fp32", str(bundles / "rollout-fp32")]
    assert compare(bundles, tmp_path / "run", *fp32) == 0
    assert capsys.readouterr().out.startswith("Rounding only: ")
    run_ = open_run(tmp_path / "run")
    assert set(run_.sites()["precision"]) == {"model", "fp32"}
    assert run_.manifest["control"]["num_tokens"] == sum(
        len(s.token_ids) - 1 for s in open_bundle(bundles / "rollout").sequences
    )


def test_a_run_of_bundles_is_reported_like_any_other(bundles: Path, tmp_path: Path) -> None:
    assert compare(bundles, tmp_path / "run", "--sites", "*_rope") == 2
    assert run(["report", str(tmp_path / "run"), "--html", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "emulated vllm-compiled" in page and "q_rope" in page


def test_generated_tokens_are_captured_again_from_the_bundle_that_holds_them(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    model, rollout, trainer = str(tiny("llama")), str(tmp_path / "rollout"), str(tmp_path / "trainer")
    assert run(["capture", model, str(prompts), *EMULATED, "--generate", "3", "--bundle", rollout]) == 0
    assert run(["capture", model, rollout, "--engine", "trainer", "--bundle", trainer]) == 0
    assert compare(tmp_path, tmp_path / "run", model) == 0
    tokens = open_run(tmp_path / "run").tokens()
    assert (tokens["source"] == "decode").sum() == 9
    assert tokens["p"].notna().all() and tokens["q"].notna().all()


def test_different_tokens_are_not_comparable_and_the_prompts_are_named(
    tiny: Callable[[str], Path], bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PROMPTS.splitlines()
    other = tmp_path / "other.txt"
    other.write_text(f"{lines[0]}\nRounding twice\n", encoding="utf-8")
    arguments = ["capture", str(tiny("llama")), str(other), "--engine", "trainer", "--bundle", str(tmp_path / "t")]
    assert run(arguments) == 0
    capsys.readouterr()
    pair = ["--trainer", str(tmp_path / "t"), "--rollout", str(bundles / "rollout")]
    assert run(["compare", *pair, "--run", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().out
    assert shown.startswith("Not comparable: ")
    assert "prompt 1: token " in shown and "prompt 2 is in the rollout bundle only" in shown and "prompt 0" not in shown
    assert load(tmp_path / "run" / "findings.json")["verdict"]["evidence"][0]["code"] == "tokens-differ"


def test_different_weights_are_not_comparable_and_the_tensor_is_named(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny import planted_copy

    name = "model.layers.1.mlp.down_proj.weight"
    stale = planted_copy(tiny("llama"), tmp_path / "stale", tensors=lambda t: t[name].mul_(1.01))
    assert run(["capture", str(stale), str(prompts), "--engine", "trainer", "--bundle", str(tmp_path / "t")]) == 0
    pair = ["--trainer", str(tmp_path / "t"), "--rollout", str(bundles / "rollout")]
    assert run(["compare", *pair, "--run", str(tmp_path / "run")]) == 2
    assert name in capsys.readouterr().out
    assert compare(bundles, tmp_path / "other", str(stale)) == 2
    problem = capsys.readouterr().err
    assert "has other weights than the trainer" in problem and name in problem


def test_a_configuration_that_differs_is_named_without_any_control(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny import planted_copy

    other = planted_copy(tiny("llama"), tmp_path / "eps", config={"rms_norm_eps": 1e-3})
    assert run(["capture", str(other), str(prompts), "--engine", "trainer", "--bundle", str(tmp_path / "t")]) == 0
    capsys.readouterr()
    pair = ["--trainer", str(tmp_path / "t"), "--rollout", str(bundles / "rollout")]
    assert run(["compare", *pair, "--run", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Different computation")
    assert "the epsilon of RMSNorm is 0.001 in the trainer and 1e-05 in the rollout" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rollout", "vlm"], "unknown rollout: vlm"),
        ([], "compare needs MODEL and PROMPTS, or two bundles"),
        (["--trainer", "TRAINER"], "--rollout names none"),
        (["--rollout", "TRAINER"], "--trainer names none"),
        (["--trainer", "TRAINER", "--rollout", "TRAINER", "--generate", "3"], "--generate says how to run the stacks"),
        (["--trainer", "TRAINER", "--rollout", "TRAINER", "--trainer-fp32", "TRAINER"], "--trainer-fp32 alone"),
        (["--trainer", "EMPTY", "--rollout", "TRAINER"], "is not a bundle: it has no bundle.json"),
        (["--trainer", "FP32", "--rollout", "TRAINER"], "the bundles are of different dtypes"),
        (
            ["--trainer", "TRAINER", "--rollout", "TRAINER", "--trainer-fp32", "TRAINER", "--rollout-fp32", "TRAINER"],
            "is no FP32 control: its dtype is bfloat16",
        ),
    ],
)
def test_what_is_no_pair_of_bundles_is_said_before_a_run_is_made(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"TRAINER": bundles / "trainer", "EMPTY": tmp_path / "empty", "FP32": bundles / "trainer-fp32"}
    arguments = [str(places.get(word, word)) for word in given]
    assert run(["compare", *arguments, "--run", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_site_that_one_bundle_lacks_is_named_and_one_that_is_asked_for_is_an_error(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--engine", "trainer", "--bundle", str(tmp_path / "t"), "--sites", "*_rope", "--sites", "embed"]
    assert run(["capture", str(tiny("llama")), str(prompts), *arguments]) == 0
    pair = ["--trainer", str(tmp_path / "t"), "--rollout", str(bundles / "rollout")]
    assert run(["compare", *pair, "--run", str(tmp_path / "run")]) == 2
    sites = open_run(tmp_path / "run")
    assert set(sites.sites()["point"]) == {"embed", "q_rope", "k_rope", "logprob"}
    assert sites.manifest["sites"]["absent"]["attn"] == "only in the rollout bundle"
    assert run(["compare", *pair, "--run", str(tmp_path / "two"), "--sites", "attn"]) == 2
    assert "site layers.0.attn is only in the rollout bundle" in capsys.readouterr().err


def test_a_bundle_of_an_aligned_trainer_is_fingerprinted_and_compared_like_it(
    tiny: Callable[[str], Path], prompts: Path, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aligned = str(tmp_path / "trainer")
    arguments = ["--engine", "trainer", "--align", "all", "--contract", "vllm-compiled", "--bundle", aligned]
    assert run(["capture", str(tiny("llama")), str(prompts), *arguments]) == 0
    assert run(["fingerprint", aligned, "--regions", "rope", "--output", str(tmp_path / "f.json")]) == 0
    assert "aligned in rope, swiglu, rmsnorm: rope: " in capsys.readouterr().out
    pair = ["--trainer", aligned, "--rollout", str(bundles / "rollout"), "--run", str(tmp_path / "run")]
    assert run(["compare", str(tiny("llama")), *pair]) == 0
    assert capsys.readouterr().out.startswith("Identical: ")
    # MODEL is aligned as the bundle says: its operations, too, make nothing
    local = open_run(tmp_path / "run").sites()["local_num_differing"].dropna()
    assert len(local) and (local == 0).all()


# -- disk and interruption -------------------------------------------------------------------------


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
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = tmp_path / "many.txt"
    lines.write_text("".join(f"{PROMPTS.splitlines()[i % 3]} {i}\n" for i in range(60)), encoding="utf-8")
    where, whole = tmp_path / "killed", tmp_path / "whole"
    command = [
        sys.executable,
        "-m",
        "rpadiag",
        "capture",
        str(tiny("llama")),
        str(lines),
        "--engine",
        "trainer",
        "--bundle",
    ]
    process = subprocess.Popen([*command, str(where)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
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
    refused = subprocess.run([*command, str(where)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "--resume" in refused.stderr

    resumed = subprocess.run(
        [*command, str(where), "--resume", "--format", "json"], capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert 3 <= json.loads(resumed.stdout)["num_resumed"] <= len(kept)
    assert subprocess.run([*command, str(whole)], capture_output=True, check=False).returncode == 0
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
