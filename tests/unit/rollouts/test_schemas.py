"""Every trainer's records, recognised and read to the same tokens and numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from unit.rollouts.recorded import record, rows, write

from rpadiag.errors import InputError, NotComparableError, UsageError
from rpadiag.rollouts.batch import lay_out
from rpadiag.rollouts.files import open_rollouts
from rpadiag.rollouts.schemas import BY_NAME, SCHEMAS

RECORDED = record(num_sequences=6, num_tokens=20)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", [s.name for s in SCHEMAS])
def test_schema_is_recognised_and_read_to_the_same_scored_tokens(name: str, ending: str, tmp_path: Path) -> None:
    files = open_rollouts([write(tmp_path / f"r.{ending}", rows(RECORDED, name))])
    assert (files.schema.name, files.has_trainer) == (name, True)
    (chunk,) = files.chunks()
    batch = lay_out(chunk, files.schema, first=10)
    assert batch.num_sequences == 6 and batch.misfits == () and batch.p is not None
    for i in range(6):
        mine = batch.row == i
        assert batch.ids[batch.starts[i] : batch.starts[i + 1]].tolist() == RECORDED.prompts[i] + RECORDED.responses[i]
        assert batch.num_prompt[i] == len(RECORDED.prompts[i])
        assert batch.token[mine].tolist() == RECORDED.responses[i]
        assert (batch.position[mine] == np.arange(len(RECORDED.responses[i])) + len(RECORDED.prompts[i])).all()
        assert np.array_equal(batch.p[mine], RECORDED.p[i]) and np.array_equal(batch.q[mine], RECORDED.q[i])


def test_padding_on_the_left_is_counted(tmp_path: Path) -> None:
    files = open_rollouts([write(tmp_path / "r.jsonl", rows(RECORDED, "trl"))])
    (chunk,) = files.chunks()
    batch = lay_out(chunk, files.schema, first=0)
    assert batch.padding.tolist() == [16 - len(p) for p in RECORDED.prompts]


def test_tokens_that_any_mask_leaves_out_are_not_scored(tmp_path: Path) -> None:
    records = rows(RECORDED, "trl")
    records[0]["tool_mask"][3:6] = [0, 0, 0]
    files = open_rollouts([write(tmp_path / "r.jsonl", records)])
    (chunk,) = files.chunks()
    batch = lay_out(chunk, files.schema, first=0)
    assert (batch.row == 0).sum() == len(RECORDED.responses[0]) - 3
    assert np.array_equal(batch.q[batch.row == 0], np.delete(RECORDED.q[0], [3, 4, 5]))


def test_sequence_without_weight_counts_no_token(tmp_path: Path) -> None:
    records = rows(RECORDED, "nemo-rl")
    records[2]["sample_loss_mask"] = [0.0]
    files = open_rollouts([write(tmp_path / "r.jsonl", records)])
    (chunk,) = files.chunks()
    assert not (lay_out(chunk, files.schema, first=0).row == 2).any()


def test_schema_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows(RECORDED, "prime-rl"))
    assert open_rollouts([path], schema="prime-rl").schema is BY_NAME["prime-rl"]
    with pytest.raises(UsageError, match=r"unknown schema: prime[\s\S]*known schemas: prime-rl, nemo-rl"):
        open_rollouts([path], schema="prime")
    with pytest.raises(InputError, match="lacks prompts, responses, rollout_log_probs of schema verl"):
        open_rollouts([path], schema="verl")


@pytest.mark.parametrize(
    ("record_", "what"),
    [
        ({"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 3}, "verl's rollout_data_dir"),
        ({"step": 1, "prompt": "a", "completion": "b", "advantage": 0.1}, "TRL's log_completions"),
        ({"input_prompt": "a", "output_response": "b", "score": 1}, "SkyRL's dumped evaluations"),
    ],
)
def test_dump_that_holds_text_alone_is_named_with_what_to_save(
    record_: dict[str, object], what: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        open_rollouts([write(tmp_path / "r.jsonl", [record_])])
    assert what in str(caught.value) and "docs/rollouts.md" in str(caught.value)


def test_unknown_columns_list_the_schemas(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_rollouts([write(tmp_path / "r.jsonl", [{"tokens_\x1b[31m": [1], "logprobs": [0.1]}])])
    assert "prime-rl: token_ids, inference_logprobs" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_files_of_different_trainers_are_not_comparable(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", rows(RECORDED, "trl"))
    b = write(tmp_path / "b.jsonl", rows(RECORDED, "verl"))
    with pytest.raises(NotComparableError, match="were not written alike"):
        open_rollouts([a, b])


def test_directory_stands_for_the_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    for rank in range(2):
        write(tmp_path / "step_1" / f"rank_{rank}.jsonl", rows(RECORDED, "prime-rl"))
    (tmp_path / "step_1" / "STABLE").touch()
    files = open_rollouts([tmp_path])
    assert [p.name for p in files.paths] == ["rank_0.jsonl", "rank_1.jsonl"]
    assert sum(c.table.num_rows for c in files.chunks()) == 12
