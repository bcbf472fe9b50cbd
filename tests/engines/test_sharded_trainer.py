"""The trainer's weights cut over two processes, and prompts divided over them: the same numbers as one process gives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, make_checkpoint

from rpadiag.engines.bundle import open_bundle
from rpadiag.errors import InputError
from rpadiag.runs import open_run
from rpadiag.sites import split_site

EMULATED = ("--rollout", "emulated", "--emulate", "vllm-eager", "--device", "cpu")


def torchrun(*arguments: str | Path, num: int = 2, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """``torchrun -m -- rpadiag ...``; without the two dashes torchrun takes --run for an abbreviation of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num), "-m", "--", "rpadiag"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )


def environment() -> dict[str, str]:
    """One thread a process, as one process alone has here: the split of a matrix product decides the order of its sum."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def alone(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rpadiag", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment(), check=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ranks")
    make_checkpoint(home / "model", "qwen3")
    (home / "prompts.txt").write_text(PROMPTS)
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A comparison by one process alone."""
    done = alone("compare", home / "model", home / "prompts.txt", "--run", home / "whole", *EMULATED)
    assert done.returncode == 0, done.stderr
    return home / "whole"


def captured(home: Path, name: str, *how: str) -> Path:
    arguments = ("capture", home / "model", home / "prompts.txt", "--engine", "trainer", "--device", "cpu")
    done = (torchrun if how else alone)(*arguments, "--bundle", home / name, *how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bundle:") == 1  # rank 0 alone answers
    return home / name


def test_fsdp_is_the_unsharded_trainer_to_the_bit_and_tensor_parallelism_first_differs_where_it_sums(
    home: Path,
) -> None:
    one = open_bundle(captured(home, "alone"))
    for sharding in ("fsdp", "tp"):
        two = open_bundle(captured(home, sharding, "--shard", sharding))
        assert two.meta["weights"] == one.meta["weights"]
        assert two.meta["sharding"] == {"by": sharding, "num_ranks": 2}
        for index in range(len(one)):
            a, b = one.capture(index), two.capture(index)
            assert a.sites == b.sites
            differing = [s for s in a.sites if not torch.equal(a.read(s), b.read(s))]
            assert [split_site(s) for s in differing[:1]] == ([] if sharding == "fsdp" else [(0, "o")])
            assert all(a.read(s).shape == b.read(s).shape for s in a.sites)


@pytest.mark.parametrize("sharding", ["fsdp", "tp"])
def test_local_divergence_of_a_sharded_trainer_is_that_of_the_unsharded(
    home: Path, whole: Path, sharding: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = torchrun("compare", home / "model", home / "prompts.txt", "--run", run, *EMULATED, "--shard", sharding)
    assert done.returncode == 0, done.stderr
    a, b = open_run(whole), open_run(run)
    assert b.manifest["trainer"]["sharding"]["num_ranks"] == 2
    x, y = (r.sites().set_index(["prompt", "precision", "source", "site"]).sort_index() for r in (a, b))
    same = x["local_num_differing"].eq(y["local_num_differing"]) | x["local_num_differing"].isna()
    if sharding == "fsdp":
        assert same.all() and a.metrics == b.metrics and a.verdict == b.verdict
    else:
        points = set(y[~same].reset_index()["point"])
        assert points <= {"o", "down"}, points
        assert b.verdict["kind"] == "rounding only"


def test_prompts_divided_over_ranks_give_the_run_of_one_process(home: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = torchrun("compare", home / "model", home / "prompts.txt", "--run", run, *EMULATED)
    assert done.returncode == 0, done.stderr
    a, b = open_run(whole), open_run(run)
    assert [p.name for p in sorted((run / "tokens.parquet").iterdir())] == ["part-00000.parquet", "part-00001.parquet"]
    for table in ("prompts", "tokens", "sites"):
        assert a.table(table).equals(b.table(table)), table
    assert (a.metrics, a.verdict, a.findings) == (b.metrics, b.verdict, b.findings)
    assert a.manifest["tokens"] == b.manifest["tokens"] and a.manifest["tables"] == b.manifest["tables"]
    assert not (run / "scratch").exists()


def test_more_processes_than_prompts_end_with_one_clear_message(home: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("A single prompt for two processes.\n")
    done = torchrun("compare", home / "model", tmp_path / "one.txt", "--run", tmp_path / "run", *EMULATED)
    assert done.returncode != 0
    assert "1 prompts cannot be divided over 2 processes" in done.stderr
    with pytest.raises(InputError):
        open_run(tmp_path / "run")


def test_heads_that_do_not_divide_are_refused_on_every_rank(home: Path, tmp_path: Path) -> None:
    arguments = ("capture", home / "model", home / "prompts.txt", "--engine", "trainer", "--device", "cpu")
    done = torchrun(*arguments, "--bundle", tmp_path / "b", "--shard", "tp", num=3)
    assert done.returncode != 0
    assert "4 heads do not divide by 3 ranks" in done.stderr and "--shard fsdp" in done.stderr


def test_sharding_without_torchrun_is_a_usage_error(home: Path, tmp_path: Path) -> None:
    done = alone("compare", home / "model", home / "prompts.txt", "--run", tmp_path / "r", *EMULATED, "--shard", "tp")
    assert done.returncode == 2
    assert "--shard tp cuts the trainer over several processes" in done.stderr and "torchrun" in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_killed_rank_ends_the_others_and_leaves_no_whole_looking_run(home: Path, tmp_path: Path) -> None:
    """Ranks started by hand, so that nobody but rpadiag itself ends the one that is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = tmp_path / "run"
    ranks = []
    for rank in (0, 1):
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "rpadiag", "compare", home / "model", home / "prompts.txt", "--run", run, *EMULATED],
                env={**environment(), **{k: str(v) for k, v in variables.items()}}, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    part = run / "scratch" / "ranks" / "rank-00001" / "manifest.json"
    began = time.monotonic()
    while not part.exists() and time.monotonic() - began < 600:
        time.sleep(0.1)
    ranks[1].send_signal(signal.SIGKILL)
    _, said = ranks[0].communicate(timeout=600)
    ranks[1].communicate(timeout=10)
    assert ranks[0].returncode == 2, said
    assert "rank 0 lost the others: one of 2 ranks has ended" in said
    with pytest.raises(InputError, match="not complete"):
        open_run(run)
