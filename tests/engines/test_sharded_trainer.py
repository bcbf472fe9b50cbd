"""The trainer's weights cut over two processes, and prompts divided over them: the same numbers as one process gives."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, make_checkpoint

from rpadiag.cli.app import run as rpadiag
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.ranks import Ranks
from rpadiag.errors import EngineError, InputError
from rpadiag.runs import create_run, open_run
from rpadiag.sites import split_site
from rpadiag.workflows.sharding import beside_rank_0, path_of_part

EMULATED = ("--rollout", "emulated", "--emulate", "vllm-eager", "--device", "cpu")
IN_TURN = Path(__file__).with_name("commands_in_turn.py")
CAPTURES = {"captured-fsdp": "fsdp", "captured-tp": "tp"}
COMPARISONS = {"compared-fsdp": "fsdp", "compared-tp": "tp"}


def torchrun(*arguments: str | Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """``torchrun ...`` with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)


def environment() -> dict[str, str]:
    """One thread a process, as one process alone has here: the split of a matrix product decides the order of its sum."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def free_ports(num: int) -> list[int]:
    """Different ports of this host that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """What this process computes alone is computed as one rank computes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ranks")
    make_checkpoint(home / "model", "qwen3")
    make_checkpoint(home / "three-heads", "qwen3", num_attention_heads=3, num_key_value_heads=3)
    (home / "prompts.txt").write_text(PROMPTS)
    (home / "one.txt").write_text("A single prompt for two processes.\n")
    return home


def compare(home: Path, run: Path, *how: str, prompts: str = "prompts.txt") -> list[str]:
    return ["compare", str(home / "model"), str(home / prompts), "--run", str(run), *EMULATED, *how]


def capture(home: Path, bundle: Path, *how: str, model: str = "model") -> list[str]:
    given = (str(home / model), str(home / "prompts.txt"), "--engine", "trainer", "--device", "cpu")
    return ["capture", *given, "--bundle", str(bundle), *how]


@pytest.fixture(scope="module")
def whole(home: Path, one_thread: None) -> Path:
    """A comparison by one process alone."""
    assert rpadiag(compare(home, home / "whole")) == 0
    return home / "whole"


@dataclass(frozen=True)
class Done:
    """A command in two ranks: its exit codes, and what each rank said."""

    codes: list[int]
    out: list[str]
    err: list[str]


@pytest.fixture(scope="module")
def done(home: Path) -> dict[str, Done]:
    """Commands by name, one after another in the same two ranks."""
    commands = {name: capture(home, home / name, "--shard", how) for name, how in CAPTURES.items()}
    commands |= {name: compare(home, home / name, "--shard", how) for name, how in COMPARISONS.items()}
    commands["one prompt"] = compare(home, home / "one", prompts="one.txt")
    commands["three heads"] = capture(home, home / "three", "--shard", "tp", model="three-heads")
    where = home / "in-turn"
    where.mkdir()
    (where / "commands.json").write_text(
        json.dumps(list(zip(free_ports(len(commands)), commands.values(), strict=True)))
    )
    ran = torchrun(IN_TURN, where)
    assert ran.returncode == 0, ran.stderr

    def read(number: int, kind: str) -> list[str]:
        return [(where / f"{number}-{rank}.{kind}").read_text() for rank in (0, 1)]

    return {
        name: Done(codes=[int(c) for c in read(n, "code")], out=read(n, "out"), err=read(n, "err"))
        for n, name in enumerate(commands)
    }


def test_fsdp_is_the_unsharded_trainer_to_the_bit_and_tensor_parallelism_first_differs_where_it_sums(
    home: Path, done: dict[str, Done], one_thread: None
) -> None:
    assert rpadiag(capture(home, home / "captured")) == 0
    one = open_bundle(home / "captured")
    for name, sharding in CAPTURES.items():
        assert done[name].codes == [0, 0], done[name].err
        assert "bundle:" in done[name].out[0] and done[name].out[1] == ""  # rank 0 alone answers
        two = open_bundle(home / name)
        assert two.meta["weights"] == one.meta["weights"]
        assert two.meta["sharding"] == {"by": sharding, "num_ranks": 2}
        for index in range(len(one)):
            a, b = one.capture(index), two.capture(index)
            assert a.sites == b.sites
            differing = [s for s in a.sites if not torch.equal(a.read(s), b.read(s))]
            assert [split_site(s) for s in differing[:1]] == ([] if sharding == "fsdp" else [(0, "o")])
            assert all(a.read(s).shape == b.read(s).shape for s in a.sites)


@pytest.mark.parametrize("name", COMPARISONS)
def test_local_divergence_of_a_sharded_trainer_is_that_of_the_unsharded(
    home: Path, done: dict[str, Done], whole: Path, name: str
) -> None:
    assert done[name].codes == [0, 0], done[name].err
    a, b = open_run(whole), open_run(home / name)
    assert b.manifest["trainer"]["sharding"]["num_ranks"] == 2
    x, y = (r.sites().set_index(["prompt", "precision", "source", "site"]).sort_index() for r in (a, b))
    same = x["local_num_differing"].eq(y["local_num_differing"]) | x["local_num_differing"].isna()
    if COMPARISONS[name] == "fsdp":
        assert same.all() and a.metrics == b.metrics and a.verdict == b.verdict
    else:
        points = set(y[~same].reset_index()["point"])
        assert points <= {"o", "down"}, points
        assert b.verdict["kind"] == "rounding only"


def test_prompts_divided_over_ranks_give_the_run_of_one_process(home: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = torchrun(
        "-m", "--", "rpadiag", *compare(home, run)
    )  # torchrun takes --run for its own without the two dashes
    assert done.returncode == 0, done.stderr
    a, b = open_run(whole), open_run(run)
    assert [p.name for p in sorted((run / "tokens.parquet").iterdir())] == ["part-00000.parquet", "part-00001.parquet"]
    for table in ("prompts", "tokens", "sites"):
        assert a.table(table).equals(b.table(table)), table
    assert (a.metrics, a.verdict, a.findings) == (b.metrics, b.verdict, b.findings)
    assert a.manifest["tokens"] == b.manifest["tokens"] and a.manifest["tables"] == b.manifest["tables"]
    assert not (run / "scratch").exists()


def test_more_processes_than_prompts_end_with_one_clear_message(home: Path, done: dict[str, Done]) -> None:
    one = done["one prompt"]
    assert one.codes == [2, 2]
    assert one.err[0] == one.err[1] and one.err[0].startswith("error: 1 prompt cannot be divided over 2 processes\n")
    assert not (home / "one").exists()


def test_rank_whose_directory_rank_0_took_away_says_so_and_any_other_error_is_its_own(tmp_path: Path) -> None:
    ranks = [Ranks(rank=n, size=2, device="cpu", commands=None) for n in (0, 1)]
    part = path_of_part(tmp_path / "run", 1)
    with create_run(part, command="compare", options={}) as run:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(EngineError, match="rank 1 lost rank 0, which has ended"), beside_rank_0(ranks[1]):
            run.set_effective(device="cpu")
        with pytest.raises(EngineError, match="rank 1 lost rank 0"), beside_rank_0(ranks[1]):
            (part / "scratch").mkdir()
        with pytest.raises(InputError, match="cannot write run"), beside_rank_0(ranks[0]):
            run.set_effective(device="cpu")
        with pytest.raises(FileNotFoundError), beside_rank_0(ranks[1]):
            (tmp_path / "other" / "file").read_text()
        part.mkdir(parents=True)


def test_heads_that_do_not_divide_are_refused_on_every_rank(done: dict[str, Done]) -> None:
    three = done["three heads"]
    assert 0 not in three.codes
    assert "3 heads do not divide by 2 ranks" in three.err[0] and "--shard fsdp" in three.err[0]


def test_sharding_without_torchrun_is_a_usage_error(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rpadiag(compare(home, tmp_path / "r", "--shard", "tp")) == 2
    said = capsys.readouterr().err
    assert "--shard tp cuts the trainer over several processes" in said and "torchrun" in said
    assert not (tmp_path / "r").exists()


def test_a_killed_rank_ends_the_others_and_leaves_no_whole_looking_run(home: Path, tmp_path: Path) -> None:
    """Ranks started by hand, so that nobody but rpadiag itself ends the one that is left."""
    (port,) = free_ports(1)
    run = tmp_path / "run"
    ranks = []
    for rank in (0, 1):
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "rpadiag", *compare(home, run)],
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
