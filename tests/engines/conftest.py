"""One vLLM process for the tests of a worker: a start takes tens of seconds, another model a second or two."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import SHARED, STARTED_AMID, children, surroundings


@pytest.fixture(scope="session")
def vllm_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """``vllm_on(model, max_model_len=64)``: the engine in BF16 with that model, reloaded where it has another.

    For module fixtures: the engine belongs to the module that asked last.
    """
    from rpadiag.engines.vllm import VllmEngine

    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    started: list[VllmEngine] = []

    def on(model: Path, *, max_model_len: int, max_num_batched_tokens: int = 1024) -> VllmEngine:
        arguments = {"dtype": "bfloat16", "max_num_batched_tokens": max_num_batched_tokens}
        if not started:
            before = children(os.getpid())
            STARTED_AMID["before"] = surroundings()
            started.append(VllmEngine.start(model, max_model_len=max_model_len, log_path=log, **arguments))
            STARTED_AMID["after"] = surroundings()
            SHARED.update(set(children(os.getpid())) - set(before))
        else:
            started[0].reload(model=model, max_model_len=max_model_len, hf_overrides={}, **arguments)
        return started[0]

    yield on
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def trainer(smollm2: Path) -> Iterator[Any]:
    """SmolLM2 in transformers, on the engine's one thread: the split of a matrix product decides the order of its sum."""
    import torch

    from rpadiag.engines.trainer import TrainerEngine

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TrainerEngine.load(smollm2)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(smollm2: Path, vllm_on: Callable[..., Any]) -> Any:
    """SmolLM2 in vLLM, for sequences of up to 63 tokens."""
    return vllm_on(smollm2, max_model_len=64)
