"""``--align all`` is what the contract names and the model has, query and key norms of Qwen3 included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rpadiag.cli.app import run
from rpadiag.cli.options import aligned_of
from rpadiag.workflows.arguments import named_regions

EMULATED = ("--rollout", "emulated", "--emulate", "fp32-output", "--contract", "fp32-output", "--control", "none")


@pytest.mark.parametrize(
    ("family", "regions"),
    [("qwen3", ["rope", "swiglu", "rmsnorm", "qk_norm"]), ("llama", ["rope", "swiglu", "rmsnorm"]), ("gemma3", ["rope", "rmsnorm", "qk_norm"])],
)  # fmt: skip
def test_all_regions_of_the_model_are_aligned_and_nothing_is_left(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, family: str, regions: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert (
        run(["compare", str(tiny(family)), str(prompts), "--run", str(tmp_path / "run"), "--align", "all", *EMULATED])
        == 0
    )
    assert capsys.readouterr().out.startswith("Identical: ")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["trainer"]["aligned"]["regions"] == regions
    assert manifest["options"]["given"]["align"] == "all"
    assert manifest["options"]["effective"]["align"] == regions


def test_query_and_key_norms_can_be_named_and_are_refused_where_there_are_none(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--align", "rope,swiglu,rmsnorm,qk_norm", *EMULATED]
    assert run(["compare", str(tiny("qwen3")), str(prompts), "--run", str(tmp_path / "a"), *named]) == 0
    assert capsys.readouterr().out.startswith("Identical: ")
    assert run(["compare", str(tiny("llama")), str(prompts), "--run", str(tmp_path / "b"), *named]) == 2
    assert "the model has no region qk_norm" in capsys.readouterr().err
    assert (
        run(
            [
                "compare",
                str(tiny("llama")),
                str(prompts),
                "--run",
                str(tmp_path / "c"),
                "--align",
                "all,rope",
                *EMULATED,
            ]
        )
        == 2
    )
    assert "`all` stands alone" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", ","])
def test_no_name_at_all_is_refused_and_not_an_unaligned_run(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", str(tiny("llama")), str(prompts), "--run", str(tmp_path / "a"), "--align", text]) == 2
    assert "no region to align" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_contract_file_of_another_shape_is_refused(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a", '{"regions": {"rmsnorm": 5}}'), ("b", "[" * 100_000), ("c", "[]"), ("d", '{"regions"')):
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        given = ["--align", "all", "--contract", str(path), "--rollout", "emulated", "--run", str(tmp_path / name)]
        assert run(["compare", str(tiny("llama")), str(prompts), *given]) == 2
        assert "hint: " in capsys.readouterr().err


def test_all_of_regions_to_attribute_or_fingerprint_is_each_of_the_method() -> None:
    assert named_regions("all") == ("rope", "swiglu", "rmsnorm")
    assert aligned_of("all") == ("all",) and aligned_of(None) == ()
