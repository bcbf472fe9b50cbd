"""What a run directory holds after success, failure, interruption, a full disk and kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpadiag.errors import InputError
from rpadiag.findings import Finding
from rpadiag.runs import Run, RunWriter, create_run, open_run, token_digest, weights_digest
from rpadiag.runs.writer import ROWS_PER_GROUP

MakeRun = Callable[..., Run]


def start(path: Path) -> RunWriter:
    return create_run(path, command="compare", options={})


def token_columns(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "prompt": np.zeros(n, np.int32),
        "position": np.arange(n, dtype=np.int32),
        "token": np.arange(n, dtype=np.int32),
        "source": ["prefill"] * n,
        "p": rng.standard_normal(n).astype(np.float32),
    }


def status(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["status"])


def test_a_run_reads_back_as_it_was_written(make_run: MakeRun) -> None:
    run = make_run()
    tokens = run.tokens()
    assert tokens["token"].tolist() == [6, 7, 8, 10]
    assert tokens["p"].tolist() == [-1.5] * 4 and str(tokens["p"].dtype) == "float32"
    assert tokens["text"].tolist() == ["<script>"] * 4
    prompts = run.prompts()
    assert prompts["num_tokens"].tolist() == [4, 2]
    assert [list(ids) for ids in prompts["token_ids"]] == [[5, 6, 7, 8], [9, 10]]
    assert prompts["token_digest"].tolist() == [token_digest([5, 6, 7, 8]), token_digest([9, 10])]
    sites = run.sites()
    assert sites["layer"].iloc[0] == 3 and sites["layer"].isna().tolist() == [False, True]
    assert sites["local_differing"].isna().tolist() == [False, True]
    assert list(sites["ulp_hist"].iloc[0])[:2] == [0, 64]
    assert run.attribution()["detectable"].tolist() == [True]
    assert [f["code"] for f in run.findings] == ["first", "second"]
    assert run.verdict is not None and run.verdict["kind"] == "rounding only"
    assert run.metrics == {"logprob": {"all": {"kl": 0.25, "chi2_seq": None}}, "floors": []}
    assert run.weights["rollout"]["model.norm.weight"] == "aa"
    assert not list(run.path.glob("*.part"))


def test_manifest_records_what_the_run_needs_to_be_understood(make_run: MakeRun) -> None:
    manifest = make_run().manifest
    assert manifest["status"] == "complete" and manifest["command"] == "compare"
    assert manifest["options"] == {"given": {"seed": 0}, "effective": {"seed": 0}}
    assert manifest["tables"] == {"prompts": 2, "tokens": 4, "sites": 2, "attribution": 1}
    assert manifest["tokens"]["num_sequences"] == 2
    assert manifest["weights"]["trainer"]["num_tensors"] == 2
    assert manifest["packages"]["pyarrow"] and manifest["packages"]["numpy"]
    assert manifest["devices"]["cpu"]["num_cores"] >= 1
    assert set(manifest["numerics"]) >= {"environment"}
    assert manifest["started_utc"] <= manifest["ended_utc"] and manifest["wall_s"] >= 0


def test_manifest_names_no_machine_user_or_path_that_was_not_given(make_run: MakeRun) -> None:
    run = make_run()
    text = "".join(f.read_text() for f in run.path.glob("*.json"))
    for private in (str(Path.home()), str(run.path.parent), str(Path.cwd()), f'"{os.uname().nodename}"'):
        assert private == "/" or private not in text


def test_a_path_that_the_user_gave_stays_as_given(tmp_path: Path) -> None:
    with create_run(tmp_path / "run", command="compare", options={"model": Path("../models/tiny")}):
        pass
    assert open_run(tmp_path / "run").manifest["options"]["effective"]["model"] == "../models/tiny"


def test_git_state_is_that_of_the_current_directory_and_absent_outside_a_repository(tmp_path: Path) -> None:
    code = "import json; from rpadiag.runs.manifest import git_state; print(json.dumps(git_state()))"

    def state(where: Path) -> Any:
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, env=environment)
        return json.loads(done.stdout)

    assert state(tmp_path) is None
    repo = tmp_path / "repo"
    repo.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repo)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert state(repo) is None  # no commit yet
    (repo / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    clean = state(repo)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (repo / "f").write_text("2")
    assert state(repo) == {"commit": clean["commit"], "dirty": True}


def test_torch_flags_are_recorded_when_torch_is_loaded_and_torch_is_not_loaded_for_it(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
        import sys
        from rpadiag.runs.manifest import numerics_flags
        assert "torch" not in numerics_flags() and "torch" not in sys.modules
        import torch
        torch.set_float32_matmul_precision("high")
        print(numerics_flags()["torch"]["float32_matmul_precision"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.stdout.strip() == "high", done.stderr


def test_status_is_started_while_the_work_is_running_and_such_a_run_is_refused(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.add_tokens(token_columns(3))
        assert status(run.path) == "started"
        with pytest.raises(InputError, match="not complete: its status is started"):
            open_run(run.path)
    assert status(tmp_path / "run") == "complete"


def test_an_exception_leaves_status_failed_with_its_reason_and_no_tables(tmp_path: Path) -> None:
    def work() -> None:
        with start(tmp_path / "run") as run:
            run.add_tokens(token_columns(ROWS_PER_GROUP + 1))
            (run.scratch_dir() / "bundle.bin").write_bytes(b"x" * 100)
            raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError):
        work()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.json"]
    with pytest.raises(InputError, match=r"status is failed\nended .* with ZeroDivisionError: by nothing"):
        open_run(tmp_path / "run")


def test_ctrl_c_leaves_status_interrupted(tmp_path: Path) -> None:
    child = _child(tmp_path / "run", "print('ready', flush=True); time.sleep(60)")
    child.send_signal(signal.SIGINT)
    child.wait(30)
    assert status(tmp_path / "run") == "interrupted"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.json"]
    with pytest.raises(InputError, match="status is interrupted"):
        open_run(tmp_path / "run")


def test_kill_9_leaves_status_started_and_the_run_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    child = _child(tmp_path / "run", "print('ready', flush=True); time.sleep(60)")
    child.kill()
    child.wait(30)
    with pytest.raises(InputError, match=r"status is started\n.*still running, or its process was killed"):
        open_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"exists\nit holds a run with status started"):
        start(tmp_path / "run")


def _child(path: Path, body: str) -> subprocess.Popen[str]:
    """A process that writes more than a row group into a run, then does ``body``; returned once it says ready."""
    code = f"""
        import time, numpy as np
        from rpadiag.runs import create_run
        n = {ROWS_PER_GROUP + 10}
        with create_run({str(path)!r}, command="compare", options={{}}) as run:
            run.add_tokens(dict(prompt=np.zeros(n, int), position=np.arange(n), token=np.arange(n), source=["prefill"] * n))
            {body}
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    assert (path / "tokens.parquet.part").exists()
    return child


