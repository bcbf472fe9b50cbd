"""examples/rl without an engine: what it refuses, with an error that says what to do, and what a killed run may leave behind."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import threading
from pathlib import Path
from typing import Any

import arguments
import directory
import figure
import models
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regime
import sweep
import table


def row(arm: str, number: int, reward: float | None = 0.5) -> dict[str, Any]:
    """A round with what no row is without."""
    return {
        "model": "qwen3-s", "engine": "eager", "learning_rate": 5e-5, "arm": arm, "seed": 0, "round": number, "reward": reward,
        **dict.fromkeys(figure.COST, 1.0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("learning_rate=-1", "at least 0"), ("learning_rate=nan", "a finite number"), ("learning_rate=1e999", "a finite number"),
        ("group_size=1", "at least 2"), ("num_minibatches=0", "at least 1"), ("rounds=-3", "at least 1"), ("parts_replicates=1", "at least 2"),
        ("temperature=0", "above 0"), ("adam_beta1=1", "below 1"), ("length=huge", "one of short, long"), ("loss_type=ppo", "one of grpo"),
        ("scale_rewards=yes", "one of group, batch, none"),
    ],
)  # fmt: skip
def test_value_that_no_training_can_have_is_refused_with_what_it_may_be(given: str, hint: str) -> None:
    name, _, _ = given.partition("=")
    with pytest.raises(SystemExit, match=rf"error: {name} cannot be .*\nhint: .*{hint}"):
        regime.regime_of("calm", [given])


def test_files_and_rows_that_are_no_table_of_steps_are_refused(tmp_path: Path) -> None:
    def refused(words: str, *paths: Path) -> None:
        with pytest.raises(SystemExit, match=rf"error: .*{words}.*\nhint: "):
            figure.read_runs(paths)

    path = tmp_path / "steps.parquet"
    refused("cannot be read", path)
    path.write_text("hello", encoding="utf-8")
    refused("cannot be read", path)
    pq.write_table(pa.table({"reward": [1.0]}), path)
    refused("schema version None", path)
    short = table.SCHEMA.empty_table().drop_columns(["ess"])
    text = json.dumps({"schema_version": table.SCHEMA_VERSION}).encode()
    pq.write_table(short.replace_schema_metadata({table.KEY: text}), path)
    refused("other columns than schema version 2: ess", path)
    for words, rows in (
        ("holds no round", []),
        ("rows without reward", [row("bf16", 0, reward=None)]),
        ("unknown arm 'mine'", [row("mine", 0)]),
        ("seed 0 twice", [row("bf16", 0), row("bf16", 0)]),
    ):
        table.write_table(path, rows, {})
        refused(words, path)


def test_runs_of_a_later_file_replace_those_before_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, reward in (("old", 0.1), ("new", 0.9)):
        table.write_table(tmp_path / name, [row("bf16", n, reward=reward) for n in range(3)], {})
    runs = figure.read_runs([tmp_path / "old", tmp_path / "new"])
    assert [r["reward"] for rounds in runs.values() for r in rounds] == [0.9] * 3
    assert capsys.readouterr().err == f"{tmp_path / 'new'} replaces 1 runs of files before it\n"


def test_cost_is_told_within_a_file_and_not_across_files(tmp_path: Path) -> None:
    rows = {arm: [row(arm, n) for n in range(4)] for arm in ("bf16", "rope")}
    table.write_table(tmp_path / "both", rows["bf16"] + rows["rope"], {})
    for arm in rows:
        table.write_table(tmp_path / arm, rows[arm], {})
    setting = figure.setting_of(rows["bf16"][0])
    assert figure.cost_ratio(figure.read_runs([tmp_path / "both"]), setting, "rope") == (1.0, 1.0, 1.0)
    assert figure.cost_ratio(figure.read_runs([tmp_path / "bf16", tmp_path / "rope"]), setting, "rope") is None


def asked(**given: Any) -> argparse.Namespace:
    usual = {
        "models": ["qwen3-micro"], "arms": ["bf16"], "seeds": [0], "preset": "micro", "set": [], "engine": "eager", "contract": None,
        "processes": 2, "seconds": 400.0, "stop_after": None, "out": Path("nowhere"),
    }  # fmt: skip
    return argparse.Namespace(**(usual | given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"models": ["qwen9"]}, "unknown model 'qwen9'"), ({"arms": ["bf8"]}, "unknown arm 'bf8'"), ({"seeds": [-1]}, "seed cannot be -1"),
        ({"processes": 0}, "--processes cannot be 0"), ({"seconds": math.nan}, "--seconds cannot be nan"),
        ({"stop_after": 0}, "--stop-after cannot be 0"), ({"contract": "vllm-cpu"}, "--contract is for the arm engine"),
        ({"contract": "no.json", "arms": ["engine"]}, "cannot read the contract file no.json"),
        ({"contract": "vllm-gpu", "arms": ["engine"]}, "unknown contract preset: vllm-gpu"),
    ],
)  # fmt: skip
def test_sweep_refuses_what_no_run_can_be_made_of_before_it_starts_one(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SystemExit, match=rf"(?s)error: {words}.*\nhint: "):
        sweep.checked_runs(asked(**given))


def test_contract_is_part_of_the_runs_that_follow_the_engine_and_of_no_other(tmp_path: Path) -> None:
    (run,) = sweep.checked_runs(asked(out=tmp_path))
    run.directory.mkdir()
    table.write_table(run.directory / "steps.parquet", [row("bf16", 0)], {})
    spec = directory.Spec(model="qwen3-micro", arm="bf16", seed=0, preset="micro")
    (run.directory / "run.json").write_text(json.dumps(spec.to_dict()), encoding="utf-8")
    both = {"arms": ["bf16", "engine"], "out": tmp_path}
    assert len(sweep.checked_runs(asked(contract="vllm-cpu", **both))) == 2
    _, engine = sweep.checked_runs(asked(**both))
    engine.directory.mkdir()
    table.write_table(engine.directory / "steps.parquet", [row("engine", 0)], {})
    (engine.directory / "run.json").write_text(
        json.dumps(spec.to_dict() | {"arm": "engine", "contract": "vllm-cpu"}), encoding="utf-8"
    )
    assert len(sweep.checked_runs(asked(contract="vllm-cpu", **both))) == 2
    with pytest.raises(SystemExit, match="holds another run"):
        sweep.checked_runs(asked(**both))


def test_contract_without_all_regions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text('{"regions": {"rope": {}}}', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"says nothing about swiglu, rmsnorm\nhint: "):
        arguments.check_contract(str(path))


def test_lists_of_names_have_no_spaces_no_repeats_and_are_not_empty() -> None:
    assert sweep._listed("bf16, rope,bf16") == ["bf16", "rope"] and sweep._seeds("1,0") == [1, 0]
    for text, read in (("", sweep._listed), (",", sweep._listed), ("a", sweep._seeds)):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_sweep_refuses_a_directory_with_rounds_of_another_run_but_not_one_that_came_to_none(tmp_path: Path) -> None:
    run = tmp_path / "qwen3-micro-bf16-s0"
    run.mkdir()
    other = directory.Spec(model="qwen3-micro", arm="bf16", seed=0, preset="calm")
    (run / "run.json").write_text(json.dumps(other.to_dict()), encoding="utf-8")
    assert [r.name for r in sweep.checked_runs(asked(out=tmp_path))] == [run.name]
    (run / "steps.parquet").write_text("cut short", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"holds another run\n.*'preset': .'calm', 'micro'"):
        sweep.checked_runs(asked(out=tmp_path))
    with pytest.raises(SystemExit, match=r"steps.parquet cannot be read: .*\nhint: delete its directory"):
        sweep.checked_runs(asked(out=tmp_path, preset="calm"))


def test_one_process_at_a_time_trains_in_a_directory(tmp_path: Path) -> None:
    with (
        directory.alone_in(tmp_path),
        pytest.raises(SystemExit, match="another process trains in"),
        directory.alone_in(tmp_path),
    ):
        pass
    with directory.alone_in(tmp_path):
        pass


def test_runs_after_the_last_checkpoint_of_a_killed_training_are_dropped(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000009", "step-000013", "step-000013-2"):
        (tmp_path / name).mkdir()
    directory.drop_runs_after(12, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000009"]


def test_status_that_is_cut_short_is_named(tmp_path: Path) -> None:
    (run,) = sweep.plan(["qwen3-micro"], ["bf16"], [0], tmp_path)
    run.directory.mkdir()
    (run.directory / "status.json").write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"error: cannot read .*status.json.*\nhint: delete it"):
        run.status()


def test_checkpoint_that_is_cut_short_is_named(tmp_path: Path) -> None:
    for name in ("made.json", "config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(SystemExit, match=r"is broken: .*\nhint: delete it"):
        models.check_checkpoint(tmp_path)


def test_run_whose_process_is_gone_is_interrupted_and_one_that_trains_is_not(tmp_path: Path) -> None:
    (run,) = sweep.plan(["qwen3-micro"], ["bf16"], [0], tmp_path)
    run.directory.mkdir()
    (run.directory / "status.json").write_text('{"status": "started", "rounds": 3}', encoding="utf-8")
    assert run.status() == {"status": "interrupted", "rounds": 3}
    with directory.alone_in(run.directory):
        assert run.status()["status"] == "started"
    assert run.status()["status"] == "interrupted"


def test_a_glance_at_the_lock_keeps_no_run_from_starting(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        threading.Timer(0.15, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        with directory.alone_in(tmp_path):
            assert directory.is_taken(tmp_path)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("a\nerror: no such thing\nhint: give one\n\n", "error: no such thing; hint: give one"),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried\n[rank0]:[W1] Warning: leak\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried; hint: fewer --processes",
        ),
        ("ValueError: 1\nduring which\nKeyError: 2\n", "KeyError: 2"),
        ("Traceback\nAssertionError\n[rank0]: done\n", "AssertionError"),
        ("a\nwarning: b\n", "warning: b"),
    ],
)
def test_what_stopped_a_run_is_said_and_not_what_its_libraries_said_last(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "log").write_text(log, encoding="utf-8")
    assert sweep._last_line(tmp_path / "log") == said


def test_determinism_is_strict_inside_and_as_it_was_afterwards_even_after_an_error() -> None:
    pytest.importorskip("trl")
    import torch
    from trainer import deterministic

    def now() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )

    def fail_inside() -> None:
        with deterministic(True):
            assert now() == (True, False, False)
            with deterministic(False):
                assert now() == (False, False, False)
            assert now() == (True, False, False)
            raise ValueError("inside")

    before = now()
    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert now() == before
