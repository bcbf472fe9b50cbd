"""The trainer's own operation behind a site, fed tensors that another stack captured.

This is what makes a divergence *local*. The operation is never written down again here: the real module
runs, with the submodules before it answering the given tensors and the one after it handing over what it
receives. So whatever patched the model (an alignment, a planted mistake) is what gets replayed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rpadiag.engines.base import ModelFacts
from rpadiag.engines.families import Family, Source
from rpadiag.engines.scoring import token_logprobs
from rpadiag.engines.trainer_capture import attention_function, attention_override, chosen_output, token_major
from rpadiag.errors import NotComparableError, UsageError
from rpadiag.regions import addends
from rpadiag.sites import split_site

Forward = Callable[..., Any]


class _Reached(Exception):
    """Carries a tensor out of a module: control flow, not an error."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("replay reached its site")
        self.tensor = tensor


class _Given(Exception):
    """Carries a layer's arguments out of the decoder: control flow, not an error."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the layer was reached")
        self.arguments = arguments


def replay(
    model: nn.Module,
    family: Family,
    facts: ModelFacts,
    site: str,
    inputs: Sequence[torch.Tensor],
    *,
    positions: Sequence[int] | torch.Tensor | None = None,
    token_ids: Sequence[int] | None = None,
) -> torch.Tensor:
    """Output [T, W] at ``site`` for ``inputs`` in the order of :func:`reads_of`, each [T, W].

    positions: int [T], needed by q_rope, k_rope and attn (the mask); default 0 .. T-1.
    token_ids: needed by ``embed`` (which has no inputs) and ``logprob`` ([T-1, 1]).
    The result is on the device of the inputs. Inputs must have the model's dtype (``logprob`` takes any).
    """
    layer, point = split_site(site)
    home = inputs[0].device if inputs else torch.device("cpu")
    weight = next(model.parameters())
    reads = reads_of(model, family, facts, site)
    _check_inputs(site, reads, inputs, weight.dtype if point != "logprob" else None)
    moved = [tensor.to(weight.device) for tensor in inputs]
    with torch.no_grad():
        if point in ("embed", "logprob"):
            if token_ids is None:
                raise UsageError(f"replaying {site} needs token_ids")
            if point == "logprob":
                return token_logprobs(moved[0], token_ids).to(home)
            ids = torch.as_tensor(token_ids, dtype=torch.int64, device=weight.device)[None]
            return token_major(model.get_submodule(family.trainer["embed"].module)(ids)).to(home)
        path, source = family.source(site, stack="trainer", num_layers=facts.num_layers)
        module = model.get_submodule(path)
        batch = [tensor[None] for tensor in moved]
        if point == "logits":
            return token_major(head_logits(model, family, batch[0])).to(home)
        if len(reads) == 2 and point in _NORM_POINTS:
            return token_major(module(_sum_before(_Places(model, family, facts, layer), point, batch))).to(home)
        if layer is None or point not in _INJECTED:
            return token_major(chosen_output(_call(module, moved[0], source, point, facts), source)).to(home)
        if positions is None:
            positions = range(len(moved[0]))
        return token_major(_INJECTED[point](_Places(model, family, facts, layer), point, batch, positions)).to(home)


def reads_of(model: nn.Module, family: Family, facts: ModelFacts, site: str) -> tuple[str, ...]:
    """Sites whose tensors the trainer's operation behind ``site`` reads, as the model is patched now.

    :func:`rpadiag.sites.inputs_of`, but for two operations that an alignment can merge: a norm that reads the
    residual sum before it was rounded reads both addends, and RoPE that does so with the per-head norm reads the
    projection. Both are found by trying, not by asking who patched the model.
    """
    layer, point = split_site(site)
    reads = facts.reads(site)
    sums = point in _NORM_POINTS and reads != ("embed",)
    if sums and _reads_addends(_Places(model, family, facts, layer), point):
        return facts.reads(reads[0])
    rotated = facts.qk_norm and point in ("q_rope", "k_rope")
    if rotated and _rope_includes_norm(_Places(model, family, facts, layer), point):
        return facts.reads(reads[0])
    return reads


def _check_inputs(site: str, reads: Sequence[str], inputs: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
    if len(inputs) != len(reads):
        raise UsageError(f"{site} reads {len(reads)} sites, {len(inputs)} given", detail=f"reads: {', '.join(reads)}")
    for name, tensor in zip(reads, inputs, strict=True):
        if dtype is not None and tensor.dtype != dtype:
            raise NotComparableError(
                f"{name} is {tensor.dtype}, the trainer runs in {dtype}",
                hint="load the trainer in the dtype that the other stack was captured in",
            )
        if len(tensor) != len(inputs[0]):
            raise NotComparableError(f"{name} has {len(tensor)} tokens, {reads[0]} has {len(inputs[0])}")


def head_logits(model: nn.Module, family: Family, normed: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of the final norm's output [B, T, H]: the head, and what the model itself does after it."""
    source = family.trainer["logits"]
    if source.take != "logits":
        return chosen_output(model.get_submodule(source.module)(normed), source)
    from transformers.modeling_outputs import BaseModelOutputWithPast

    decoder = model.get_submodule(family.trainer["embed"].module.rpartition(".")[0])
    ids = torch.zeros(normed.shape[:2], dtype=torch.int64, device=normed.device)
    with replaced({decoder: _answer(BaseModelOutputWithPast(last_hidden_state=normed))}):
        return chosen_output(model(input_ids=ids, use_cache=False), source)


