"""Reading the intermediates of a transformers forward, and leaving no trace of it.

Everything a capture changes is a forward hook or one entry of the attention registry, and both are taken
back when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rpadiag.engines.base import ModelFacts
from rpadiag.engines.families import Family, Source
from rpadiag.errors import CaptureError
from rpadiag.sites import split_site

OnSite = Callable[[str, torch.Tensor], None]
AttentionFunction = Callable[..., Any]


def attention_function(model: nn.Module, attention: nn.Module) -> AttentionFunction:
    """The function that the model's configuration sends attention to, as its own modules look it up."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # "eager" is not in the registry: each modeling file falls back to a function of its own.
    eager = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    name = model.config._attn_implementation  # type: ignore[union-attr]
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


@contextlib.contextmanager
def attention_override(model: nn.Module, replacement: AttentionFunction) -> Iterator[None]:
    """Send the model's attention to ``replacement`` while the block runs.

    The entry of the configured implementation is replaced, not the configuration: masks are built by
    the implementation's name and stay what they were.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation  # type: ignore[union-attr]
    local = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = local.get(name)
    local[name] = replacement
    try:
        yield
    finally:
        if before is None:
            del local[name]
        else:
            local[name] = before


def chosen_output(output: Any, source: Source) -> torch.Tensor:
    """The tensor that a source names, of what its module returned."""
    if source.take == "logits":
        logits: torch.Tensor = output.logits
        return logits
    chosen: torch.Tensor = output[source.index] if isinstance(output, tuple) else output
    return chosen.transpose(1, 2) if source.heads_first else chosen


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    """[B * T, W], row after row, of [B, T, W], [B, T, heads, head_dim] or what is so already."""
    return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[0] * tensor.shape[1], -1)


class SiteReader:
    """Calls ``on_site`` for each requested site as a forward reaches it, with a [T, W] view; of B rows [B * T, W], row after row.

    positions: int64 [T] as the rotary embedding received them, after the forward.
    """

    def __init__(
        self, model: nn.Module, family: Family, facts: ModelFacts, sites: Sequence[str], on_site: OnSite
    ) -> None:
        self._model = model
        self._family = family
        self._facts = facts
        self._sites = tuple(s for s in sites if split_site(s)[1] != "logprob")
        self._on_site = on_site
        self._fired: dict[str, int] = {}
        self.positions: torch.Tensor | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on while the block runs, off afterwards; sites that never fired raise when it ends well."""
        with contextlib.ExitStack() as stack:
            rotary = self._model.get_submodule(self._family.trainer_rotary)
            handle = rotary.register_forward_pre_hook(self._read_positions, with_kwargs=True)
            stack.callback(handle.remove)
            heads: dict[int, dict[str, str]] = {}
            for site in self._sites:
                path, source = self._family.source(site, stack="trainer", num_layers=self._facts.num_layers)
                module = self._model.get_submodule(path)
                if source.take in ("query", "key"):
                    heads.setdefault(id(module), {})[source.take] = site
                else:
                    stack.callback(self._hook(module, site, source).remove)
            if heads:
                stack.enter_context(attention_override(self._model, self._attention(heads)))
            yield
        self._check()

    def _hook(self, module: nn.Module, site: str, source: Source) -> Any:
        if source.take == "input":

            def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                values = args or tuple(kwargs.values())
                self._emit(site, values[source.index])

            return module.register_forward_pre_hook(before, with_kwargs=True)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._emit(site, chosen_output(output, source))

        return module.register_forward_hook(after)

    def _attention(self, heads: dict[int, dict[str, str]]) -> AttentionFunction:
        attention = self._model.get_submodule(self._family.trainer["q_rope"].path(0, self._facts.num_layers))
        delegate = attention_function(self._model, attention)

        def capture(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            wanted = heads.get(id(module), {})
            for take, tensor in (("query", query), ("key", key)):
                if take in wanted:
                    self._emit(wanted[take], tensor.transpose(1, 2))
            return delegate(module, query, key, *args, **kwargs)

        return capture

    def _emit(self, site: str, tensor: torch.Tensor) -> None:
        """``tensor`` is [B, T, W], [B, T, heads, head_dim] or, from a module that packs its tokens, [B * T, W]."""
        self._fired[site] = self._fired.get(site, 0) + 1
        self._on_site(site, token_major(tensor))

    def _read_positions(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        self.positions = given.detach().to("cpu", torch.int64, copy=True)[0]

    def _check(self) -> None:
        silent = [s for s in self._sites if s not in self._fired]
        if silent:
            path, _ = self._family.source(silent[0], stack="trainer", num_layers=self._facts.num_layers)
            raise CaptureError(
                f"site {silent[0]} was requested but never fired in engine trainer",
                detail=f"{len(self._sites) - len(silent)} of {len(self._sites)} sites fired; {path} was not called so",
                hint="a patched or compiled model may bypass its modules: load it unpatched, or ask for other sites",
            )
        repeated = [s for s, n in self._fired.items() if n > 1]
        if repeated:
            raise CaptureError(
                f"site {repeated[0]} fired {self._fired[repeated[0]]} times in one forward of engine trainer",
                detail="the site map expects each module to run once per forward",
                hint="turn gradient checkpointing off, or ask for other sites",
            )
