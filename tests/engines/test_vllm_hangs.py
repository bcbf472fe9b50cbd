"""An engine that gives no sign of life is ended after the timeout: it is said where it was, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import children, loading_torch
from tiny import token_ids

from rpadiag.engines.base import TokenSequence
from rpadiag.engines.vllm import VllmEngine
from rpadiag.errors import EngineError

START = """
import sys
from rpadiag.engines.vllm import VllmEngine
from rpadiag.errors import EngineError
try:
    VllmEngine.start(sys.argv[1], log_path=sys.argv[2], timeout_s=8)
except EngineError as error:
    print(error)
"""


@pytest.mark.vllm
def test_a_process_that_is_stopped_while_it_loads_is_ended(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    log = tmp_path / "log"
    caller = subprocess.Popen([sys.executable, "-c", START, tiny("llama"), log], stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (child := loading_torch(caller.pid)):
        assert time.monotonic() < end and caller.poll() is None
        time.sleep(0.05)
    os.kill(child, signal.SIGSTOP)
    out, _ = caller.communicate(timeout=60)
    assert out.startswith("vLLM made no progress for 8 s and was ended")
    assert str(log) in out and "hint: if it is only slow, give it more time with --timeout" in out
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.vllm
def test_a_process_that_is_stopped_in_the_middle_of_scoring_is_ended(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    sequences = [
        TokenSequence(prompt=i, token_ids=tuple(token_ids(250, seed=i)), num_prompt_tokens=250) for i in range(400)
    ]
    finished: list[int] = []
    with VllmEngine.start(tiny("llama"), max_model_len=300, log_path=tmp_path / "log") as engine:
        (child,) = children(os.getpid())
        engine._process.timeout_s = 3
        threading.Timer(1.0, os.kill, (child, signal.SIGSTOP)).start()
        with pytest.raises(EngineError, match="made no progress for 3 s"):
            engine.score(sequences, sites=engine.facts.sites, bundle_dir=tmp_path / "b", on_finished=finished.append)
    assert 0 < len(finished) < len(sequences)
    assert not children(os.getpid()) and not (tmp_path / "b").exists()


@pytest.mark.vllm
def test_a_deadlock_is_ended_with_the_place_it_was_at(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with VllmEngine.start(tiny("llama"), max_model_len=300, log_path=tmp_path / "log") as engine:
        engine._process.timeout_s = 3
        # its forward now waits in the first attention for a tensor, and here nobody sends one: both wait
        engine._process.request({"do": "attention", "num_tokens": 8})
        with pytest.raises(EngineError, match="made no progress for 3 s") as caught:
            engine._process.reply()
        assert caught.value.detail is not None
        assert "innermost call first" in caught.value.detail and "vllm_attention.py" in caught.value.detail
    assert not children(os.getpid())