def _call(module: nn.Module, tensor: torch.Tensor, source: Source, point: str, facts: ModelFacts) -> Any:
    """A module that maps one site to the next; per-head norms see the heads apart."""
    if point not in ("q_norm", "k_norm"):
        return module(tensor[None])
    heads = tensor.reshape(1, len(tensor), -1, facts.head_dim)
    return module(heads.transpose(1, 2) if source.heads_first else heads)


class _Places:
    """The modules of one decoder layer that injection needs, found through the site map."""

    def __init__(self, model: nn.Module, family: Family, facts: ModelFacts, layer: int | None) -> None:
        layer = facts.num_layers - 1 if layer is None else layer  # the head reads the last layer
        self.model, self.facts, self.index = model, facts, layer
        self._family = family
        self.attention = self.module("q_rope")
        self.layer = model.get_submodule(family.trainer["input_norm"].path(layer, facts.num_layers).rpartition(".")[0])
        self.mlp = model.get_submodule(family.trainer["gate"].path(layer, facts.num_layers).rpartition(".")[0])

    def below(self) -> _Places:
        """The layer below this one."""
        return _Places(self.model, self._family, self.facts, self.index - 1)

    def sample(self, width: int) -> torch.Tensor:
        """A fixed random [1, 8, width] in the model's dtype, for trying what a module does."""
        weight = next(self.model.parameters())
        values = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(width))
        return values.to(weight.device, weight.dtype)

    def has(self, point: str) -> bool:
        """Whether the family has a point."""
        return point in self._family.trainer

    def module(self, point: str) -> nn.Module:
        """Module that the trainer's site map names for a point of this layer."""
        return self.model.get_submodule(self._family.trainer[point].path(self.index, self.facts.num_layers))

    def layer_arguments(self, num_tokens: int, positions: Sequence[int] | torch.Tensor) -> dict[str, Any]:
        """Keyword arguments that the model hands this layer: mask, cos and sin, as its own forward builds them."""
        decoder = self.model.get_submodule(self._family.trainer["embed"].module.rpartition(".")[0])
        device = next(self.model.parameters()).device

        def hand_out(_hidden: torch.Tensor, *_args: Any, **kwargs: Any) -> Any:
            raise _Given(kwargs)

        below = itertools.islice(decoder.get_submodule("layers").children(), self.index)
        with replaced({**dict.fromkeys(below, _same), self.layer: hand_out}):
            try:
                decoder(
                    input_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device=device),
                    position_ids=torch.as_tensor(positions, dtype=torch.int64, device=device)[None],
                    use_cache=False,
                )
            except _Given as given:
                return given.arguments
        raise AssertionError(f"the model never called layer {self.index}")


@contextlib.contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Instance-level ``forward`` of each module replaced while the block runs, then as before."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward  # what nn.Module.__setattr__ comes to, after looking for parameters
        yield
    finally:
        for module, original in before.items():
            module.__dict__.pop("forward", None)
            if original is not None:
                module.__dict__["forward"] = original


def _answer(value: Any) -> Forward:
    return lambda *_args, **_kwargs: value


