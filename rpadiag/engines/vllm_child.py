"""The parent's side of the process that hosts vLLM: its environment, its connection, its log and its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rpadiag
from rpadiag import errors
from rpadiag.errors import EngineError, UsageError

LOG_TAIL_LINES = 15
STOP_S = 10.0


def child_environment(
    device: str, enforce_eager: bool, deterministic: bool, num_threads: int, model: str | Path
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
    if device == "cpu":
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
    """The child process, its connection and its log."""

    def __init__(self, environment: Mapping[str, str], log_path: Path | None) -> None:
        self._log_is_ours = log_path is None
        if log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="rpadiag-vllm-", suffix=".log")
            os.close(descriptor)
            log_path = Path(name)
        self.log_path = log_path
        ours, theirs = socket.socketpair()
        root = Path(rpadiag.__file__).parent.parent
        code = (
            f"import sys; sys.path.append({str(root)!r}); from rpadiag.engines.vllm_process import main; "
            "main(*map(int, sys.argv[1:]))"
        )
        scratch = tempfile.mkdtemp(prefix="rpadiag-vllm-")
        # vLLM leaves a rendezvous file per engine; compiled models keep their cache where it is
        temporary = {"TMPDIR": scratch} if "TORCHDYNAMO_DISABLE" in environment else {}
        with theirs, log_path.open("ab") as log:
            # -P and a session of its own: no import from the working directory, no Ctrl-C meant for the caller
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, **environment, **temporary},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self._kill = weakref.finalize(self, _kill, self._child, scratch)

    def request(self, message: Mapping[str, Any], *, on_finished: Callable[[int], None] | None = None) -> Any:
        """Send a command and wait for its result. The child is killed if waiting is interrupted."""
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._died() from error
        reply = self.reply()
        while "finished" in reply:
            try:
                if on_finished is not None:
                    on_finished(reply["finished"])
            except BaseException:
                self.kill()  # it is in the middle of an answer that nobody will read
                raise
            reply = self.reply()
        if "error" in reply:
            kind, text, detail, hint = reply["error"]
            raise getattr(errors, kind)(text, detail=detail, hint=hint)
        return reply.get("result")

    def reply(self) -> dict[str, Any]:
        """The child's next message."""
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        except BaseException:
            self.kill()
            raise
        if "failed" in message:
            raise self._died(message["failed"])
        return message

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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        log = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = [line for line in log if line.strip()][-LOG_TAIL_LINES:]
        return EngineError(
            # a validation error says on its second line what is wrong
            f"vLLM failed: {' '.join(reason.split(chr(10))[:2])}" if reason else f"the vLLM process {how}",
            detail="\n".join([f"last lines of {self.log_path}:", *tail]),
            hint=_hint(code, "\n".join(tail)),
        )


def _kill(child: subprocess.Popen[bytes], scratch: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    shutil.rmtree(scratch, ignore_errors=True)


def _hint(code: int, tail: str) -> str | None:
    starved = ("out of memory", "memoryerror", "can't allocate memory", "less than requested")
    if code == -signal.SIGILL:
        return "this CPU lacks an instruction that the build uses; start without deterministic, or on another machine"
    if code == -signal.SIGKILL or any(sign in tail.lower() for sign in starved):
        return "not enough memory: use a smaller model or max_model_len, or close other programs"
    return None
