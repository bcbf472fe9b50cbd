"""The process that hosts vLLM: commands in and replies out as JSON over one connection, tensors on disk.

An :class:`rpadiag.errors.RpadiagError` is sent back and the process goes on; any other exception is sent back too, and
ends the process, its traceback in the log that the parent quotes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rpadiag.engines.base import ModelFacts, TokenScores
from rpadiag.engines.bundle_writer import BundleWriter
from rpadiag.engines.vllm_effective import effective
from rpadiag.engines.vllm_plain import peak_memory, run_plain
from rpadiag.errors import EngineError, InputError, RpadiagError, unknown_name

if TYPE_CHECKING:
    from rpadiag.engines.vllm_capture import Recorder
    from rpadiag.engines.vllm_shards import ShardedRecorder

EXTENSION = "rpadiag.engines.vllm_capture.CaptureExtension"
SHARD_EXTENSION = "rpadiag.engines.vllm_shards.ShardExtension"
DEFAULT_MAX_MODEL_LEN = 4097  # sequences of 4,096 tokens
# The cache holds one full sequence and at least this many tokens, so that a batch of short prompts fits too.
MIN_CACHE_TOKENS = 4096


def main(descriptor: int, parent: int) -> NoReturn:
    """Serve commands from an inherited connection until it closes or ``parent`` dies."""
    faulthandler.register(signal.SIGUSR1)  # the parent asks where a process is that gives no sign of life
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    host = Host(connection)
    while True:
        try:
            command = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # vLLM's own teardown takes seconds and has nothing to save
        try:
            result = getattr(host, "do_" + command.pop("do"))(**command)
            reply: dict[str, Any] = {"result": result}
        except RpadiagError as error:
            reply = {"error": error.to_plain()}
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            connection.send_bytes(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
            os._exit(1)
        connection.send_bytes(json.dumps(reply).encode())


def _leave_with(parent: int) -> None:
    """End this process once its parent is gone: vLLM may be in the middle of a long step."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Host:
    """One vLLM engine at a time, and what was found out while it loaded."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._alive = 0.0
        self._llm: Any = None
        self._found: Any = None  # OneWorker or ManyWorkers
        self._device = "cpu"
        self._delivered: dict[str, str] = {}
        self._measured = {"step_s": 0.0, "spool_s": 0.0}

    # -- commands ----------------------------------------------------------------------------------

    def do_load(
        self, *, model: str, arguments: dict[str, Any], max_model_len: int | None, device: str
    ) -> dict[str, Any]:
        """Load a model, in place of the one loaded before. Returns facts and manifest entries."""
        started = time.monotonic()
        if device == "cpu" and os.environ.get("ONEDNN_MAX_CPU_ISA"):
            _init_amx()
        import torch
        from vllm import LLM, __version__
        from vllm.engine.arg_utils import EngineArgs

        from rpadiag.engines.vllm_heap import spare_imports

        spare_imports()
        defaults = {f.name: f for f in dataclasses.fields(EngineArgs)}
        for name in arguments:
            if name not in defaults:
                raise unknown_name("vLLM argument", name, defaults)
        facts = self._facts(model, arguments)
        tokens = min(max_model_len or DEFAULT_MAX_MODEL_LEN, facts.max_positions + 1) - 1
        sharded = arguments.get("tensor_parallel_size", 1) > 1
        given = {**_sized(arguments, facts, tokens), "worker_extension_cls": SHARD_EXTENSION if sharded else EXTENSION}
        self._unload()
        self._device = device
        with self._digesting():
            self._llm = LLM(model=model, **given)
        from rpadiag.engines.config_facts import config_facts
        from rpadiag.engines.vllm_points import observable
        from rpadiag.engines.vllm_workers import workers_of

        self._found = workers_of(self._engine, self._delivered)
        try:
            self._workers.check_complete(model)
        except InputError:
            self._unload()
            raise
        described = self._workers.describe()
        compiled = described.pop("compiled")
        return {
            "facts": dataclasses.asdict(facts),
            "sites": observable(facts.sites_over(arguments.get("tensor_parallel_size", 1)), compiled=compiled),
            "manifest": {
                "vllm_version": __version__,
                "torch_version": torch.__version__,
                "device_name": torch.cuda.get_device_name() if device != "cpu" else _cpu_name(),
                "arguments": {k: v for k, v in given.items() if v != _default(defaults[k])},
                "config": config_facts(self._engine.vllm_config.model_config.hf_text_config),
                "load_s": round(time.monotonic() - started, 3),
                **effective(self._engine.vllm_config),
                **described,
            },
        }

    def do_weight_digests(self) -> dict[str, str]:
        """Digest per checkpoint tensor: of the live parameter where vLLM kept it, else of what was loaded into it."""
        return self._workers.weight_digests()

    def do_score(
        self,
        *,
        sequences: list[dict[str, Any]],
        sites: list[str],
        directory: str,
        num_generate: int,
        decode: bool,
        together: bool,
        temperature: float,
        top_p: float,
        seed: int,
        meta: dict[str, Any],
    ) -> dict[str, Any]:
        """Score sequences, and capture ``sites`` of them, into a new bundle. Returns what it took, as ``VllmEngine.measured``."""
        self._measured = {"step_s": 0.0, "spool_s": 0.0}
        before = peak_memory(reset=True)
        if decode:
            sequences = [{**s, "given": s["token_ids"][s["num_prompt_tokens"] :]} for s in sequences]
            sequences = [{**s, "token_ids": s["token_ids"][: s["num_prompt_tokens"]]} for s in sequences]
        longest = max((len(s.get("given", ())) for s in sequences), default=0) + num_generate
        order = [[i] for i in range(len(sequences))] if not together else self._groups(sequences, longest)
        sampling = {"temperature": temperature, "top_p": top_p}
        with BundleWriter(directory, meta) as bundle:
            recorder = self._workers.recorder(bundle, sites, self._family, self._model_facts)
            try:
                recorder.attach()
                for group in order:
                    self._run(recorder, {i: sequences[i] for i in group}, num_generate, sampling, seed)
                recorder.check_fired()
            finally:
                recorder.detach()
        return {**self._measured, "bytes_before": before, "peak_bytes": peak_memory()}

    def do_plain(
        self, *, sequences: list[list[int]], noise: tuple[int, int] | None = None, **how: Any
    ) -> dict[str, Any]:
        """Prompts with nothing observed: see :func:`rpadiag.engines.vllm_plain.run_plain`."""
        embedding = self._workers.model().get_submodule(self._family.rollout["embed"].module) if noise else None
        return run_plain(self._engine, sequences, embedding=embedding, noise=noise, **how)

    def do_attention(self, *, num_tokens: int) -> None:
        """Hold a forward of ``num_tokens`` tokens at its first attention, and run attention for the parent there."""
        from vllm import SamplingParams

        from rpadiag.engines.vllm_attention import serve_attention

        with serve_attention(self._workers.model(), self._connection):
            parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            self._engine.add_request("0", {"prompt_token_ids": [0] * num_tokens}, parameters)
            while self._engine.has_unfinished_requests():
                self._engine.step()

    # -- scoring -----------------------------------------------------------------------------------

    def _run(
        self,
        recorder: Recorder | ShardedRecorder,
        group: Mapping[int, dict[str, Any]],
        num_generate: int,
        sampling: Mapping[str, float],
        seed: int,
    ) -> None:
        """Run one call's sequences. One token more than asked for is sampled, and never fed.

        So every token of a sequence is fed, and each site has one row per token. A sequence with ``given`` tokens decodes
        those in place of sampled ones.
        """
        import torch
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # On a CPU a request's own generator dies in a prompt that is split over steps, so there the seed is global.
        own_seeds = num_generate > 0 and sampling["temperature"] > 0 and self._device != "cpu"
        torch.manual_seed(seed + min(group))
        engine = self._engine
        for index, sequence in group.items():
            ids = sequence["token_ids"]
            given = sequence.get("given")
            steps = num_generate + len(given or ())
            recorder.begin(index, ids, steps, given)
            parameters = SamplingParams(
                max_tokens=steps + 1,
                **(sampling if steps else {"temperature": 0.0}),
                seed=seed + index if own_seeds else None,
                logprobs=0,
                prompt_logprobs=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), {"prompt_token_ids": ids}, parameters)
        while engine.has_unfinished_requests():
            began = time.monotonic()
            outputs = engine.step()
            self._measured["step_s"] += time.monotonic() - began
            for output in outputs:
                if output.finished and recorder.error is None:
                    index = int(output.request_id)
                    self._finish(
                        recorder, group[index], index, output, num_generate + len(group[index].get("given", ()))
                    )
            self._sign_of_life()
        if recorder.error is not None:
            raise recorder.error

    def _sign_of_life(self) -> None:
        """Tell the parent that a step has ended, once a second: from this thread, because another would go on in a hang."""
        if time.monotonic() - self._alive >= 1.0:
            self._alive = time.monotonic()
            self._connection.send_bytes(b'{"alive": true}')

    def _finish(
        self,
        recorder: Recorder | ShardedRecorder,
        sequence: Mapping[str, Any],
        index: int,
        output: Any,
        num_generate: int,
    ) -> None:
        """Write a finished request's scores and close its sequence."""
        ids = [int(t) for t in sequence["token_ids"]]
        sampled = [int(t) for t in output.outputs[0].token_ids][:num_generate]
        given = [output.prompt_logprobs[t][ids[t]] for t in range(1, len(ids))]
        given += [output.outputs[0].logprobs[i][token] for i, token in enumerate(sampled)]
        try:
            began = time.monotonic()
            positions, entropy, argmax, writer = recorder.end(index)
            self._measured["spool_s"] += time.monotonic() - began
            scores = TokenScores(
                logprob=np.array([x.logprob for x in given], np.float32),
                entropy=entropy,
                rank=np.array([x.rank for x in given], np.int32),
                argmax=argmax,
            )
            if "logprob" in recorder.sites:
                writer.append_array("logprob", scores.logprob, "float32")
            recorder.bundle.end(
                index,
                token_ids=ids + sampled,
                num_prompt_tokens=sequence["num_prompt_tokens"] if not num_generate else len(ids),
                prompt=sequence["prompt"],
                positions=positions,
                scores=scores,
            )
        except RpadiagError as error:
            recorder.error = error
        self._connection.send_bytes(json.dumps({"finished": index}).encode())

    def _groups(self, sequences: list[dict[str, Any]], num_generate: int) -> list[list[int]]:
        """Split sequences so that each group fits into the cache: vLLM would preempt and recompute otherwise."""
        config = self._engine.vllm_config
        block = config.cache_config.block_size
        free = config.cache_config.num_gpu_blocks - 1  # block 0 is vLLM's null block
        groups: list[list[int]] = [[]]
        used = 0
        for index, sequence in enumerate(sequences):
            need = -(-(len(sequence["token_ids"]) + num_generate + 1) // block)
            if groups[-1] and (used + need > free or len(groups[-1]) >= config.scheduler_config.max_num_seqs):
                groups.append([])
                used = 0
            groups[-1].append(index)
            used += need
        return groups

    # -- loading -----------------------------------------------------------------------------------

    def _facts(self, model: str, arguments: Mapping[str, Any]) -> ModelFacts:
        from rpadiag.engines.checkpoint import load_config
        from rpadiag.engines.families import family_for

        trusted = bool(arguments.get("trust_remote_code", False))
        config = load_config(model, revision=arguments.get("revision"), trust_remote_code=trusted)
        self._family = family_for(config.architectures)
        config.update(arguments.get("hf_overrides") or {})
        self._model_facts = self._family.facts(config)
        return self._model_facts

    @property
    def _engine(self) -> Any:
        if self._llm is None:
            raise EngineError("no model is loaded in the vLLM process", hint="reload one; the last reload failed")
        return self._llm.llm_engine

    @property
    def _workers(self) -> Any:
        _ = self._engine  # raises where none is loaded
        return self._found

    def _unload(self) -> None:
        if self._llm is None:
            return
        import torch

        # Some models stay in reference cycles of vLLM's own: left to them, the end of an engine that is collected later would
        # take the process groups of the next one with it.
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._found = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _digesting(self) -> Iterator[None]:
        """Digest what vLLM's loader hands to the model: CPU linears keep no readable weight afterwards."""
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        from rpadiag.engines.vllm_weights import noted

        original = DefaultModelLoader.get_all_weights
        delivered: dict[str, str] = {}
        DefaultModelLoader.get_all_weights = noted(original, delivered)
        try:
            yield
        finally:
            DefaultModelLoader.get_all_weights = original
            self._delivered = delivered


def _sized(arguments: Mapping[str, Any], facts: ModelFacts, tokens: int) -> dict[str, Any]:
    """Arguments with the length and the cache that sequences of ``tokens`` tokens need.

    One token more, because vLLM insists on sampling one. A cache size given by the caller stays.
    """
    sized = dict(arguments)
    sized["max_model_len"] = tokens + 1
    if tokens + 1 > facts.max_positions:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    element = 4 if sized.get("dtype") in ("float32", "float") else 2
    per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * element
    sized.setdefault("kv_cache_memory_bytes", per_token * (max(tokens + 1, MIN_CACHE_TOKENS) + 4 * 128))
    return sized


def _default(spec: Any) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


def _init_amx() -> None:
    """Ask the kernel for AMX tiles before oneDNN is told not to use them: vLLM's own kernels do so regardless."""
    import torch

    init = getattr(torch.cpu, "_init_amx", None)
    if init is not None:
        init()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"
