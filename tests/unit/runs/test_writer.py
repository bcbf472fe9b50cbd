"""What a run directory holds after success, and how a caller's mistakes are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_parts import start, token_columns

from rpadiag.findings import Finding
from rpadiag.runs import Run, create_run, open_run, token_digest, weights_digest

MakeRun = Callable[..., Run]


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
    assert manifest["tables"] == {
        "prompts": 2, "tokens": 4, "sites": 2, "attribution": 1, "effects": 1, "replicates": 1,
    }  # fmt: skip
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
