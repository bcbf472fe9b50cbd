"""First-order effect of small changes at sites on a trainer's logprobs: the trainer's own forward in FP32, differentiated.

Rounding is left out on purpose: its derivative is zero or infinite. The point of differentiation is the FP32 forward, which is
within rounding of every rounded one. Forward mode gives the change of each logprob (J e), backward mode the change of their sum by
site and token (e times gradient) for all sites in one pass. Sequences go through together, right-padded: attention is causal, so no
token sees padding. Shape legend: B sequences, T tokens of the longest, W width of a site.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad

from rpadiag.engines.families import Source
from rpadiag.engines.switches import eager_attention
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.trainer_capture import attention_override

Visit = Callable[[str, Source, torch.Tensor], torch.Tensor | None]


class LinearTrainer:
    """A copy of a trainer in FP32 (or FP64), whose forward can be differentiated at sites. Holds its weights again, twice as wide.

    Make it outside of any alignment: patches of the model are copied with it. Attention runs as matrix products and a softmax, because fused
    kernels have no forward-mode derivative.
    """

    def __init__(self, trainer: TrainerEngine, *, dtype: torch.dtype = torch.float32) -> None:
        model: Any = copy.deepcopy(trainer.model).to(dtype)
        model.requires_grad_(False)
        self._engine = TrainerEngine.wrap(model, name=trainer.name)
        self.facts = trainer.facts

    def changes(self, token_ids: Sequence[int], errors: Mapping[str, torch.Tensor]) -> np.ndarray:
        """float64 [T-1]: first-order change of each logprob when every site moves by its error [T, W], in nats."""
        return self.changes_of([token_ids], {site: error[None] for site, error in errors.items()})[0]

    def changes_of(self, sequences: Sequence[Sequence[int]], errors: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
        """:meth:`changes` of each sequence; errors [B, T, W], whatever stands behind a sequence's end is left out."""
        here = {site: error for site, error in errors.items() if site != "logits"}

        def add(site: str, source: Source, tensor: torch.Tensor) -> torch.Tensor | None:
            tangent = _shaped_like(errors[site], tensor, source)
            nothing = forward_ad.make_dual(torch.zeros_like(tensor), tangent)
            if (
                source.take == "input"
            ):  # the residual stream goes on beside the norm that reads it: move the tensor itself
                tensor.add_(nothing)
                return None
            return tensor + nothing

        ids = self._padded(sequences)
        with forward_ad.dual_level(), torch.no_grad(), self._visited(here, add):
            logits = self._engine.model(input_ids=ids, use_cache=False).logits
            if "logits" in errors:
                moved = errors["logits"].to(logits)
                logits = logits + forward_ad.make_dual(torch.zeros_like(logits), moved)
            change = forward_ad.unpack_dual(_logprobs(logits, ids)).tangent
            rows = np.zeros((len(ids), ids.shape[1] - 1)) if change is None else change.double().cpu().numpy()
        return [row[: len(sequence) - 1] for row, sequence in zip(rows, sequences, strict=True)]

    def gradients(self, token_ids: Sequence[int], sites: Sequence[str]) -> dict[str, torch.Tensor]:
        """Gradient [T, W] of the sum of all logprobs at each site, from one backward pass."""
        return {site: gradient[0] for site, gradient in self.gradients_of([token_ids], sites).items()}

    def gradients_of(self, sequences: Sequence[Sequence[int]], sites: Sequence[str]) -> dict[str, torch.Tensor]:
        """:meth:`gradients` of several sequences, [B, T, W]; zero behind a sequence's end."""
        found: dict[str, torch.Tensor] = {}
        ids = self._padded(sequences)

        def watch(site: str, source: Source, tensor: torch.Tensor) -> None:
            tensor.register_hook(lambda grad: found.__setitem__(site, _token_major(grad, source, ids.shape)))

        embed = self._engine.model.get_submodule(self._engine.family.trainer["embed"].module)
        leaf = embed.register_forward_hook(lambda _m, _a, out: out.detach().requires_grad_())
        real = torch.zeros(len(sequences), ids.shape[1] - 1, device=ids.device)
        for row, sequence in zip(real, sequences, strict=True):
            row[: len(sequence) - 1] = 1.0
        try:
            with self._visited([s for s in sites if s != "logits"], watch), torch.enable_grad():
                logits = self._engine.model(input_ids=ids, use_cache=False).logits
                if "logits" in sites:
                    logits.register_hook(lambda grad: found.__setitem__("logits", grad))
                (_logprobs(logits, ids) * real).sum().backward()
        finally:
            leaf.remove()
        return found

    def _padded(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """int64 [B, T] on the model's device, token 0 behind each sequence's end."""
        rows = [torch.as_tensor(list(ids), dtype=torch.int64) for ids in sequences]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._engine.device)

    @contextlib.contextmanager
    def _visited(self, sites: Sequence[str] | Mapping[str, Any], visit: Visit) -> Iterator[None]:
        """Call ``visit`` with the tensor at each site as the forward makes it; what it returns takes the tensor's place."""
        model, family, facts = self._engine.model, self._engine.family, self._engine.facts
        heads: dict[tuple[int, str], tuple[str, Source]] = {}
        with contextlib.ExitStack() as stack:
            for site in sites:
                path, source = family.source(site, stack="trainer", num_layers=facts.num_layers)
                module = model.get_submodule(path)
                if source.take in ("query", "key"):
                    heads[id(module), source.take] = site, source
                elif source.take == "input":
                    hook = module.register_forward_pre_hook(_before(site, source, visit), with_kwargs=True)
                    stack.callback(hook.remove)
                else:
                    stack.callback(module.register_forward_hook(_after(site, source, visit)).remove)

            def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                given = {"query": query, "key": key}
                for take, tensor in given.items():
                    if (id(module), take) in heads:
                        moved = visit(*heads[id(module), take], tensor)
                        given[take] = tensor if moved is None else moved
                return eager_attention(module, given["query"], given["key"], *args, **kwargs)

            stack.enter_context(attention_override(model, attention))
            yield


def _logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B, T-1] from logits [B, T, V], in their dtype."""
    return torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]


def _before(site: str, source: Source, visit: Visit) -> Any:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args or tuple(kwargs.values())
        visit(site, source, values[source.index])

    return hook


def _after(site: str, source: Source, visit: Visit) -> Any:
    def hook(_module: Any, _args: Any, output: Any) -> Any:
        moved = visit(site, source, output[source.index] if isinstance(output, tuple) else output)
        if moved is None or not isinstance(output, tuple):
            return moved
        return (*output[: source.index], moved, *output[source.index + 1 :])

    return hook


def _heads_first(source: Source) -> bool:
    return source.take in ("query", "key") or source.heads_first


def _token_major(tensor: torch.Tensor, source: Source, shape: Sequence[int]) -> torch.Tensor:
    """[B, T, W] of a tensor at a site, [B, T, ...] or [B, heads, T, head_dim]; shape: B and T."""
    laid = tensor.transpose(1, 2) if _heads_first(source) else tensor
    return laid.reshape(*shape, -1)


def _shaped_like(error: torch.Tensor, tensor: torch.Tensor, source: Source) -> torch.Tensor:
    """An error [B, T, W] in the shape and dtype of the tensor at its site."""
    moved = error.to(tensor)
    if not _heads_first(source):
        return moved.reshape(tensor.shape)
    rows, heads, tokens, width = tensor.shape
    return moved.reshape(rows, tokens, heads, width).transpose(1, 2)