def _same(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


def _reach(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
    raise _Reached(tensor)


def _until_reached(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    try:
        output = module(*args, **kwargs)
    except _Reached as reached:
        return reached.tensor
    return output[0] if isinstance(output, tuple) else output


def _replay_attention(
    places: _Places, point: str, inputs: list[torch.Tensor], positions: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """q_rope and k_rope from the query or key; attn from the rotated query and key and the value."""
    facts = places.facts
    tokens, sample = inputs[0].shape[1], inputs[0]
    given = dict(zip({"q_rope": ("q",), "k_rope": ("k",), "attn": ("q", "k", "v")}[point], inputs, strict=True))

    def heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
        count = facts.num_heads if name == "q" else facts.num_kv_heads
        return tensor.reshape(1, tokens, count, facts.head_dim).transpose(1, 2)

    widths = {"q": facts.num_heads * facts.head_dim, "k": facts.num_kv_heads * facts.head_dim}
    widths["v"] = widths["k"]
    forwards: dict[nn.Module, Forward] = {
        places.module(name): _answer(given.get(name, sample.new_zeros(1, tokens, width)))
        for name, width in widths.items()
    }
    if facts.qk_norm and (point == "attn" or not _rope_includes_norm(places, point)):
        forwards |= {places.module("q_norm"): _same, places.module("k_norm"): _same}
    forwards[places.module("o")] = _reach
    delegate = attention_function(places.model, places.attention)

    def intercept(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *a: Any, **k: Any
    ) -> Any:
        if point == "attn":
            return delegate(module, heads("q", given["q"]), heads("k", given["k"]), value, *a, **k)
        raise _Reached((query if point == "q_rope" else key).transpose(1, 2))

    arguments = places.layer_arguments(tokens, positions)
    hidden = sample.new_zeros(1, tokens, facts.hidden_size)
    with replaced(forwards), attention_override(places.model, intercept):
        return _until_reached(places.attention, hidden_states=hidden, **arguments)


def _replay_residual(
    places: _Places, point: str, inputs: list[torch.Tensor], positions: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """resid_attn and resid_mlp from the stream and what is added to it."""
    stream, delta = inputs
    nothing = torch.full_like(stream, -0.0)  # x + -0.0 is x for every x, -0.0 included
    first = point == "resid_attn"
    forwards: dict[nn.Module, Forward] = {
        places.module("input_norm"): _same,
        places.attention: _answer((delta if first else nothing, None)),
        places.module("post_norm"): _reach if first else _same,
        places.mlp: _answer(delta),
        **{places.module(name): _same for name in ("attn_norm", "mlp_norm") if places.has(name)},
    }
    if _is_patched(places.layer):
        # An aligned layer insists on the addends of its input; those of a stream that came from elsewhere are itself.
        stream = stream.clone()
        addends.attach(stream, stream, nothing, None)
    with replaced(forwards):
        return _until_reached(places.layer, stream, **places.layer_arguments(stream.shape[1], positions))


def _sum_before(places: _Places, point: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The residual sum that a norm reads, as the layer itself adds and hands it on."""
    positions = range(inputs[0].shape[1])
    if point == "post_norm":
        return _replay_residual(places, "resid_attn", inputs, positions)
    return _replay_residual(places if point == "final_norm" else places.below(), "resid_mlp", inputs, positions)


def _is_patched(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or "_old_forward" in module.__dict__


def _reads_addends(places: _Places, point: str) -> bool:
    """Whether a norm's output depends on more than the rounded sum it is handed."""
    norm = places.module(point)
    if not _is_patched(norm):
        return False
    with torch.no_grad():
        width = places.facts.hidden_size
        total = _sum_before(places, point, [places.sample(width), places.sample(width).flip(-1) / 3])
        return not torch.equal(norm(total), norm(total.clone()))


def _rope_includes_norm(places: _Places, point: str) -> bool:
    """Whether the rotated query (or key) comes from the projection whatever the per-head norm answers."""
    if not _is_patched(places.attention):
        return False
    name, facts = point[0], places.facts
    widths = {"q": facts.num_heads * facts.head_dim, "k": facts.num_kv_heads * facts.head_dim}
    widths["v"] = widths["k"]

    def rotate(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        raise _Reached(query if point == "q_rope" else key)

    seen = []
    projections = {places.module(n): _answer(places.sample(width)) for n, width in widths.items()}
    arguments = places.layer_arguments(8, range(8))
    for answer in ({}, {places.module(f"{name}_norm"): _same}):
        with replaced(projections | answer), attention_override(places.model, rotate), torch.no_grad():
            seen.append(_until_reached(places.attention, hidden_states=places.sample(facts.hidden_size), **arguments))
    return torch.equal(seen[0], seen[1])


def _replay_act(
    places: _Places, _point: str, inputs: list[torch.Tensor], _positions: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """act or geglu from gate and up."""
    gate, up = inputs
    forwards: dict[nn.Module, Forward] = {
        places.module("gate"): _answer(gate),
        places.module("up"): _answer(up),
        places.module("down"): _reach,
    }
    with replaced(forwards):
        return _until_reached(places.mlp, gate.new_zeros(1, gate.shape[1], places.facts.hidden_size))


def _replay_experts(
    places: _Places, _point: str, inputs: list[torch.Tensor], _positions: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """expert_out from the normalised input and the router's logits: the router's own choice among given logits."""
    hidden, logits = inputs
    router: Any = places.module("router")
    with _transparent(router, logits):
        chosen = router(logits[0])
    with replaced({router: _answer(chosen)}):
        return _until_reached(places.mlp, hidden)


@contextlib.contextmanager
def _transparent(router: Any, logits: torch.Tensor) -> Iterator[None]:
    """While the block runs, the router's product hands its input on, so that it chooses among given logits."""
    weight, width = router._parameters["weight"], router.hidden_dim
    eye = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    router._parameters["weight"], router.hidden_dim = nn.Parameter(eye, requires_grad=False), logits.shape[-1]
    try:
        yield
    finally:
        router._parameters["weight"], router.hidden_dim = weight, width


_NORM_POINTS = ("input_norm", "post_norm", "final_norm")
_INJECTED: dict[str, Callable[..., torch.Tensor]] = {
    "q_rope": _replay_attention,
    "k_rope": _replay_attention,
    "attn": _replay_attention,
    "resid_attn": _replay_residual,
    "resid_mlp": _replay_residual,
    "act": _replay_act,
    "geglu": _replay_act,
    "expert_out": _replay_experts,
}
