"""Files that are broken, and files that are large: clear errors, bounded memory, nothing executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from unit.rollouts.recorded import record, rows, write

from rpadiag.errors import InputError
from rpadiag.rollouts import files as reading
from rpadiag.rollouts.files import open_rollouts
from rpadiag.workflows.rollouts import RolloutsOptions, run_rollouts

RECORDED = record(num_sequences=30, num_tokens=20)


def read(path: Path) -> int:
    return sum(chunk.table.num_rows for chunk in open_rollouts([path]).chunks())


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        run_rollouts(RolloutsOptions(files=(path,)))
    return str(caught.value)


def test_truncated_parquet_is_named_as_such(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", rows(RECORDED, "rpadiag"))
    path.write_bytes(path.read_bytes()[:-20])
    assert "r.parquet: it is not a whole Parquet file" in refused(path)


def test_parquet_with_a_damaged_page_is_an_input_error(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", rows(RECORDED, "rpadiag"))
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    assert "r.parquet" in refused(path)


def test_jsonl_cut_in_the_middle_of_a_line_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows(RECORDED, "rpadiag"))
    path.write_bytes(path.read_bytes()[:-200])
    assert "r.jsonl, line 30 is not valid JSON" in refused(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 4: it is blank"),
        ("[1, 2]", "line 4 is a list, not an object"),
        (
            '{"token_ids": [1, 2], "trainer_logprobs": ["x"], "rollout_logprobs": [0.1]}',
            "line 4: trainer_logprobs is not what",
        ),
        (
            '{"token_ids": [1.5, 2], "trainer_logprobs": [-0.1], "rollout_logprobs": [-0.1]}',
            "line 4: token_ids is not what",
        ),
        ('{"token_ids": [1, 2], "trainer_logprobs": [-0.1]}', "record 4 has no rollout_logprobs"),
        ("\x1b[31m{", "line 4 is not valid JSON"),
        ("[" * 100_000, "line 4 is not valid JSON"),
    ],
)
def test_broken_line_is_an_error_that_names_it(line: str, message: str, tmp_path: Path) -> None:
    lines = [json.dumps(r) for r in rows(RECORDED, "rpadiag")]
    lines[3] = line
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines) + "\n")
    shown = refused(path)
    assert message in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ('"token_ids": [true, 6, 7]', "true is not a whole number"),
        ('"token_ids": [5, 10000000000, 7]', "holds 10000000000, which is no token id"),
        ('"token_ids": [5, -3000000000, 7]', "holds -3000000000, which is no token id"),
        (f'"token_ids": [5, {-(2**63)}, 7]', f"holds {-(2**63)}, which is no token id"),
    ],
)
def test_what_is_no_token_id_is_an_error_and_never_another_id(first: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text("{" + first + ', "rollout_logprobs": [-1, -2, -1], "trainer_logprobs": [-1, -2, -1]}\n')
    with pytest.raises(InputError) as caught:
        run_rollouts(RolloutsOptions(files=(path,), run=tmp_path / "run"))
    assert told in f"{caught.value} {caught.value.detail}" and caught.value.hint
    assert not list((tmp_path / "run").glob("*.parquet"))


def test_line_of_a_hundred_megabytes_is_an_error_before_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 4 << 20)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 20)
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"token_ids": [' + b"1," * (6 << 20) + b"1]}\n")
    assert "line 1 is longer than 4 MiB" in refused(path)


def test_line_longer_than_a_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.jsonl", rows(RECORDED, "prime-rl"))
    monkeypatch.setattr(reading, "BLOCK_BYTES", 100)
    assert read(path) == 30


def test_lines_typed_differently_from_the_first_are_read(tmp_path: Path) -> None:
    records = rows(RECORDED, "prime-rl")
    for r in records[1:]:
        r["loss_mask"] = [int(x) for x in r["loss_mask"]]
    assert read(write(tmp_path / "r.jsonl", records)) == 30


def test_nan_and_null_log_probabilities_are_counted_and_left_out(tmp_path: Path) -> None:
    records = rows(RECORDED, "rpadiag")
    records[0]["trainer_logprobs"][0] = None
    records[1]["rollout_logprobs"][0] = float("nan")
    result = run_rollouts(RolloutsOptions(files=(write(tmp_path / "r.jsonl", records),)))
    assert result.metrics["num_nonfinite"] == 2
    assert "2 tokens are left out" in " ".join(f.text for f in result.findings)


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("executed"),))  # type: ignore[return-value]


@pytest.mark.parametrize("ending", ["pt", "pkl"])
def test_pickled_file_is_refused_and_not_run(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"r.{ending}"
    path.write_bytes(pickle.dumps(_Runs()))
    assert "is pickled: reading it would run what it says" in refused(path)
    assert not (tmp_path / "executed").exists()


def test_empty_missing_and_other_files_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "nothing").mkdir()
    assert "is empty" in refused(tmp_path / "empty.jsonl")
    assert "does not exist" in refused(tmp_path / "missing.jsonl")
    assert "holds no .jsonl or .parquet file" in refused(tmp_path / "nothing")
    (tmp_path / "r.csv").write_text("a,b\n")
    assert "is neither .jsonl nor .parquet" in refused(tmp_path / "r.csv")


def test_file_without_trainer_log_probabilities_says_what_to_do(tmp_path: Path) -> None:
    records = [{k: v for k, v in r.items() if k != "trainer_logprobs"} for r in rows(RECORDED, "rpadiag")]
    shown = refused(write(tmp_path / "r.jsonl", records))
    assert "no log-probabilities of the trainer (column trainer_logprobs)" in shown


def test_file_in_which_no_token_counts_is_an_input_error(tmp_path: Path) -> None:
    records = rows(RECORDED, "prime-rl")
    for r in records:
        r["loss_mask"] = [False] * len(r["loss_mask"])
    assert "no token of" in refused(write(tmp_path / "r.jsonl", records))
