"""Only complete, undamaged runs are read, and two runs are compared only on the same inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpadiag.errors import InputError, NotComparableError
from rpadiag.runs import Run, RunWriter, check_same_inputs, open_run
from rpadiag.runs.schema import TABLES

MakeRun = Callable[..., Run]


def edit_manifest(path: Path, **changes: Any) -> None:
    data = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**data, **changes}))


def test_a_missing_directory_and_a_directory_without_a_manifest_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is not a run\nit has no manifest\.json\nhint: name a directory that"):
        open_run(tmp_path)


def test_a_directory_of_runs_names_them(tmp_path: Path) -> None:
    for name in "fedcba":
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="hint: it holds a, b, c, d, e and others: name one"):
        open_run(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "\x00\x01"])
def test_a_manifest_that_is_not_ours_is_an_input_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"not a run|not valid JSON"):
        open_run(tmp_path)


def test_a_run_of_another_format_version_is_refused_with_both_versions(make_run: MakeRun) -> None:
    path = make_run().path
    edit_manifest(path, format_version=99)
    with pytest.raises(InputError, match="format version 99; this rpadiag reads 1"):
        open_run(path)


def test_a_table_that_was_not_written_is_empty_and_has_its_columns(make_run: MakeRun) -> None:
    run = make_run(fill=lambda run: None)
    assert not run.has("sites")
    assert run.sites().empty and "local_differing" in run.sites().columns
    assert list(run.tokens(["prompt", "p"]).columns) == ["prompt", "p"]
    assert (run.findings, run.verdict, run.metrics, run.weights) == ([], None, {}, {})


def test_some_columns_can_be_read_alone(make_run: MakeRun) -> None:
    assert list(make_run().sites(["site", "differing"]).columns) == ["site", "differing"]


def test_nullable_integers_stay_integers_and_null(make_run: MakeRun) -> None:
    run = make_run()
    assert str(run.sites()["layer"].dtype) == "Int32" and str(run.sites()["local_n"].dtype) == "Int64"
    assert str(run.tokens()["q_rank"].dtype) == "Int32" and run.tokens()["q_rank"].isna().all()
    assert str(run.tokens()["prompt"].dtype) == "int32"


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "other rows", "other columns"])
def test_a_damaged_table_is_an_input_error_that_names_the_file(make_run: MakeRun, damage: str) -> None:
    run = make_run()
    path = run.path / "tokens.parquet"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "garbage":
        path.write_bytes(b"not parquet")
    elif damage == "other rows":
        edit_manifest(run.path, tables={**run.manifest["tables"], "tokens": 5})
    else:
        path.write_bytes((run.path / "sites.parquet").read_bytes())
        edit_manifest(run.path, tables={**run.manifest["tables"], "tokens": 2})
    with pytest.raises(InputError, match=r"tokens\.parquet"):
        open_run(run.path).tokens()


@pytest.mark.parametrize("name", ["findings.json", "metrics.json"])
def test_a_damaged_json_file_is_an_input_error_that_names_the_file(make_run: MakeRun, name: str) -> None:
    run = make_run()
    (run.path / name).write_text("{")
    with pytest.raises(InputError, match=name):
        _ = (run.findings, run.metrics)
    (run.path / name).unlink()
    with pytest.raises(InputError, match=name):
        _ = (run.findings, run.metrics)


# -- two runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["[]", "[1]", "3", "null"])
@pytest.mark.parametrize("attribute", ["findings", "verdict", "metrics", "weights"])
def test_json_of_another_shape_is_a_damaged_run_that_names_the_file(
    make_run: MakeRun, attribute: str, content: str
) -> None:
    run = make_run()
    name = "findings.json" if attribute == "verdict" else f"{attribute}.json"
    (run.path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=f"{name} is not what rpadiag wrote"):
        getattr(run, attribute)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("manifest.json", {"git": "abc"}, "its git is str, not an object or null"),
        ("manifest.json", {"tables": {"sites": "2"}}, "its tables.* is str, not a number"),
        ("manifest.json", {"options": {"effective": [1]}}, "its options.effective is list, not an object or null"),
        ("findings.json", {"findings": None}, "its findings is NoneType, not a list"),
        ("findings.json", {"findings": [None]}, "its findings.* is NoneType, not an object"),
        ("findings.json", {"findings": [{"code": 3}]}, "its findings.*.code is int, not text"),
        ("findings.json", {"verdict": {"kind": None}}, "its verdict.kind is NoneType, not text"),
        ("metrics.json", {"floors": [{"mean_abs_d": "x"}]}, "its floors.*.mean_abs_d is str, not a number"),
        ("metrics.json", {"logprob": {"all": {"k3_kl": True}}}, "its logprob.*.* is bool, not a number or a list"),
        ("metrics.json", {"logprob": {"all": {"k3_kl": [1]}}}, "its logprob.*.*.* is int, not an object"),
        ("fingerprint.json", {"regions": {"rope": "x"}}, "its regions.* is str, not an object"),
    ],
)
def test_entry_of_another_kind_is_a_damaged_run_that_names_file_and_entry(
    make_run: MakeRun, name: str, change: dict[str, Any], told: str
) -> None:
    path = make_run().path / name
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**written, **change}), encoding="utf-8")
    with pytest.raises(InputError, match=f"{name} is not what rpadiag wrote") as caught:
        read_all(path.parent)
    assert caught.value.detail == told and caught.value.hint


def read_all(path: Path) -> None:
    run = open_run(path)
    _ = (run.findings, run.metrics, run.fingerprint)


def test_json_with_bytes_that_are_no_text_is_damaged_and_never_read_as_other_text(make_run: MakeRun) -> None:
    run = make_run()
    (run.path / "findings.json").write_bytes(b'{"verdict": null, "findings": [], "note": "\xff"}')
    with pytest.raises(InputError, match=r"findings\.json is not valid JSON"):
        _ = run.findings


def test_findings_without_a_verdict_entry_are_damaged(make_run: MakeRun) -> None:
    run = make_run()
    (run.path / "findings.json").write_text('{"findings": []}', encoding="utf-8")
    with pytest.raises(InputError, match="it has no verdict"):
        _ = run.findings


def inputs(
    *token_ids: list[int],
    num_prompt_tokens: int = 1,
    trainer: dict[str, str] | None = None,
    rollout: dict[str, str] | None = None,
) -> Callable[[RunWriter], None]:
    def fill(run: RunWriter) -> None:
        run.add_prompts(
            {"prompt": i, "num_prompt_tokens": num_prompt_tokens, "token_ids": t} for i, t in enumerate(token_ids)
        )
        if trainer:
            run.set_weights("trainer", trainer)
        if rollout:
            run.set_weights("rollout", rollout)

    return fill


def test_the_same_tokens_and_weights_are_comparable_in_any_order_of_prompts(make_run: MakeRun) -> None:
    def backwards(run: RunWriter) -> None:
        run.add_prompts([{"prompt": 1, "num_prompt_tokens": 1, "token_ids": [3]}])
        run.add_prompts([{"prompt": 0, "num_prompt_tokens": 1, "token_ids": [1, 2]}])
        run.set_weights("trainer", {"w": "1"})

    a = make_run("a", inputs([1, 2], [3], trainer={"w": "1"}))
    assert check_same_inputs(a, make_run("b", backwards)) == ()


def test_different_tokens_are_not_comparable_and_both_digests_are_shown(make_run: MakeRun) -> None:
    a, b = make_run("a", inputs([1], [2, 3])), make_run("b", inputs([1], [2, 4]))
    with pytest.raises(NotComparableError, match="prompt 1 has different tokens") as caught:
        check_same_inputs(a, b)
    for run in (a, b):
        assert f"{run.path}: 2 tokens, digest {run.prompts()['token_digest'].iloc[1]} (2 prompts)" in str(caught.value)


def test_tokens_generated_after_a_prompt_count_unless_the_prompts_alone_are_asked_for(make_run: MakeRun) -> None:
    generated = make_run("a", inputs([1, 2, 3], num_prompt_tokens=2))
    other = make_run("b", inputs([1, 2, 4], num_prompt_tokens=2))
    prompts = make_run("c", inputs([1, 2], num_prompt_tokens=2))
    for run in (other, prompts):
        with pytest.raises(NotComparableError, match="prompt 0 has different tokens"):
            check_same_inputs(generated, run)
        check_same_inputs(generated, run, prompts_only=True)
    shorter = make_run("d", inputs([1], num_prompt_tokens=1))
    with pytest.raises(NotComparableError, match="d: 1 tokens"):
        check_same_inputs(generated, shorter, prompts_only=True)


def test_a_missing_prompt_is_not_comparable(make_run: MakeRun) -> None:
    with pytest.raises(NotComparableError, match=r"prompt 1 has different tokens[\s\S]*b: absent \(1 prompts\)"):
        check_same_inputs(make_run("a", inputs([1], [2])), make_run("b", inputs([1])))


def test_different_weights_are_not_comparable_and_the_first_tensor_is_named(make_run: MakeRun) -> None:
    a = make_run("a", inputs([1], trainer={"x": "1", "y": "2", "z": "3"}))
    b = make_run("b", inputs([1], trainer={"x": "1", "y": "9"}))
    with pytest.raises(NotComparableError, match="the trainer ran with different weights") as caught:
        check_same_inputs(a, b)
    assert "2 tensors differ, first y: 2 and 9" in str(caught.value)
    for run in (a, b):
        assert f"{run.path}: {len(run.weights['trainer'])} tensors, digest " in str(caught.value)


def test_what_cannot_be_checked_is_returned_in_words(make_run: MakeRun) -> None:
    a = make_run("a", inputs([1], trainer={"x": "1"}, rollout={"x": "1"}))
    b = make_run("b", inputs([1], trainer={"x": "1"}))
    assert check_same_inputs(a, b) == (f"rollout weights: {b.path} records no digest",)
    c, d = make_run("c", inputs([1])), make_run("d", inputs([1]))
    assert check_same_inputs(c, d) == ("weights: neither run records a digest",)


def test_nullable_column_that_an_earlier_version_did_not_write_is_null(make_run: MakeRun) -> None:
    import pyarrow.parquet as pq

    run = make_run()
    path = run.path / "tokens.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["p_entropy"]), path)
    tokens = run.tokens()
    assert list(tokens.columns) == list(TABLES["tokens"].column_names)
    assert tokens["p_entropy"].isna().all() and tokens["p"].notna().all()
    assert run.tokens(["p_entropy"])["p_entropy"].isna().all()
    pq.write_table(pq.read_table(path).drop_columns(["position"]), path)
    with pytest.raises(InputError, match="column position is absent"):
        run.tokens()
