"""The journal of a bisection: whole forwards survive whatever ends the process, and only the same question goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpadiag.errors import InputError, NotComparableError
from rpadiag.runs import create_run, open_run
from rpadiag.runs.journal import Journal, journaled_run
from rpadiag.runs.reader import status_of

IDENTITY = {"options": {"replicates": 4, "seed": 0}, "tokens": ["aa", "bb"], "weights": "cc"}


def row(number: int) -> dict[str, Any]:
    return {
        "design": "each",
        "region": "rope",
        "kind": "ulp",
        "replicate": number,
        "seed": number,
        "logprobs": np.linspace(-3, 0, 7) / 3 + number,
    }


def start(where: Path, num: int, *, resume: bool = False, identity: dict[str, Any] = IDENTITY) -> list[int]:
    """Begin or resume, find what is there, add ``num`` forwards and leave by Ctrl-C; the replicates that were found."""
    found: list[int] = []

    def work() -> None:
        with journaled_run(where, command="bisect", options={}, resume=resume) as (_, journal):
            journal.bind(identity)
            found.extend(r["replicate"] for r in journal.rows())
            for n in range(len(found), len(found) + num):
                journal.append(row(n))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    return found


def test_interrupted_forwards_are_there_again_to_the_bit(tmp_path: Path) -> None:
    where = tmp_path / "run"
    start(where, 3)
    assert status_of(where) == "interrupted"
    with journaled_run(where, command="bisect", options={}, resume=True) as (run, journal):
        journal.bind(IDENTITY)
        found = list(journal.rows())
        assert [r["replicate"] for r in found] == [0, 1, 2]
        assert all(np.array_equal(r["logprobs"], row(r["replicate"])["logprobs"]) for r in found)
        journal.append(row(3))
        journal.copy_to(run)
    finished = open_run(where)
    table = finished.table("replicates").to_pylist()
    assert [r["replicate"] for r in table] == [0, 1, 2, 3]
    assert np.array_equal(table[2]["logprobs"], row(2)["logprobs"])
    assert not (where / "replicates").exists() and len(finished.manifest["resumed_utc"]) == 1


def test_resumed_twice_goes_on_where_it_was(tmp_path: Path) -> None:
    where = tmp_path / "run"
    assert start(where, 2) == []
    assert start(where, 2, resume=True) == [0, 1]
    assert start(where, 0, resume=True) == [0, 1, 2, 3]


def test_process_that_is_killed_keeps_its_forwards_and_never_looks_complete(tmp_path: Path) -> None:
    where = tmp_path / "run"
    code = (
        "import os, signal, sys; import numpy as np\n"
        "from rpadiag.runs.journal import journaled_run\n"
        f"with journaled_run({str(where)!r}, command='bisect', options={{}}) as (run, journal):\n"
        f"    journal.bind({IDENTITY!r})\n"
        "    for n in range(2):\n"
        "        journal.append({'design': 'each', 'region': 'rope', 'kind': 'ulp', 'replicate': n, 'seed': n, 'logprobs': np.zeros(3)})\n"
        "    (journal.path / '000002.parquet.part').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert status_of(where) == "started"
    with pytest.raises(InputError, match="is not complete"):
        open_run(where)
    assert start(where, 0, resume=True) == [0, 1]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"options": {"replicates": 8, "seed": 0}}, "options.replicates is not what it was"),
        ({"tokens": ["aa", "xx"]}, "tokens is not what it was"),
        ({"weights": "dd"}, "weights is not what it was"),
    ],
)
def test_another_question_is_refused_with_both_sides_and_the_forwards_stay(
    changed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    where = tmp_path / "run"
    start(where, 2)
    with pytest.raises(NotComparableError, match=says) as caught:
        with journaled_run(where, command="bisect", options={}, resume=True) as (_, journal):
            journal.bind(IDENTITY | changed)
    assert "its replicates: " in str(caught.value) and "now: " in str(caught.value)
    assert status_of(where) == "failed"
    assert start(where, 0, resume=True) == [0, 1]


def test_a_refusal_before_the_first_forward_leaves_nothing_and_one_after_it_the_forward(tmp_path: Path) -> None:
    def refused(where: Path, num_forwards: int) -> None:
        with journaled_run(where, command="bisect", options={}) as (_, journal):
            journal.bind(IDENTITY)
            for n in range(num_forwards):
                journal.append(row(n))
            raise InputError("no such region")

    for name, num_forwards in (("none", 0), ("one", 1)):
        with pytest.raises(InputError, match="no such region"):
            refused(tmp_path / name, num_forwards)
    assert not (tmp_path / "none").exists()
    assert status_of(tmp_path / "one") == "failed"
    assert start(tmp_path / "one", 0, resume=True) == [0]


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to resume"):
        with journaled_run(tmp_path / "run", command="bisect", options={}, resume=True):
            pass
    assert not (tmp_path / "run").exists()


def test_complete_run_and_run_of_another_command_are_not_resumed(tmp_path: Path) -> None:
    with journaled_run(tmp_path / "done", command="bisect", options={}):
        pass
    before = (tmp_path / "done" / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="complete already"):
        with journaled_run(tmp_path / "done", command="bisect", options={}, resume=True):
            pass
    assert (tmp_path / "done" / "manifest.json").read_bytes() == before
    with pytest.raises(KeyboardInterrupt), create_run(tmp_path / "other", command="compare", options={}):
        raise KeyboardInterrupt
    with pytest.raises(InputError, match="cannot be resumed by rpadiag bisect"):
        with journaled_run(tmp_path / "other", command="bisect", options={}, resume=True):
            pass


def test_run_that_another_process_is_writing_is_not_resumed_and_not_touched(tmp_path: Path) -> None:
    where = tmp_path / "run"
    with journaled_run(where, command="bisect", options={}) as (run, _):
        run.add_prompts([{"prompt": 0, "num_prompt_tokens": 2, "token_ids": [1, 2]}])
        before = sorted(p.name for p in where.iterdir())
        with pytest.raises(InputError, match="is being written by another process"):
            with journaled_run(where, command="bisect", options={}, resume=True):
                pass
        assert sorted(p.name for p in where.iterdir()) == before and status_of(where) == "started"
    assert len(open_run(where).prompts()) == 1


def test_damaged_forward_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    where = tmp_path / "run"
    start(where, 2)
    (where / "replicates" / "000001.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match=r"cannot read .*000001\.parquet"):
        with journaled_run(where, command="bisect", options={}, resume=True) as (_, journal):
            list(journal.rows())


def test_full_disk_while_writing_a_forward_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "run"

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    def work() -> None:
        with journaled_run(where, command="bisect", options={}) as (_, journal), monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            journal.append(row(0))

    with pytest.raises(InputError, match="No space left on device"):
        work()
    assert start(where, 0, resume=True) == []
    assert json.loads((where / "manifest.json").read_text())["status"] == "interrupted"


def test_journal_alone_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write run"), Journal(tmp_path / "none"):
        pass
