"""vLLM with nothing observed: what capture is measured against, and replicates of it under rounding noise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def run_plain(
    engine: Any,
    sequences: Sequence[Sequence[int]],
    *,
    scored: bool,
    num_generate: int,
    embedding: torch.nn.Module | None = None,
    noise: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Run token sequences one by one; what :meth:`rpadiag.engines.vllm.VllmEngine.plain` returns.

    noise: (seed, number of the first sequence) of the ULP draws by which the output of ``embedding`` is moved.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    step_s = 0.0
    before = peak_memory(reset=True)
    logprobs: list[list[float]] = []
    sampled: list[list[int]] = []
    for index, ids in enumerate(sequences):
        parameters = SamplingParams(
            max_tokens=num_generate + 1,
            temperature=0.0,
            logprobs=0,
            prompt_logprobs=0 if scored else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(f"{index}", {"prompt_token_ids": list(ids)}, parameters)
        with contextlib.ExitStack() as stack:
            if noise is not None and embedding is not None:
                from rpadiag.engines.noise import noisy_embedding

                stack.enter_context(noisy_embedding(embedding, len(ids), seed=noise[0], number=noise[1] + index))
            while engine.has_unfinished_requests():
                began = time.monotonic()
                outputs = engine.step()
                step_s += time.monotonic() - began
                for output in outputs:
                    if output.finished:
                        tokens = [int(t) for t in output.outputs[0].token_ids][:num_generate]
                        logprobs.append(_logprobs(output, ids, tokens))
                        sampled.append(tokens)
    return {
        "step_s": step_s,
        "logprobs": logprobs,
        "sampled": sampled,
        "bytes_before": before,
        "peak_bytes": peak_memory(),
    }


def _logprobs(output: Any, ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Of the prompt's tokens but the first, where they were asked for, and of the generated ones."""
    given = output.prompt_logprobs or [None] * len(ids)
    found = [float(entry[ids[t]].logprob) for t, entry in enumerate(given) if t and entry is not None]
    return found + [float(output.outputs[0].logprobs[i][token].logprob) for i, token in enumerate(tokens)]


def peak_memory(*, reset: bool = False) -> int | None:
    """Most bytes that this process has had reserved on its GPU since the last reset; None without one."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_reserved())
    return int(torch.cuda.max_memory_reserved())
