"""The transformers model families that ``align`` knows: which class plays which part.

A module is recognised by the class that defines its ``forward``, in transformers' own modeling file. A subclass
that overrides ``forward`` computes something else and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from rpadiag.errors import InputError

PARTS = ("attention", "layer", "mlp", "norm", "rotary")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of ``transformers.models``.

    prefix: of its class names; offset_norm: norms multiply by 1 + weight; four_norms: norms behind attention and MLP
    too, before the add; late_qk_norm: per-head norms run after all three projections; attention_extras: what the
    attention interface is passed beside dropout and scaling, as (argument, attribute of the module or ``config.``
    attribute); experts: class of the block that some layers have in place of the MLP.
    """

    name: str
    prefix: str
    offset_norm: bool = False
    four_norms: bool = False
    late_qk_norm: bool = False
    attention_extras: tuple[tuple[str, str], ...] = ()
    experts: str | None = None

    @property
    def module_name(self) -> str:
        """Modeling module in transformers."""
        return f"transformers.models.{self.name}.modeling_{self.name}"

    def class_names(self) -> dict[str, str]:
        """Class name of each part."""
        suffixes = ("Attention", "DecoderLayer", "MLP", "RMSNorm", "RotaryEmbedding")
        return {part: self.prefix + suffix for part, suffix in zip(PARTS, suffixes, strict=True)}


_WINDOW = (("sliding_window", "sliding_window"),)

FAMILIES: tuple[Family, ...] = (
    Family(name="llama", prefix="Llama"),
    Family(name="qwen2", prefix="Qwen2", attention_extras=_WINDOW),
    Family(name="qwen3", prefix="Qwen3", attention_extras=_WINDOW),
    Family(name="qwen3_moe", prefix="Qwen3Moe", attention_extras=_WINDOW, experts="Qwen3MoeSparseMoeBlock"),
    Family(name="mistral", prefix="Mistral", attention_extras=(("sliding_window", "config.sliding_window"),)),
    Family(name="gemma", prefix="Gemma", offset_norm=True),
    Family(
        name="gemma2",
        prefix="Gemma2",
        offset_norm=True,
        four_norms=True,
        attention_extras=(*_WINDOW, ("softcap", "attn_logit_softcapping")),
    ),
    Family(
        name="gemma3",
        prefix="Gemma3",
        offset_norm=True,
        four_norms=True,
        late_qk_norm=True,
        attention_extras=_WINDOW,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of one decoder found in a model: its layers in order, the final norm and the rotary embedding."""

    family: Family
    layers: tuple[nn.Module, ...]
    final_norm: nn.Module
    rotary: nn.Module
    qk_norm: bool

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have an MLP, not experts."""
        return tuple(n for n, layer in enumerate(self.layers) if not has_experts(layer, self.family))

    @property
    def activation(self) -> str | None:
        """Class name of the activation of the MLPs; None where every layer has experts."""
        dense = self.dense_layers
        return type(self.layers[dense[0]].mlp.act_fn).__name__ if dense else None  # type: ignore[union-attr]


def find_decoder(model: nn.Module) -> Decoder:
    """The decoder inside ``model``, looked for through wrappers (PEFT, FSDP, a task head).

    Errors: InputError when no known decoder or more than one is inside, or a part is not transformers' own.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"align takes a model, and this is a {type(model).__name__}", hint="give the transformers model itself"
        )
    found = [(module, family) for module in model.modules() if (family := _decoder_family(module)) is not None]
    if not found:
        known = ", ".join(f.name for f in FAMILIES)
        raise InputError(
            f"align does not know the model {type(model).__name__}",
            detail=f"it holds no decoder of a known family; known families: {known}",
            hint="only transformers' own modeling classes are recognised",
        )
    if len(found) > 1:
        raise InputError(
            f"align found {len(found)} decoders in {type(model).__name__}", hint="align them one at a time"
        )
    decoder, family = found[0]
    layers = tuple(_unwrap(layer, "layer", family) for layer in decoder.layers)  # type: ignore[union-attr]
    for layer in layers:
        _check_layer(layer, family)
    return Decoder(
        family=family,
        layers=layers,
        final_norm=_unwrap(decoder.norm, "norm", family),  # type: ignore[arg-type]
        rotary=_unwrap(decoder.rotary_emb, "rotary", family),  # type: ignore[arg-type]
        qk_norm=hasattr(layers[0].self_attn, "q_norm"),
    )


def _decoder_family(module: nn.Module) -> Family | None:
    """Family of a module that holds decoder layers, a final norm and a rotary embedding, else None."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or not hasattr(module, "rotary_emb"):
        return None
    for family in FAMILIES:
        if any(_plays(inner, "layer", family) for inner in layers[0].modules()):
            return family
    return None


def _plays(module: nn.Module, part: str, family: Family) -> bool:
    name = family.class_names()[part]
    return any(c.__name__ == name and c.__module__ == family.module_name for c in type(module).__mro__)


def _unwrap(module: nn.Module, part: str, family: Family) -> nn.Module:
    """The family's own module at or inside ``module`` (wrappers such as FSDP's hold it)."""
    for inner in module.modules():
        if _plays(inner, part, family):
            _check_own_forward(inner, part, family)
            return inner
    raise InputError(f"align expected {family.class_names()[part]} and found {type(module).__name__}")


def _check_own_forward(module: nn.Module, part: str, family: Family) -> None:
    """Refuse a subclass that computes something else."""
    definer = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
    expected = family.class_names()[part]
    if definer.__name__ != expected or definer.__module__ != family.module_name:
        raise InputError(
            f"align found {definer.__module__}.{definer.__name__} where transformers' {expected} is expected",
            detail="its forward computes something else than the one that would be replaced",
            hint="undo the other patch first",
        )


def _check_layer(layer: nn.Module, family: Family) -> None:
    _unwrap(layer.self_attn, "attention", family)  # type: ignore[arg-type]
    if not has_experts(layer, family):
        _unwrap(layer.mlp, "mlp", family)  # type: ignore[arg-type]
    for norm in layer_norms(layer, family):
        _unwrap(norm, "norm", family)


def has_experts(layer: nn.Module, family: Family) -> bool:
    """Whether a decoder layer has experts in place of an MLP."""
    return family.experts is not None and any(
        c.__name__ == family.experts and c.__module__ == family.module_name
        for module in layer.modules()
        for c in type(module).__mro__
    )


def layer_norms(layer: nn.Module, family: Family) -> Iterator[nn.Module]:
    """The norms of a decoder layer in execution order."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if family.four_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield getattr(layer, name)


def own_modules(layer: nn.Module, family: Family, part: str) -> list[nn.Module]:
    """The family's modules of one part in a layer, PEFT copies included."""
    return [m for m in layer.modules() if _plays(m, part, family)]
