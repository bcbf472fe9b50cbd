"""The switches of a trainer: for each region, and for any of its layers, the trainer's own computation or the aligned one.

What *aligned* means is :data:`MEANINGS`. The regions of :func:`rpadiag.align` follow a contract; the others have no
contract, so their aligned form is a reference that says exactly what it computes, or the rollout engine's own operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rpadiag.engines.borrowed import Attend, row_by_row
from rpadiag.engines.merged import merged_forwards
from rpadiag.engines.products import Product, fp32_product, own_product
from rpadiag.engines.replay import replaced
from rpadiag.engines.trainer_capture import attention_function, attention_override
from rpadiag.errors import UsageError, unknown_name
from rpadiag.regions.align import ContractLike, absent_regions, align, resolve
from rpadiag.regions.align_families import Decoder, find_decoder
from rpadiag.regions.presets import Preset
from rpadiag.sites import ALIGN_NAMES

ATTENTIONS = ("fp32", "eager")
MEANINGS: Mapping[str, str] = {
    "rope": "rounds as the contract says",
    "swiglu": "rounds as the contract says",
    "rmsnorm": "residual add and norm round as the contract says; the final norm goes with the last layer",
    "qk_norm": "the per-head norms round as the contract says; not before RoPE where it keeps them in fp32",
    "attention": "scores, softmax and output in fp32, rounded once at the output",
    "matmul": "one product for q/k/v and one for gate/up, as vLLM lays them out",
    "lm_head": "logits in fp32, not rounded",
}
_OTHER_ATTENTION = {
    "eager": "scores and softmax output rounded to the model's dtype, as transformers' eager attention does",
    "borrowed": "the rollout engine's own operator",
}


class TrainerSwitches:
    """The switches of one model; :meth:`aligned` sets them for the length of a block.

    contract: what the regions of ``align`` follow, in any form that it takes. attention: the aligned backend, ``fp32``, ``eager`` or the
    rollout engine's operator (called row by row with [T, heads * head_dim]). wide_products: matrix products run by FP32
    kernels (:mod:`rpadiag.engines.products`), so merged ones must too. Copies of weights (merged, or FP32 for the head) are made when
    first needed and kept: at most the size of the q/k/v, gate/up and head weights again.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        contract: ContractLike,
        attention: str | Attend = "fp32",
        wide_products: bool = False,
    ) -> None:
        if isinstance(attention, str) and attention not in ATTENTIONS:
            raise unknown_name("aligned attention", attention, ATTENTIONS)
        self._model = model
        self._decoder = find_decoder(model)
        self._preset = resolve(contract, dtype=str(next(self._decoder.final_norm.parameters()).dtype))
        self._attend = attention
        self._make_product = fp32_product if wide_products else own_product
        self._merged: dict[int, list[tuple[nn.Module, Product]]] = {}
        self._wide_head: Product | None = None
        self.num_layers = len(self._decoder.layers)
        self.absent = _absent(self._decoder, self._preset)
        self.regions: dict[str, str] = {r: self._meaning(r) for r in MEANINGS if r not in self.absent}

    def _meaning(self, region: str) -> str:
        if region != "attention" or self._attend == "fp32":
            return MEANINGS[region]
        return _OTHER_ATTENTION["eager" if isinstance(self._attend, str) else "borrowed"]

    @contextlib.contextmanager
    def aligned(self, layers: Mapping[str, Iterable[int] | None]) -> Iterator[None]:
        """Set the switches while the block runs; the model is as before when it ends, however it ends.

        layers: region -> numbers of the layers that are aligned, None for all of them; a region left out, or with no layer,
        stays the trainer's own. ``lm_head`` has no layers: any number switches it. Errors: UsageError for a region
        that is unknown or that this model lacks, and for a layer that it does not have.
        """
        chosen = {region: self._numbers(region, given) for region, given in layers.items()}
        with contextlib.ExitStack() as stack:
            for regions, numbers in _contract_calls(chosen, self._preset):
                stack.enter_context(align(self._model, regions=regions, contract=self._preset, layers=numbers))
            if chosen.get("attention"):
                stack.enter_context(attention_override(self._model, self._attention(chosen["attention"])))
            if chosen.get("matmul"):
                stack.enter_context(replaced(dict(self._merged_in(chosen["matmul"]))))
            if chosen.get("lm_head"):
                stack.enter_context(replaced({self._head(): self._fp32_head()}))
            yield

    def _numbers(self, region: str, given: Iterable[int] | None) -> tuple[int, ...]:
        if region in self.absent:
            raise UsageError(
                f"the model has no switch for region {region}",
                detail=self.absent[region],
                hint=f"choose from {', '.join(self.regions)}",
            )
        if region not in self.regions:
            raise unknown_name("switchable region", region, list(self.regions))
        numbers = tuple(range(self.num_layers)) if given is None else tuple(sorted(set(given)))
        for number in numbers:
            if not 0 <= number < self.num_layers:
                raise UsageError(
                    f"there is no layer {number}", detail=f"the model has layers 0 to {self.num_layers - 1}"
                )
        return numbers

    def _attention(self, layers: Sequence[int]) -> Callable[..., Any]:
        """Attention that sends the chosen layers to the aligned backend and the others where they went before."""
        own = attention_function(self._model, self._decoder.layers[0].self_attn)  # type: ignore[arg-type]
        backend = _BACKENDS[self._attend] if isinstance(self._attend, str) else row_by_row(self._attend)
        chosen = frozenset(layers)

        def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
            return (backend if module.layer_idx in chosen else own)(module, *args, **kwargs)

        return attention

    def _merged_in(self, layers: Sequence[int]) -> list[tuple[nn.Module, Product]]:
        for number in layers:
            if number not in self._merged:
                self._merged[number] = merged_forwards(self._decoder.layers[number], self._make_product)
        return [pair for number in layers for pair in self._merged[number]]

    def _head(self) -> nn.Module:
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Module)
        return head

    def _fp32_head(self) -> Product:
        if self._wide_head is None:
            head: Any = self._head()
            weight = head.weight.detach().to(torch.float32)
            bias = None if head.bias is None else head.bias.detach().to(torch.float32)
            self._wide_head = lambda x: nn.functional.linear(x.to(torch.float32), weight, bias)
        return self._wide_head