# -- places that cannot be used ------------------------------------------------------------------------


def test_a_directory_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"run directory .* exists\nit is not empty\nhint: name another directory"):
        start(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_complete_run_is_refused_and_left_alone(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(InputError, match="it holds a run with status complete"):
        start(run.path)
    assert open_run(run.path).manifest == run.manifest


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for where in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with start(where):
            pass
        assert status(where) == "complete"


def test_a_file_in_the_way_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        start(tmp_path / "file")
    with pytest.raises(InputError, match="Not a directory"):
        start(tmp_path / "file" / "run")


def test_a_parent_that_cannot_be_written_is_an_input_error() -> None:
    code = """
        import os, sys
        from rpadiag.errors import InputError
        from rpadiag.runs import create_run
        if os.getuid() == 0:
            os.setuid(65534)  # permissions do not hold root back
        try:
            create_run(sys.argv[1], command="compare", options={})
        except InputError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory() as outer:  # pytest's own directory is closed to other users
        os.chmod(outer, 0o755)
        locked = Path(outer) / "locked"
        locked.mkdir(mode=0o555)
        command = [sys.executable, "-c", textwrap.dedent(code), str(locked / "run")]
        done = subprocess.run(command, capture_output=True, text=True)
    assert "Permission denied" in done.stdout, done.stderr
    assert "hint: choose a directory you can write to" in done.stdout


@pytest.mark.parametrize("limit", [0, 100, 3_000, 20_000, 60_000])
def test_a_disk_that_fills_up_at_any_point_is_an_input_error_and_the_run_is_refused(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE stops every file at ``limit`` bytes, as a full disk or a quota would."""
    path = tmp_path / "run"
    code = f"""
        import resource, signal
        from pathlib import Path
        import numpy as np, pyarrow.parquet
        from rpadiag.errors import InputError
        from rpadiag.runs import create_run
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        n = 40_000
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
            with create_run({str(path)!r}, command="compare", options={{}}) as run:
                p = np.random.default_rng(0).standard_normal(n).astype(np.float32)
                run.add_tokens(dict(prompt=np.zeros(n, int), position=np.arange(n), token=np.arange(n),
                                    source=["prefill"] * n, p=p))
        except InputError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "cannot write run" in done.stdout and "hint: free some space" in done.stdout, done.stderr
    with pytest.raises(InputError):
        open_run(path)
    assert not list(path.glob("*.parquet"))


def test_a_full_disk_met_by_other_code_while_the_run_is_open_is_an_input_error_too(tmp_path: Path) -> None:
    def work(name: str, save: Callable[[], object]) -> None:
        with start(tmp_path / name):
            save()

    def foreign() -> None:  # what bindings of C++ and Rust writers raise
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    writers: dict[str, Callable[[], object]] = {
        "numpy": lambda: np.zeros(1 << 16).tofile("/dev/full"),
        "file": lambda: Path("/dev/full").write_bytes(b"x"),
        "foreign": foreign,
    }
    for name, save in writers.items():
        with pytest.raises(InputError, match=r"cannot write run .*No space left on device"):
            work(name, save)
        assert status(tmp_path / name) == "failed"


def _can_mount(where: Path) -> bool:
    where.mkdir(exist_ok=True)
    if os.getuid() != 0:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(where)], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", str(where)], check=True)
    return done.returncode == 0


def test_a_tmpfs_of_any_size_ends_in_a_complete_run_or_a_clear_refusal(
    tmp_path: Path, fill_run: Callable[[RunWriter], None]
) -> None:
    mount = tmp_path / "disk"
    if not _can_mount(mount):
        pytest.skip("mounting a small tmpfs needs root; RLIMIT_FSIZE covers one file at a time above")

    def on_disk_of(pages: int) -> str:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4}k", "tmpfs", str(mount)], check=True)
        try:
            return _write_into(mount / "run", fill_run)
        finally:
            subprocess.run(["umount", str(mount)], check=True)

    assert _write_into(tmp_path / "roomy", fill_run) == "complete"
    needed = sum(-(-f.stat().st_size // 4096) for f in (tmp_path / "roomy").iterdir())
    assert on_disk_of(needed * 2) == "complete"
    # no room for the manifest; for the tables; for the last few of the small files
    sizes = [1, 2, 4, needed // 2, *range(needed - 8, needed - 1)]
    assert {pages: on_disk_of(pages) for pages in sizes} == dict.fromkeys(sizes, "refused")


def _write_into(path: Path, fill_run: Callable[[RunWriter], None]) -> str:
    def write() -> None:
        with start(path) as run:
            fill_run(run)
            run.add_tokens(token_columns(ROWS_PER_GROUP * 2))
            (run.scratch_dir() / "bundle.bin").write_bytes(bytes(10_000))

    try:
        write()
    except InputError:
        shutil.rmtree(path)
        with pytest.raises(InputError, match="No space left on device\nhint: free some space"):
            write()
        with pytest.raises(InputError):
            open_run(path)
        return "refused"
    assert len(open_run(path).tokens()) == ROWS_PER_GROUP * 2 + 4
    return "complete"


# -- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"entropy": [1.0]}, "tokens has no column entropy"),
        ({"p": ["x"]}, "tokens.p is float"),
        ({"token": [2**40]}, "tokens.token is int32"),
        ({"source": [None]}, "tokens.source may not be null"),
        ({"p": [1.0, 2.0]}, "columns differ in length"),
    ],
)
def test_a_column_that_does_not_fit_the_schema_is_the_callers_mistake(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    row: dict[str, Any] = {"prompt": [0], "position": [1], "token": [2], "source": ["prefill"]}
    with start(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=words):
            run.add_tokens({**row, **change})
        with pytest.raises(ValueError, match="tokens rows lack prompt, source"):
            run.add_tokens([{"position": 1, "token": 2}])
    assert open_run(tmp_path / "run").tokens().empty


def test_nothing_can_be_added_after_the_end(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        pass
    with pytest.raises(ValueError, match="is closed"):
        run.add_tokens(token_columns(1))


def test_what_has_no_json_form_fails_where_it_is_set(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        with pytest.raises(TypeError, match="no JSON form for builtins"):
            run.set_manifest(thing=object())
        with pytest.raises(TypeError, match="no JSON form"):
            run.add_finding(Finding(code="x", severity="info", text="x", numbers={"f": len}))
        with pytest.raises(ValueError, match="set by the writer alone: status"):
            run.set_manifest(status="complete")


def test_manifest_entries_that_a_command_sets_are_not_overwritten_at_the_end(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.set_manifest(devices={"gpus": ["planted"]}, share=np.float32(0.5), bad=float("inf"))
    manifest = open_run(tmp_path / "run").manifest
    assert (manifest["devices"], manifest["share"], manifest["bad"]) == ({"gpus": ["planted"]}, 0.5, None)


def test_scratch_directory_is_gone_afterwards(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        scratch = run.scratch_dir()
        assert scratch == run.scratch_dir()
        (scratch / "deep").mkdir()
        (scratch / "deep" / "file").write_text("x")
    assert not scratch.exists()


# -- size ---------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    code = f"""
        import numpy as np, resource
        from rpadiag.runs import create_run
        n = 10_000
        rng = np.random.default_rng(0)
        def megabytes():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with create_run({str(tmp_path / "run")!r}, command="compare", options={{}}) as run:
            def add(times):
                for i in range(times):
                    run.add_tokens(dict(prompt=np.full(n, i), position=np.arange(n), token=rng.integers(0, 1 << 30, n),
                                        source=["prefill"] * n, text=["x" * 8] * n, p=rng.random(n, np.float32)))
            add(20)
            before = megabytes()
            add(80)
            print(megabytes() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    # 800,000 rows of at least 28 bytes are 22 MB in Arrow alone, and hundreds as Python objects
    assert float(done.stdout) < 12
    assert len(open_run(tmp_path / "run").tokens(["token"])) == 1_000_000


def test_long_sequences_are_flushed_by_size_and_not_only_by_rows(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        for i in range(40):
            run.add_prompts([{"prompt": i, "num_prompt_tokens": 1, "token_ids": np.arange(100_000, dtype=np.int32)}])
        assert (run.path / "prompts.parquet.part").stat().st_size > 0
    assert len(open_run(tmp_path / "run").prompts(["prompt"])) == 40


def test_digests_are_the_documented_ones() -> None:
    # hashlib.blake2b(b"\x01\0\0\0\xff\xff\xff\xff", digest_size=16), and of b"a\0x\0b\0y\0"
    import hashlib

    assert token_digest([1, -1]) == hashlib.blake2b(b"\x01\0\0\0\xff\xff\xff\xff", digest_size=16).hexdigest()
    assert weights_digest({"b": "y", "a": "x"}) == hashlib.blake2b(b"a\0x\0b\0y\0", digest_size=16).hexdigest()
    assert token_digest(np.array([1, -1])) == token_digest((1, -1))


def test_two_processes_cannot_both_claim_a_directory(tmp_path: Path) -> None:
    code = f"""
        import sys, time
        from rpadiag.errors import InputError
        from rpadiag.runs import create_run
        time.sleep(max(0, float(sys.argv[1]) - time.time()))
        try:
            create_run({str(tmp_path / "run")!r}, command="compare", options={{}})
            print("claimed")
        except InputError:
            print("refused")
    """
    moment = str(time.time() + 1.5)
    command = [sys.executable, "-c", textwrap.dedent(code), moment]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(c.communicate()[0].strip() for c in children) == ["claimed", "refused", "refused", "refused"]
