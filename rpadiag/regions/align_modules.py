"""The forward methods that ``align`` gives to modules of a transformers model. Shape legend: B batch, T tokens,
H heads, D head size, R rotary size.

Every function takes the module first, is bound to it, and reads its parameters at call time, so that adapters, hooks,
sharding and copies of the model keep working. Submodules are called, never bypassed: their hooks fire with the
tensors that they have in the unaligned model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpadiag.errors import InputError
from rpadiag.regions.addends import Channel, Reroute, addends_of, attach, take_loss
from rpadiag.regions.align_families import Family
from rpadiag.regions.ops import NormRopeOperation, RmsNormOperation, RopeOperation, SwigluOperation
from rpadiag.regions.rounding import store


def norm_eps(module: Any) -> float:
    """Epsilon of a norm module of any family."""
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


@dataclass(frozen=True, kw_only=True)
class NormForward:
    """Forward of an RMSNorm module: of its input, or of the addends that the input is the rounded sum of.

    expects: where those addends come from and where the norm is, if they must be there: (number of the layer, name of the norm).
    """

    operation: RmsNormOperation
    channel: Channel
    reads_sum: bool
    expects: tuple[int, str] | None = None

    def __call__(self, module: Any, hidden_states: Tensor) -> Tensor:
        ready = self.channel.take_ready(hidden_states)
        if ready is not None:
            return ready
        addends = addends_of(hidden_states, self.channel) if self.reads_sum else None
        if addends is None:
            refuse_loss(hidden_states, self.channel, self.expects, UNROUNDED)
            return self.operation(hidden_states, module.weight, None, norm_eps(module))  # type: ignore[return-value]
        x, residual = addends
        y, stored = self.operation(x, module.weight, Reroute.apply(hidden_states, residual), norm_eps(module))
        self.channel.leave(y, stored, hidden_states)
        return y


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """How one residual add is done: ``truncate``: the store mode; ``keep``: its norm reads the unrounded sum."""

    truncate: bool = False
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerForward:
    """Forward of a decoder layer with its two residual adds.

    operation: the norms'. incoming: the layer below keeps the addends of this layer's input, so they must be there.
    """

    number: int
    family: Family
    channel: Channel
    operation: RmsNormOperation
    incoming: bool
    after_attention: SumPlan
    after_mlp: SumPlan

    def __call__(self, module: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.incoming and hidden_states.dtype != torch.float32:
            self._check_incoming(hidden_states)
        normed, residual = self._norm(module.input_layernorm, hidden_states)
        hidden_states, _ = module.self_attn(hidden_states=normed, **kwargs)
        if self.family.four_norms:
            hidden_states = module.post_attention_layernorm(hidden_states)
        second = module.pre_feedforward_layernorm if self.family.four_norms else module.post_attention_layernorm
        normed, residual = self._add_and_norm(second, hidden_states, residual)
        hidden_states = module.mlp(normed)
        if self.family.four_norms:
            hidden_states = module.post_feedforward_layernorm(hidden_states)
        return self._add(hidden_states, residual, self.after_mlp)

    def _add_and_norm(self, norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The add and the norm inside the layer: in one operation where the norm module is plain, its weight at hand."""
        plan = self.after_attention
        plain = type(norm).__module__ == self.family.module_name and "_hf_hook" not in norm.__dict__
        if not (plan.keep and plain and x.dtype == residual.dtype == norm.weight.dtype and x.dtype != torch.float32):
            return self._norm(norm, self._add(x, residual, plan))
        y, stored = self.operation(x, norm.weight, residual, norm_eps(norm))
        self.channel.hand(stored, y)
        return norm(stored), stored

    def _norm(self, norm: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The normed tensor, and the residual stream to go on with: the norm's own copy where it made one."""
        self.channel.listen()
        normed = norm(hidden_states)
        made = self.channel.take_stored(normed, hidden_states)
        return normed, hidden_states if made is None else made

    def _add(self, x: Tensor, residual: Tensor, plan: SumPlan) -> Tensor:
        """``residual + x`` as the model does it, stored as the contract says."""
        total = Truncated.apply(x, residual) if plan.truncate and x.dtype == residual.dtype else residual + x
        if plan.keep and x.dtype == residual.dtype and x.dtype != torch.float32:
            attach(total, x, residual, self.channel)
        return total

    def _check_incoming(self, hidden_states: Tensor) -> None:
        if torch.compiler.is_compiling():
            kept = self.channel.addends
            there = kept is not None and kept[0] is hidden_states
        else:
            there = addends_of(hidden_states, self.channel) is not None
            self.channel.pending = there  # the first norm is to read them as well
        if not there:
            raise lost_sum(self.number - 1, f"layer {self.number}", *UNROUNDED)


# what a contract does, and what needs no such sum
STORED = "a contract whose norms read stored sums (sum=lp variance=rounded), such as vllm-eager"
UNROUNDED = ("normalises the sum before it is rounded", STORED)


def refuse_loss(x: Tensor, channel: Channel, expects: tuple[int, str] | None, why: tuple[str, str]) -> None:
    """Raise :func:`lost_sum` where the norm that was handed ``x`` expects a sum, has found none, and one was left."""
    if expects is not None and take_loss(x, channel):
        raise lost_sum(*expects, *why)


def lost_sum(number: int, reader: str, what: str, instead: str) -> InputError:
    """The error of ``reader``, whose input is not the tensor that layer ``number`` made. what: the contract does; instead: what needs no such sum."""
    return InputError(
        f"the unrounded residual sum of layer {number} did not reach {reader}",
        detail=f"the contract {what}, and the hidden states handed to {reader} are another tensor than the one that layer {number} made",
        hint=f"a hook that replaces hidden states, a device map that moves them between layers, and torch.compile together with "
        f"gradient checkpointing or beyond torch._dynamo.config.recompile_limit need {instead}",
    )


class Truncated(torch.autograd.Function):
    """``residual + x`` in fp32, stored toward zero; the gradient of both addends is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: one lp dtype."""
        return store(x.to(torch.float32) + residual.to(torch.float32), x.dtype, "truncate")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Rounding counts as the identity."""
        return grad, grad


@dataclass(frozen=True, kw_only=True)
class MlpForward:
    """Forward of a gated MLP with a SiLU; the activation module itself is not called."""

    operation: SwigluOperation

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        return module.down_proj(self.operation(module.gate_proj(x), module.up_proj(x)))


@dataclass(frozen=True, kw_only=True)
class AttentionForward:
    """Forward of an attention module: projections, per-head norms if any, RoPE, the attention interface.

    rotate: RoPE under the contract. norm_rotate: norm and RoPE in one, for a contract that does not round the normed
    query and key in between; the norm modules are still called, for their hooks.
    """

    family: Family
    rotate: RopeOperation
    norm_rotate: NormRopeOperation | None

    def __call__(
        self,
        module: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, module.head_dim)
        cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(1) for table in position_embeddings)
        (query, q_normed), (key, k_normed) = (self._project(module, which, hidden_states) for which in "qk")
        value = module.v_proj(hidden_states).view(head_shape).transpose(1, 2)
        if self.family.late_qk_norm:
            q_normed, k_normed = (
                norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in ((module.q_norm, query), (module.k_norm, key))
            )
        query, key = self._turn(module, query, key, q_normed, k_normed, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        output, weights = _attention_interface(module, self.family)(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            **_extras(module, self.family),
            **kwargs,
        )
        return module.o_proj(output.reshape(*input_shape, -1).contiguous()), weights

    def _project(self, module: Any, which: str, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Projection to queries or keys, [B, T, H, D], and the same after its norm, if it has one here."""
        x = getattr(module, f"{which}_proj")(hidden_states)
        x = x.view(*hidden_states.shape[:-1], -1, module.head_dim)
        norm = None if self.family.late_qk_norm else getattr(module, f"{which}_norm", None)
        return x, x if norm is None else norm(x)

    def _turn(
        self, module: Any, query: Tensor, key: Tensor, q_normed: Tensor, k_normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Query and key after RoPE, [B, H, T, D], from [B, T, H, D] before and after their norms."""
        if self.norm_rotate is None:
            return self.rotate.pair(q_normed.transpose(1, 2), k_normed.transpose(1, 2), cos, sin)
        eps = norm_eps(module.q_norm)
        return (
            self.norm_rotate(query.transpose(1, 2), module.q_norm.weight, cos, sin, eps),
            self.norm_rotate(key.transpose(1, 2), module.k_norm.weight, cos, sin, eps),
        )


def _attention_interface(module: Any, family: Family) -> Callable[..., tuple[Tensor, Tensor | None]]:
    modeling: Any = sys.modules[family.module_name]
    return modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, modeling.eager_attention_forward
    )


def _extras(module: Any, family: Family) -> dict[str, Any]:
    """Family-specific arguments of the attention interface."""
    out = {}
    for argument, source in family.attention_extras:
        holder, _, name = source.rpartition(".")
        out[argument] = getattr(module.config if holder else module, name, None)
    return out


@dataclass(frozen=True, kw_only=True)
class UncastRotaryForward:
    """Forward of a rotary embedding that returns cos and sin in float32, as computed, whatever the model's dtype."""

    original: Callable[..., tuple[Tensor, Tensor]]

    def __call__(self, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.original(module, x.new_empty(0, dtype=torch.float32), *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class CastAttentionForward:
    """The model's own attention forward behind a cast of cos and sin, for layers left out of a cache=fp32 alignment."""

    original: Callable[..., Any]

    def __call__(
        self, module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        cos, sin = (table.to(hidden_states.dtype) for table in position_embeddings)
        return self.original(module, hidden_states, (cos, sin), *args, **kwargs)