def switchable_regions(model: nn.Module, contract: ContractLike) -> dict[str, str]:
    """Regions that :class:`TrainerSwitches` can switch in ``model``, with what *aligned* means for each."""
    return TrainerSwitches(model, contract=contract).regions


def _absent(decoder: Decoder, preset: Preset) -> dict[str, str]:
    """Regions without a switch, with the reason."""
    absent = {}
    for region in ALIGN_NAMES:
        if ("rmsnorm" if region == "qk_norm" else region) not in preset.regions:
            absent[region] = f"contract {preset.name} says nothing about it"
    return absent | absent_regions(decoder)


def _contract_calls(
    chosen: Mapping[str, tuple[int, ...]], preset: Preset
) -> Iterator[tuple[tuple[str, ...], Sequence[int]]]:
    """The calls of ``align`` that make a set of switches: one for each set of layers, RoPE with the per-head norm where the
    contract does not round between the two."""
    rope, heads = set(chosen.get("rope", ())), set(chosen.get("qk_norm", ()))
    boundary: Any = preset.regions.get("qk_norm")
    both = rope & heads if boundary is not None and boundary.mid == "fp32" else set()
    rotation: Any = preset.regions.get("rope")
    if both and rope - both and rotation.cache == "fp32":
        raise UsageError(
            "rope and qk_norm cannot be aligned on different layers under this contract",
            detail="it keeps cos and sin in fp32 and does not round between norm and RoPE",
            hint="give both the same layers",
        )
    calls = [
        (("rmsnorm",), set(chosen.get("rmsnorm", ()))),
        (("rope", "qk_norm"), both),
        (("rope",), rope - both),
        (("qk_norm",), heads - both),
        (("swiglu",), set(chosen.get("swiglu", ()))),
    ]
    for regions, numbers in calls:
        if numbers:
            yield regions, sorted(numbers)


def fp32_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with q, k and v widened to fp32, everything in fp32, rounded once. [B, H, T, D] -> [B, T, H, D].

    The mask is the one that the configured implementation was built; without one every token sees its whole prefix.
    """
    if query.shape[2] > 1 and attention_mask is None and kwargs.get("sliding_window"):
        attention_mask = _window(query.shape[2], kwargs["sliding_window"], query.device)
    output = nn.functional.scaled_dot_product_attention(
        query.to(torch.float32),
        key.to(torch.float32),
        value.to(torch.float32),
        attn_mask=_wide_mask(attention_mask),
        is_causal=attention_mask is None,
        scale=module.scaling if scaling is None else scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.to(query.dtype).transpose(1, 2), None


def _wide_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A boolean mask as it is, an additive one in fp32."""
    return mask if mask is None or mask.dtype == torch.bool else mask.to(torch.float32)


def _window(num_tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Boolean [T, T]: which keys a query sees under a causal sliding window."""
    distance = torch.arange(num_tokens, device=device)[:, None] - torch.arange(num_tokens, device=device)
    return (distance >= 0) & (distance < window)


def eager_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' ``eager_attention_forward`` at dropout 0: scores and probabilities rounded to the model's dtype."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * (module.scaling if scaling is None else scaling)
    if attention_mask is None:
        attention_mask = _window(query.shape[2], query.shape[2], query.device)
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


_BACKENDS: Mapping[str, Callable[..., tuple[torch.Tensor, None]]] = {"fp32": fp32_attention, "eager": eager_attention}
