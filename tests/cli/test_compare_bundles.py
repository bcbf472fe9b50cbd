"""Comparisons of bundles from end to end, on a tiny checkpoint: trainer and emulated rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import EMULATED, PROMPTS

from rpadiag.cli.app import run
from rpadiag.engines.bundle import open_bundle
from rpadiag.runs import open_run


def compare(bundles: Path, where: Path, *further: str) -> int:
    pair = ["--trainer", str(bundles / "trainer"), "--rollout", str(bundles / "rollout")]
    return run(["compare", *pair, "--run", str(where), *further])


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


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
    sites = open_run(tmp_path / "run").sites()
    carried = sites["point"].isin(
        ["resid_mlp", "input_norm", "final_norm"]
    )  # of a sum that was never stored as it was added
    local = sites[~carried]["local_num_differing"].dropna()
    assert len(local) and (local == 0).all()


# -- disk and interruption -------------------------------------------------------------------------
