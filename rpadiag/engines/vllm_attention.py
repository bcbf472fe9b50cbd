"""vLLM's attention operator, run on tensors that the parent sends.

The operator needs a forward context with block tables, so one forward is held at its first attention while the
parent's calls are served there. Its keys and values go into the same cache slots each time, and each call writes
them before it reads them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from rpadiag.engines.families import family_for

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def send_tensors(connection: Connection, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Send a JSON header and tensors [T, W] as bytes."""
    shapes = [[str(t.dtype).removeprefix("torch."), *t.shape] for t in tensors]
    connection.send_bytes(json.dumps({**header, "tensors": shapes}).encode())
    for tensor in tensors:
        connection.send_bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def receive_tensors(connection: Connection, header: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a header announces."""
    found = []
    for dtype, *shape in header["tensors"]:
        data = bytearray(connection.recv_bytes())
        found.append(torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape))
    return found


@contextlib.contextmanager
def serve_attention(model: torch.nn.Module, connection: Connection) -> Iterator[None]:
    """While the block runs, the first attention that fires answers calls until the parent says stop."""
    config: Any = model.config
    family = family_for(config.architectures)
    facts = family.facts(config)
    paths = [family.rollout["q_rope"].path(n, facts.num_layers) for n in range(facts.num_layers)]
    layers = [model.get_submodule(path) for path in paths]
    held = False

    def hold(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal held
        if held:
            return
        held = True
        connection.send_bytes(json.dumps({"result": "ready"}).encode())
        while True:
            command = json.loads(connection.recv_bytes())
            if command["do"] == "stop":
                return
            qkv = [t.to(args[0].device) for t in receive_tensors(connection, command)]
            send_tensors(connection, {"result": "attended"}, [layers[command["layer"]](*qkv)])

    handle = layers[0].register_forward_pre_hook(hold)
    try:
        yield
    finally:
        handle.remove()
