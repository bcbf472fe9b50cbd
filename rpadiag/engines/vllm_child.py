"""The parent's side of the process that hosts vLLM: its environment, its connection, its log and its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rpadiag
from rpadiag.engines.ranks import VARIABLES
from rpadiag.engines.vllm_heap import RARELY
from rpadiag.engines.vllm_log import hint_for, last_error, stack_of, tail_of
from rpadiag.errors import EngineError, UsageError, from_plain

STOP_S = 10.0
# Without a sign of life: a step of 1,024 tokens of an 8B model on a slow CPU takes five minutes, a silent compilation as long.
TIMEOUT_S = 600.0
_POLL_S = 1.0
_STACK_S = 2.0


def child_environment(
    device: str,
    enforce_eager: bool,
    deterministic: bool,
    num_threads: int,
    model: str | Path,
    *,
    num_ranks: int = 1,
) -> dict[str, str]:
    """Variables set in the child, and nowhere else."""
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if enforce_eager:
        found["TORCHDYNAMO_DISABLE"] = "1"
    else:
        # a saved artifact fails to load, and everything is compiled again
        found["VLLM_USE_AOT_COMPILE"] = "0"
    if Path(model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    if num_ranks > 1:
        found["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if device == "cpu":
            found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # ranks are bound to memory nodes otherwise, one each
    if device == "cpu":
        if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
            raise UsageError(
                "VLLM_BATCH_INVARIANT is set, and vLLM's batch-invariant mode is for GPUs: on a CPU it changes nothing",
                hint="unset it; the manifest would name a mode that the engine was not in",
            )
        found |= {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if deterministic:
            found["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
            found["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    else:
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it compiles itself on first use, and only sampling needs it
        if ":" in device:
            number = int(device.partition(":")[2])
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            listed = visible.split(",") if visible else []
            if visible and number >= len(listed):
                raise UsageError(f"there is no device {device}", detail=f"CUDA_VISIBLE_DEVICES={visible}")
            found["CUDA_VISIBLE_DEVICES"] = listed[number] if visible else str(number)
    if deterministic and device != "cpu":
        raise UsageError("deterministic is for the CPU", hint="on a GPU set VLLM_BATCH_INVARIANT=1 before starting")
    return found


def inherited_environment() -> dict[str, str]:
    """Variables of the caller that reach the child and can change what it computes.

    Those that hold secrets, addresses or paths are left out: manifests and reports are made to be passed on.
    """
    prefixes = ("VLLM_", "OMP_", "MKL_", "ONEDNN_", "TORCH", "PYTORCH_", "CUBLAS_", "CUDA_VISIBLE_", "NVIDIA_TF32_")
    private = ("KEY", "TOKEN", "SECRET", "PASSWORD", "HOST", "ADDR", "URL", "IP", "PORT", "USER")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes) and not set(name.split("_")) & set(private) and "/" not in value
    }


class Child:
    """The child process, its connection and its log.

    timeout_s: how long it may go without a sign of life (a message; while it loads, a line in its log) before it is killed.
    """

    def __init__(self, environment: Mapping[str, str], log_path: Path | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._log_is_ours = log_path is None
        if log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="rpadiag-vllm-", suffix=".log")
            os.close(descriptor)
            log_path = Path(name)
        self.log_path = log_path
        ours, theirs = socket.socketpair()
        # a message that a stopped process leaves half read or half written ends waiting too
        limit = struct.pack("ll", int(timeout_s) + 1, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        root = Path(rpadiag.__file__).parent.parent
        code = (
            f"import gc, sys; gc.set_threshold{RARELY}; sys.path.append({str(root)!r}); "
            "from rpadiag.engines.vllm_process import main; "
            "main(*map(int, sys.argv[1:]))"
        )
        scratch = tempfile.mkdtemp(prefix="rpadiag-vllm-")
        # vLLM leaves a rendezvous file per engine; compiled models keep their cache where it is
        temporary = {"TMPDIR": scratch} if "TORCHDYNAMO_DISABLE" in environment else {}
        with theirs, log_path.open("ab") as log:
            # -P and a session of its own: no import from the working directory, no Ctrl-C meant for the caller
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())],
                env={**{k: v for k, v in os.environ.items() if k not in VARIABLES}, **environment, **temporary},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self._kill = weakref.finalize(self, _kill, self._child, scratch)

    def request(self, message: Mapping[str, Any], *, on_finished: Callable[[int], None] | None = None) -> Any:
        """Send a command and wait for its result. The child is killed if waiting is interrupted, or takes too long."""
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except BlockingIOError as error:
            raise self._hung() from error
        except OSError as error:
            raise self._died() from error
        loading = message.get("do") == "load"
        reply = self.reply(loading=loading)
        while "finished" in reply or "alive" in reply:
            try:
                if on_finished is not None and "finished" in reply:
                    on_finished(reply["finished"])
            except BaseException:
                self.kill()  # it is in the middle of an answer that nobody will read
                raise
            reply = self.reply(loading=loading)
        if "error" in reply:
            raise from_plain(reply["error"])
        return reply.get("result")

    def reply(self, *, loading: bool = False) -> dict[str, Any]:
        """The child's next message. loading: a growing log counts as a sign of life."""
        try:
            self._wait(loading)
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (TimeoutError, BlockingIOError) as error:
            raise self._hung() from error
        except (EOFError, OSError) as error:
            raise self._died() from error
        except BaseException:
            self.kill()
            raise
        if "failed" in message:
            raise self._died(message["failed"])
        return message

    def _wait(self, loading: bool) -> None:
        """Until there is something to read. Raises TimeoutError without a sign of life, EOFError when the child has ended."""
        size, since = self._log_size(), time.monotonic()
        while not self.connection.poll(_POLL_S):
            if self._child.poll() is not None and not self.connection.poll(0):
                raise EOFError  # a process that it started may still hold the other end
            if loading and self._log_size() != size:
                size, since = self._log_size(), time.monotonic()
            if time.monotonic() - since > self.timeout_s:
                raise TimeoutError

    def _log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self.log_path.stat().st_size
        return 0

    def close(self) -> None:
        """Ask the child to end by closing the connection; kill it if it does not."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_S)
        self.kill()
        if self._log_is_ours:
            self.log_path.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the child and whatever it started, at once."""
        self._kill()

    def _died(self, reason: str | None = None) -> EngineError:
        """What the end of the child looks like from here; ``reason`` is the exception it named."""
        try:
            code = self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        log = self._log_lines()
        if reason is None or "root cause" in reason:  # what vLLM says of a process of its own that failed
            reason, named = last_error(log), reason
            reason = reason or named
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        # a validation error says on its second line what is wrong
        said = " ".join(reason.split("\n")[:2]) if reason else None
        return EngineError(
            f"vLLM failed: {said}" if said and code >= 0 else f"the vLLM process {how}",
            detail=tail_of(log, self.log_path),
            hint=hint_for(code, log) or f"the whole log is {self.log_path}",
        )

    def _hung(self) -> EngineError:
        """A child that gives no sign of life: where it is, as far as it can still say, and then its end."""
        size, asked = self._log_size(), time.monotonic()
        with contextlib.suppress(OSError):
            os.kill(self._child.pid, signal.SIGUSR1)  # faulthandler's: stacks of its threads, to its log
        while self._log_size() == size and time.monotonic() - asked < _STACK_S:
            time.sleep(0.1)
        self.kill()
        log = self._log_lines()
        return EngineError(
            f"vLLM made no progress for {self.timeout_s:.0f} s and was ended",
            detail=stack_of(log, self.log_path) or tail_of(log, self.log_path),
            hint="if it is only slow, give it more time with --timeout; if it hangs, try --mode eager or fewer GPUs",
        )

    def _log_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return []


def _kill(child: subprocess.Popen[bytes], scratch: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    shutil.rmtree(scratch, ignore_errors=True)
