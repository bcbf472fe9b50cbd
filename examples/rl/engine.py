"""TRL's colocated vLLM with what this example pins: mode, dtype, memory, and a seed for every sampled sequence.

TRL builds its engine itself and has no arguments for these, so the name ``LLM`` in its module is replaced while it does.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

MODES = ("eager", "compiled")
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]


def engine_arguments(
    *, device: str, mode: str, dtype: str, kv_cache_mib: int, num_rows: int, kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """vLLM engine arguments beside TRL's. The cache has a fixed size: several engines share a GPU, and none measures what is free."""
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "enforce_eager": mode == "eager",
        "enable_prefix_caching": False,  # a cached prompt would be computed by an earlier batch, or by earlier weights
        "kv_cache_memory_bytes": kv_cache_mib << 20,
        "generation_config": "vllm",
        "async_scheduling": False,
    }
    if mode == "compiled" and device == "cuda":
        sizes = [s for s in CAPTURE_SIZES if s < num_rows] + [num_rows]
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return arguments


def own_rendezvous() -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT for this process. TRL and vLLM want a port even for one rank, and TRL tries 29500 first: of several runs that
    start at once all but one would fail."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}


@contextlib.contextmanager
def seeded_engine(**arguments: Any) -> Iterator[None]:
    """While the block runs, TRL makes its colocated engine with ``arguments``, and one that samples row i of a call by a seed of its own."""
    from trl.generation import vllm_generation
    from vllm import LLM

    class SeededLLM(LLM):
        """``call_seed`` is set before each generation; TRL gives one set of sampling parameters for all rows, and one seed in it would
        make all completions of a prompt equal. ``seconds`` counts the time spent in ``generate``."""

        call_seed = 0
        seconds = 0.0

        def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
            if sampling_params is not None and not isinstance(sampling_params, Sequence):
                given, sampling_params = sampling_params, []
                for row in range(len(prompts)):
                    own = given.clone()
                    own.seed = self.call_seed + row
                    sampling_params.append(own)
            start = time.perf_counter()
            try:
                return super().generate(prompts, sampling_params, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

    def make(**given: Any) -> SeededLLM:
        return SeededLLM(**{**given, **arguments})

    before = vllm_generation.LLM
    vllm_generation.LLM = make
    try:
        with readable_cpu_linears():
            yield
    finally:
        vllm_generation.LLM = before


@contextlib.contextmanager
def readable_cpu_linears() -> Iterator[None]:
    """On CPUs with AVX512 vLLM packs the weights of linear layers and drops the originals; new weights could then not be loaded."""
    import torch
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    before = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if before is None or not current_platform.is_cpu():
        yield
        return

    def plain(layer: Any, *_: Any, **__: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = before


def vllm_model(llm: Any) -> Any:
    """The module that vLLM runs, in this process."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()


def prompt_logprobs(llm: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """The engine's log-probability of each token but the first, in prefill."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, seed=0)
    prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
    out = llm.generate(prompts, [params] * len(prompts), use_tqdm=False)
    return [
        [logprobs[token].logprob for logprobs, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)]
        for o, ids in zip(out, sequences, strict=True)
    ]
