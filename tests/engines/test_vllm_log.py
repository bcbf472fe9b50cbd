"""vLLM's log after a failure: its own last error is found, what it warns of is passed over, and the hint fits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rpadiag.engines.vllm_log import hint_for, last_error, stack_of, tail_of

# Lines as vLLM 0.32.0 writes them.
WARM_UP = [
    '(MainProcess pid=7) WARNING 11-30 10:32:05 [base.py:380]   File "hf.py", line 1022, in render_messages',
    "(MainProcess pid=7) WARNING 11-30 10:32:05 [base.py:380] ValueError: Tokenizer not available when `skip_tokenizer_init=True`",
]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "cpu_worker.py", line 219, in determine_available_memory',
    "    raise ValueError(",
    "ValueError: Available memory on node 0 (17.63/19.34 GiB) on kv cache allocation is less than requested memory for kv (4194304.0 GiB).",
]
WORKER = [
    "(EngineCore pid=9) ERROR 11-30 10:00:00 [core.py:946] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
    "Traceback (most recent call last):",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


def test_the_last_error_is_the_last_exception_and_not_a_warning() -> None:
    assert last_error([*TRACEBACK, *WARM_UP]) == TRACEBACK[-1]
    assert last_error(WARM_UP) is None
    assert last_error([]) is None


def test_an_error_that_points_at_a_root_cause_is_passed_over_for_it() -> None:
    assert last_error(WORKER) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."


def test_the_tail_leaves_warnings_out_unless_there_is_nothing_else() -> None:
    assert "Tokenizer not available" not in tail_of([*WARM_UP, *TRACEBACK, *WARM_UP], Path("log"))
    assert tail_of(WARM_UP, Path("log")).splitlines() == ["last lines of log:", *WARM_UP]


@pytest.mark.parametrize(
    ("code", "log", "hint"),
    [
        (1, TRACEBACK, "no memory for its KV cache"),
        (1, WORKER, "not enough memory"),
        (1, ["NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX."], "leave kv_cache_dtype out"),
        (1, ["RuntimeError: Failed to infer device type, please set the environment"], "rpadiag doctor"),
        (1, ["torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found"], "install g++"),
        (-signal.SIGKILL, [], "not enough memory"),
        (-signal.SIGILL, [], "lacks an instruction"),
    ],
)
def test_what_is_recognised_has_a_hint(code: int, log: list[str], hint: str) -> None:
    assert hint in (hint_for(code, log) or "")


def test_what_is_not_recognised_has_none() -> None:
    assert hint_for(1, ["ValueError: something new"]) is None


def test_a_stack_is_that_of_the_main_thread_innermost_first() -> None:
    log = [
        "INFO before",
        "Thread 0x01 (most recent call first):",
        '  File "other.py", line 1 in run',
        "",
        "Current thread 0x02 (most recent call first):",
        '  File "connection.py", line 378 in _recv',
        '  File "vllm_process.py", line 60 in main',
    ]
    shown = (stack_of(log, Path("log")) or "").splitlines()
    assert shown[1:] == log[5:]
    assert stack_of(TRACEBACK, Path("log")) is None
