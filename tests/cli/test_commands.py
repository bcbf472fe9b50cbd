"""The commands from end to end, on a tiny checkpoint with an emulated rollout: what is printed, written and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpadiag.cli.app import run

PROMPTS = "The quick brown fox jumps over [the] lazy dog.\nRounding once at the end is [not/the] same.\n"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def compared(tiny: Callable[[str], Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("runs") / "compare"
    arguments = ["compare", str(tiny("llama")), str(prompts), "--run", str(where), "--rollout", "emulated"]
    assert run([*arguments, "--emulate", "vllm-compiled", "--generate", "3"]) == 0
    return where


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_table_starts_with_the_verdict_and_progress_is_on_stderr(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    model = str(tiny("llama"))
    assert run(["compare", model, str(prompts), "--run", str(where), "--rollout", "emulated", "--sites", "*_rope"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Rounding only: trainer and emulated")
    for part in ("mean |d|, nats", "Noise floors", "made here", "q_rope", f"run: {where}"):
        assert part in shown.out
    assert "input_norm" not in shown.out.partition("Sites:")[2]
    assert "compare prompts" in shown.err and f"hint: rpadiag report {where} --html {where}.html" in shown.err


def test_manifest_tells_given_options_from_effective_ones(compared: Path) -> None:
    manifest = load(compared / "manifest.json")
    text = json.dumps(manifest)
    assert manifest["status"] == "complete" and "vllm-compiled" in text
    given = manifest["options"]["given"]
    assert given["generate"] == 3 and "seed" not in given
    assert manifest["options"]["effective"]["seed"] == 0


def test_json_is_the_run_in_strict_json(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    arguments = ["--run", str(where), "--rollout", "emulated", "--control", "none", "--format", "json"]
    assert run(["compare", str(tiny("qwen2")), str(prompts), *arguments]) == 0
    answer = strict(capsys.readouterr().out)
    assert answer["run"] == str(where)
    assert answer["verdict"] == load(where / "findings.json")["verdict"]
    assert answer["findings"] == load(where / "findings.json")["findings"]
    assert answer["metrics"] == load(where / "metrics.json")


def test_aligned_trainer_is_identical_to_its_emulation(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run", str(tmp_path / "run"), "--rollout", "emulated", "--emulate", "vllm-compiled"]
    aligned = ["--align", "all", "--contract", "vllm-compiled"]
    assert run(["compare", str(tiny("llama")), str(prompts), *arguments, *aligned]) == 0
    assert capsys.readouterr().out.startswith("Identical:")


def test_run_directory_that_exists_is_refused_and_kept(
    compared: Path, tiny: Callable[[str], Path], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p.name: p.read_bytes() for p in compared.iterdir() if p.is_file()}
    for command in ("compare", "bisect"):
        assert run([command, str(tiny("llama")), str(prompts), "--run", str(compared)]) == 2
        assert "error:" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in compared.iterdir() if p.is_file()} == before


def test_unknown_site_is_refused_with_the_known_ones(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run", str(tmp_path / "run"), "--rollout", "emulated", "--sites", "q_ropes"]
    assert run(["compare", str(tiny("llama")), str(prompts), *arguments]) == 2
    problem = capsys.readouterr().err
    assert "site pattern 'q_ropes' matches nothing" in problem and "q_rope, k_rope" in problem


@pytest.mark.parametrize("there", [False, True])
def test_a_run_refused_once_the_model_is_known_leaves_the_directory_as_it_was_for_the_right_command(
    there: bool, tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    if there:
        where.mkdir()
    arguments = ["compare", str(tiny("llama")), str(prompts), "--run", str(where), "--rollout", "emulated"]
    assert run([*arguments, "--control", "none", "--sites", "layers.99.q"]) == 2
    assert "site pattern 'layers.99.q' matches nothing" in capsys.readouterr().err
    assert where.exists() == there and not list(where.glob("*"))
    assert run([*arguments, "--control", "none", "--sites", "q"]) == 0


def test_half_a_model_is_refused(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    for model in (half, tmp_path / "none"):
        arguments = ["--run", str(tmp_path / f"run-{model.name}"), "--rollout", "emulated"]
        assert run(["compare", str(model), str(prompts), *arguments]) == 2
        problem = capsys.readouterr().err
        assert str(model) in problem and "hint:" in problem


def test_bisect_prints_every_region_with_its_error_and_leaves_with_its_verdict(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    code = run(["bisect", str(tiny("llama")), str(prompts), "--run", str(where), "--replicates", "4"])
    shown = capsys.readouterr().out
    for part in ("left unaligned", "rope", "swiglu", "everything", "self-control", "± s.e.", "decision"):
        assert part in shown
    kind = load(where / "findings.json")["verdict"]["kind"]
    assert code == (2 if kind == "inconclusive" else 0)


def test_fingerprint_of_the_trainer_writes_what_align_reads(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "contract.json"
    prompts = tmp_path / "long.txt"  # a norm is determined by rows, one a token, and 64 is the least
    prompts.write_text(
        "\n".join(f"The model number {n} was trained on tokens that an engine sampled." for n in range(8))
    )
    model = str(tiny("llama"))
    assert run(["fingerprint", model, str(prompts), "--stack", "trainer", "--output", str(file)]) == 0
    shown = capsys.readouterr()
    assert "1. rope of transformers" in shown.out and str(file) in shown.err
    again = ["--run", str(tmp_path / "run"), "--rollout", "emulated", "--emulate", "hf-eager"]
    assert run(["compare", model, str(prompts), *again, "--align", "all", "--contract", str(file)]) == 0
    assert capsys.readouterr().out.startswith("Identical:")


def test_report_prints_the_path_of_the_page(compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert run(["report", str(compared), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.stat().st_size > 10_000


def test_report_writes_a_markdown_summary_alone_or_beside_the_page(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, page = tmp_path / "summary.md", tmp_path / "report.html"
    assert run(["report", str(compared), "--markdown", str(summary)]) == 0
    assert capsys.readouterr().out == f"{summary}\n"
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("## ") and "**Rounding only.**" in text and "| mean abs d, nats |" in text
    assert run(["report", str(compared), "--html", str(page), "--markdown", str(summary)]) == 0
    assert capsys.readouterr().out == f"{page}\n{summary}\n"


def test_report_with_one_file_for_two_formats_is_a_usage_error(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--html", str(tmp_path / "a"), "--markdown", str(tmp_path / "a")]
    assert run(["report", str(compared), *both]) == 2
    shown = capsys.readouterr()
    assert "name the same file" in shown.err and "hint: " in shown.err and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_contract_without_a_region_to_align_is_a_usage_error(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run", str(tmp_path / "run"), "--rollout", "emulated", "--contract", "vllm-eager"]
    assert run(["compare", str(tiny("llama")), str(prompts), *arguments]) == 2
    problem = capsys.readouterr().err
    assert "--contract names what an aligned trainer follows" in problem and "hint: add --align all" in problem
    assert not (tmp_path / "run").exists()


def test_tokens_of_a_model_without_a_tokenizer_have_no_text(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Null in the tables, as docs/run-format.md says, and a report all the same."""
    from rpadiag.runs import open_run

    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((tiny("llama") / name).read_bytes())
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"token_ids": [5, 6, 7, 8]}\n', encoding="utf-8")
    where = tmp_path / "run"
    arguments = ["--run", str(where), "--rollout", "emulated", "--control", "none"]
    assert run(["compare", str(model), str(prompts), *arguments]) == 0
    found = open_run(where)
    assert found.tokens()["text"].isna().all() and found.prompts()["text"].isna().all()
    assert run(["report", str(where), "--html", str(tmp_path / "r.html")]) == 0


def test_demo_numbers_its_directories_and_prints_three_findings_and_the_page(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs-demo" / "001").mkdir(parents=True)
    small = ["--num-prompts", "3", "--max-tokens", "4", "--replicates", "2"]
    assert run(["demo", "--rollout", "emulated", *small]) == 0
    shown = capsys.readouterr().out
    assert [line[:3] for line in shown.splitlines() if line[:1].isdigit()] == ["1. ", "2. ", "3. "]
    assert shown.splitlines()[-1] == "report: runs-demo/002/report.html"
    assert Path("runs-demo/002/report.html").stat().st_size < 8 * 2**20
