"""``rpadiag bisect`` from end to end on a tiny checkpoint: what is answered, and that interrupted is as good as whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpadiag.cli.app import run
from rpadiag.runs import Run, open_run
from rpadiag.runs.journal import Journal
from rpadiag.runs.reader import status_of

WORDS = ("The quick brown fox jumps", "Rounding once at the end", "A model is trained on tokens", "One hundred and one")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("".join(f"{words} number {n}.\n" for n in range(2) for words in WORDS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def command(tiny: Callable[[str], Path], prompts: Path) -> Callable[..., list[str]]:
    def arguments(where: Path, *options: str) -> list[str]:
        given = ["--regions", "rope,rmsnorm", "--replicates", "6", "--precision", "0.05", "--confirm"]
        return ["bisect", str(tiny("llama")), str(prompts), "--run", str(where), *given, *options]

    return arguments


@pytest.fixture(scope="module")
def whole(command: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Run:
    where = tmp_path_factory.mktemp("runs") / "whole"
    assert run(command(where)) in (0, 2)
    return open_run(where)


def interrupted_after(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when ``num`` forwards are on disk."""
    append = Journal.append
    written = 0

    def counting(self: Journal, row: Any) -> None:
        nonlocal written
        if written == num:
            raise KeyboardInterrupt
        append(self, row)
        written += 1

    monkeypatch.setattr(Journal, "append", counting)


def same(a: Run, b: Run) -> bool:
    """Equal tables, findings and metrics, forwards asked for in the process aside."""
    attribution = {**a.metrics["attribution"], **b.metrics["attribution"], "num_forwards": 0}
    return (
        all(a.table(t).equals(b.table(t)) for t in ("attribution", "effects", "prompts"))
        and {**a.metrics["attribution"], "num_forwards": 0} == attribution
        and a.verdict["sentence"] == b.verdict["sentence"]  # type: ignore[index]
    )


def test_interrupted_twice_and_resumed_gives_the_numbers_of_an_uninterrupted_run(
    whole: Run,
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = tmp_path / "run"
    for num, options in ((5, ()), (9, ("--resume",))):
        with monkeypatch.context() as patched:
            interrupted_after(num, patched)
            assert run(command(where, *options)) == 130
        shown = capsys.readouterr().err
        assert status_of(where) == "interrupted" and "--resume" in shown
    assert len(list((where / "replicates").glob("*.parquet"))) == 14
    assert run(command(where, "--resume")) in (0, 2)
    assert "resumed: 14 of at most" in capsys.readouterr().err
    resumed = open_run(where)
    assert same(resumed, whole)
    assert len(resumed.manifest["resumed_utc"]) == 2
    by_name = [
        {
            (r["design"], r["region"], r["kind"], r["replicate"]): r["logprobs"]
            for r in x.table("replicates").to_pylist()
        }
        for x in (resumed, whole)
    ]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--replicates", "7"), "options.replicates is not what it was"),
        (("--max-tokens", "5"), "options.max_tokens is not what it was"),
    ],
)
def test_other_options_are_not_resumed(
    options: tuple[str, str],
    says: str,
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupted_after(3, patched)
        assert run(command(where)) == 130
    assert run(command(where, "--resume", *options)) == 2
    assert says in capsys.readouterr().err
    assert len(list((where / "replicates").glob("*.parquet"))) == 3


def test_complete_run_is_not_resumed_and_an_absent_one_cannot_be(
    whole: Run, command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(whole.path, "--resume")) == 2
    assert "is complete already" in capsys.readouterr().err
    assert run(command(tmp_path / "none", "--resume")) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_answer_in_json_has_the_tables(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    options = ["--by", "layer", "--replicates", "2", "--interactions", "--format", "json"]
    assert run(["bisect", str(tiny("llama")), str(prompts), "--run", str(where), *options]) in (0, 2)
    answer = json.loads(capsys.readouterr().out)
    parts = {row["region"] for row in answer["attribution"] if row["design"] == "each"}
    assert parts == {"layer 0", "layer 1"}
    assert {row["region"] for row in answer["attribution"] if row["design"] == "interaction"} == {"layer 0 × layer 1"}
    assert {row["metric"] for row in answer["effects"]} >= {"mean_abs_d", "weight_bias_sq", "k3_kl"}
    assert answer["metrics"]["attribution"]["replicated"] == ["trainer"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--by", "head"), "unknown unit: head"),
        (("--by", "layer:0"), "--by layer:0: 'layer:0' is not a unit"),
        (("--precision", "2"), "--precision must be between 0 and 1, not 2"),
        (("--regions", "ropee"), "unknown region: ropee"),
        (("--replicates", "1"), "--replicates must be at least 2"),
    ],
)
def test_value_that_means_nothing_is_refused_before_any_work(
    options: tuple[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bisect", "model", "p.txt", "--run", str(tmp_path / "run"), *options]) == 2
    assert f"error: {says}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.vllm
def test_trainers_are_held_against_the_replicated_engine(
    tiny: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Aligned, the trainer comes closer to the real engine than as it is, under the same noise."""
    given = ["--regions", "rope,rmsnorm", "--replicates", "4", "--rollout", "vllm"]
    assert run(["bisect", str(tiny("llama")), str(prompts), "--run", str(tmp_path / "run"), *given]) in (0, 2)
    found = open_run(tmp_path / "run")
    against = found.attribution().query("design == 'rollout'").set_index("region")
    assert set(against.index) == {"all", "rope", "rmsnorm", "reference"}
    assert against.loc["reference", "systematic_sq"] < against.loc["all", "systematic_sq"]
    assert found.metrics["attribution"]["replicated"] == ["trainer", "rollout"]
    assert found.manifest["rollout"]["engine"] == "vllm"
    assert "Against the rollout engine" in capsys.readouterr().out
