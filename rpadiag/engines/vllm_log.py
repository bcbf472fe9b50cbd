"""Reading vLLM's log after it failed: its own last error, where it was, and what to try."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

TAIL_LINES = 15
STACK_LINES = 20
# The end of a traceback, also behind the prefix of a worker's log line: "(Worker pid=7) ERROR 07-01 12:00:00 [a.py:1] ValueError: b".
_ERROR = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b(?:: .*)?)$")
_POINTS_ELSEWHERE = ("root cause", "cancelled", "BrokenPipeError", "SystemExit")
_HARMLESS = " WARNING "  # vLLM warns with whole tracebacks, of its warm-up without a tokenizer for one
_STACK = "(most recent call first)"

_CACHE = (
    "vLLM has no memory for its KV cache: shorten the prompts (--max-tokens), or close other programs on this device"
)
_MEMORY = "not enough memory: use a smaller model or shorter prompts (--max-tokens), or close other programs"
_DEVICE = "this build of vLLM does not fit this machine: rpadiag doctor says what works here"
_COMPILER = "compiled mode needs a C++ compiler: install g++, or use --mode eager"
_CPU_FP8 = "this CPU cannot do it: leave kv_cache_dtype out, or run on a GPU"
# What a log says (lower case) -> what to try; the first that fits.
_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("no available memory for the cache blocks", "requested memory for kv", "available kv cache memory"), _CACHE),
    (("fp8 kv cache on cpu requires",), _CPU_FP8),
    (("out of memory", "memoryerror", "can't allocate memory", "less than requested", "less than desired"), _MEMORY),
    (("driver version is insufficient", "no cuda-capable device", "failed to infer device type"), _DEVICE),
    (("invalidcxxcompiler", "failed to find c compiler", "cxx compiler"), _COMPILER),
)


def last_error(log: Sequence[str]) -> str | None:
    """The last exception that a log names, passing over those that only point at another one."""
    for line in reversed(log):
        found = None if _HARMLESS in line else _ERROR.search(line.rstrip())
        if found and not any(word in found[1] for word in _POINTS_ELSEWHERE):
            return found[1]
    return None


def tail_of(log: Sequence[str], path: Path) -> str:
    """The end of a log, as errors quote it."""
    lines = [line for line in log if line.strip()]
    telling = [line for line in lines if _HARMLESS not in line]
    return "\n".join([f"last lines of {path}:", *(telling or lines)[-TAIL_LINES:]])


def stack_of(log: Sequence[str], path: Path) -> str | None:
    """Where the main thread was when faulthandler was asked; None where it did not answer."""
    starts = [i for i, line in enumerate(log) if line.rstrip().endswith(f"{_STACK}:")]
    if not starts:
        return None
    frames = [x for x in log[starts[-1] + 1 :] if x.lstrip().startswith("File ") and "<frozen importlib" not in x]
    return "\n".join([f"it was here, innermost call first (from {path}):", *frames[:STACK_LINES]])


def hint_for(code: int, log: Sequence[str]) -> str | None:
    """What to try, from an exit code (negative: a signal) and the end of the log; None where nothing is recognised."""
    if code == -signal.SIGILL:
        return "this CPU lacks an instruction that the build uses; start without deterministic, or on another machine"
    if code == -signal.SIGKILL:
        return _MEMORY
    tail = "\n".join(log[-4 * TAIL_LINES :]).lower()
    return next((hint for signs, hint in _HINTS if any(sign in tail for sign in signs)), None)
