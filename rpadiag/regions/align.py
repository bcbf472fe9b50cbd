"""``align``: give the regions of a transformers model the rounding positions of another implementation, in place.

    with rpadiag.align(model, regions=("rope",), contract="vllm-compiled"):
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()

Only ``forward`` of single modules is replaced, on the instance: parameters, state dict, class identity, hooks,
adapters and save/load are untouched, and ``undo`` puts back what was there.
"""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import nn

from rpadiag.contracts import Contract, QkRopeContract, RmsNormContract, RopeContract, SwigluContract
from rpadiag.errors import InputError, UsageError, unknown_name
from rpadiag.regions.addends import Channel
from rpadiag.regions.align_carry import CarriedLayerForward, CarriedNormForward
from rpadiag.regions.align_families import Decoder, find_decoder, own_modules
from rpadiag.regions.align_modules import (
    AttentionForward,
    CastAttentionForward,
    LayerForward,
    MlpForward,
    NormForward,
    SumPlan,
    UncastRotaryForward,
)
from rpadiag.regions.ops import NormRopeOperation, RmsNormOperation, RopeOperation, SwigluOperation
from rpadiag.regions.presets import Preset, find_preset, load_preset, preset_from_dict, vllm_cpu_preset
from rpadiag.sites import ALIGN_NAMES, ALL, check_aligned

ContractLike = str | Path | Preset | Contract | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Patch:
    """One replaced forward. slot: the instance attribute; previous: what the instance had there, or None."""

    module: nn.Module
    slot: str
    installed: Callable[..., Any]
    previous: Any


@dataclass(kw_only=True)
class Alignment:
    """What :func:`align` did, and the way back. A context manager; ``undo`` twice is once."""

    contracts: Mapping[str, Contract]
    layers: tuple[int, ...]
    num_layers: int
    preset: str
    kernels: str
    mid: str
    carry: str = "lp"
    _patches: list[_Patch] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put every forward back. Errors: UsageError when another patch was put on top since; nothing is undone then."""
        for patch in self._patches:
            if patch.module.__dict__.get(patch.slot) is not patch.installed:
                raise UsageError(
                    f"the aligned forward of {type(patch.module).__name__} was replaced since",
                    hint="undo alignments and other patches in the reverse order",
                )
        while self._patches:
            patch = self._patches.pop()
            if patch.previous is None:
                del patch.module.__dict__[patch.slot]
            else:
                patch.module.__dict__[patch.slot] = patch.previous

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def to_dict(self) -> dict[str, Any]:
        """JSON form for a manifest: preset, contract by region, layers, kernels, ``mid`` and ``carry`` as they took effect."""
        return {
            "preset": self.preset,
            "regions": {region: contract.to_dict() for region, contract in self.contracts.items()},
            "names": {region: contract.name() for region, contract in self.contracts.items()},
            "layers": list(self.layers),
            "kernels": self.kernels,
            "mid": self.mid,
            "carry": self.carry,
        }

    def _install(self, module: nn.Module, spec: Callable[..., Any]) -> None:
        # accelerate's dispatch keeps the real forward in _old_forward, behind its own.
        slot = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
        previous = module.__dict__.get(slot)
        if previous is not None and slot == "forward":
            aligned = getattr(previous, "_rpadiag_aligned", False)
            raise UsageError(
                f"{type(module).__name__} already has a forward of its own",
                detail="it is aligned already" if aligned else "another library patched this instance",
                hint="undo that first",
            )

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return spec(self, *args, **kwargs)

        forward._rpadiag_aligned = True  # type: ignore[attr-defined]
        installed = types.MethodType(forward, module)
        module.__dict__[slot] = installed
        self._patches.append(_Patch(module=module, slot=slot, installed=installed, previous=previous))


def align(
    model: nn.Module,
    regions: Sequence[str] | None = None,
    contract: ContractLike = "fp32-output",
    layers: Iterable[int] | None = None,
    kernels: str = "auto",
) -> Alignment:
    """Replace the rounding of ``regions`` in ``model`` by that of ``contract``, in place; returns the way back.

    model: a transformers causal LM or decoder of a known family, wrapped or not (PEFT, FSDP). regions: any of
    rope, swiglu, rmsnorm, qk_norm; by default (``all``) what the contract names and the model has. contract: a preset's name
    (``fp32-output``, ``vllm-compiled``, ``vllm-eager``, ``vllm-cpu``, ...; an unknown name is answered with all of them), a JSON file (as fingerprint writes),
    a Preset, one region's Contract, or a mapping from region to contract. Which residual sums a preset or file leaves unrounded
    (its carry) comes with rmsnorm. layers: numbers of the layers to align; all by default. The final norm goes with the last layer. kernels: ``auto`` runs the
    Triton kernels on CUDA where they are installed, ``reference`` never, ``triton`` always.

    Hooks may replace hidden states where the contract's norms read stored sums; elsewhere a sum that does not reach its norm is an error in the forward.
    Edits in place are noticed, but not under torch.inference_mode, torch.compile or through ``.data``, where PyTorch counts none.

    Errors: InputError for a model of another family, listing the known ones; UsageError for unknown names, for a region
    the model lacks, and for a model whose modules are already aligned. The model is unchanged when it raises.
    """
    decoder = find_decoder(model)
    preset = resolve(contract, dtype=str(next(decoder.final_norm.parameters()).dtype))
    chosen = _choose_regions(decoder, preset, regions)
    contracts = _contracts(decoder, preset, chosen)
    numbers = _choose_layers(len(decoder.layers), layers)
    mid = preset.regions.get("qk_norm")
    fused = {"rope", "qk_norm"} <= set(chosen) and isinstance(mid, QkRopeContract) and mid.mid == "fp32"
    alignment = Alignment(
        contracts=contracts,
        layers=numbers,
        num_layers=len(decoder.layers),
        preset=preset.name,
        kernels=kernels,
        mid="fp32" if fused else "lp",
        carry=preset.carry if "rmsnorm" in chosen else "lp",
    )
    try:
        if alignment.carry != "lp":
            _align_carried_norms(alignment, decoder)
        elif "rmsnorm" in chosen:
            _align_norms(alignment, decoder)
        if "qk_norm" in chosen:
            _align_head_norms(alignment, decoder, preset)
        if "rope" in chosen:
            _align_rope(alignment, decoder, preset, fused=fused)
        if "swiglu" in chosen:
            _align_swiglu(alignment, decoder)
    except BaseException:
        alignment.undo()
        raise
    return alignment


def resolve(contract: ContractLike, *, dtype: str = "bfloat16") -> Preset:
    """A preset from any of the forms that :func:`align` takes. ``vllm-cpu`` means the vllm-cpu of this machine for the
    model's ``dtype``: its kernels store another way where the CPU lacks AVX512_BF16."""
    if isinstance(contract, Preset):
        return contract
    if isinstance(contract, Contract):
        return _custom({contract.region: contract})
    if isinstance(contract, Mapping):
        if all(isinstance(value, Contract) for value in contract.values()) and contract:
            return _custom({str(region): value for region, value in contract.items()})
        return preset_from_dict(contract)
    if not isinstance(contract, str | Path):
        raise UsageError(
            f"contract is a {type(contract).__name__}", hint="give a preset's name, or the file of rpadiag fingerprint"
        )
    if isinstance(contract, Path) or contract.endswith(".json"):
        return load_preset(Path(contract))
    return vllm_cpu_preset(dtype) if contract == "vllm-cpu" else find_preset(contract)


def _custom(regions: Mapping[str, Contract]) -> Preset:
    for region, contract in regions.items():
        if region not in ALIGN_NAMES:
            raise unknown_name("region", region, ALIGN_NAMES)
        if contract.region != region:
            raise UsageError(f"a contract of {contract.region} was given for region {region}")
    return Preset(name="custom", text="given in Python", versions="", source="", evidence="", regions=dict(regions))


def _choose_regions(decoder: Decoder, preset: Preset, regions: Sequence[str] | None) -> tuple[str, ...]:
    absent = absent_regions(decoder)
    given: object = [part.strip() for part in regions.split(",")] if isinstance(regions, str) else regions
    if given is not None and not isinstance(given, Iterable):
        raise UsageError(f"regions takes names in a list, not {regions!r}", hint=f"some of {', '.join(ALIGN_NAMES)}")
    chosen = (ALL,) if given is None else check_aligned(given)
    if chosen == (ALL,):
        named = (
            r for r in ALIGN_NAMES if r in preset.regions and not (r == "qk_norm" and "rmsnorm" not in preset.regions)
        )
        chosen = tuple(r for r in named if r not in absent)
    for region in chosen:
        if region in absent:
            raise UsageError(f"the model has no region {region}", detail=absent[region], hint=f"leave {region} out")
        needed = "rmsnorm" if region == "qk_norm" else region
        if needed not in preset.regions:
            raise UsageError(f"contract {preset.name} says nothing about region {needed}")
    if not chosen:
        raise UsageError(
            "no region to align", hint=f"choose from {', '.join(r for r in ALIGN_NAMES if r not in absent)}"
        )
    return chosen


def absent_regions(decoder: Decoder) -> dict[str, str]:
    """Regions that this model does not have, with the reason."""
    absent = {}
    if not decoder.qk_norm:
        absent["qk_norm"] = f"{decoder.family.name} has no per-head norm of queries and keys"
    if decoder.activation is None:
        absent["swiglu"] = (
            f"every layer of this {decoder.family.name} has experts, whose products no contract describes"
        )
    elif decoder.activation not in ("SiLU", "SiLUActivation"):
        absent["swiglu"] = f"its MLP uses {decoder.activation}, not SiLU"
    return absent


def _choose_layers(num_layers: int, layers: Iterable[int] | None) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(num_layers))
    given: object = layers
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"layers takes numbers in a list, not {layers!r}", hint=f"layers=[{layers}], or leave it out to align all"
        )
    try:
        numbers = tuple(sorted({operator.index(number) for number in layers}))
    except TypeError:
        raise UsageError(f"layers takes whole numbers, not {layers!r}", hint="layers=[0, 1]") from None
    if not numbers:
        raise UsageError("no layers to align", hint="leave layers out to align all of them")
    for number in numbers:
        if not 0 <= number < num_layers:
            raise UsageError(f"there is no layer {number}", hint=f"the model has layers 0 to {num_layers - 1}")
    return numbers


def _contracts(decoder: Decoder, preset: Preset, chosen: Sequence[str]) -> dict[str, Contract]:
    """Contract of each chosen region; the norm's weight axis is the model's."""
    contracts = {region: preset.regions[region] for region in chosen if region in preset.regions}
    if "rmsnorm" in contracts:
        contracts["rmsnorm"] = _norm_contract(decoder, preset)
    return contracts


def _norm_contract(decoder: Decoder, preset: Preset) -> RmsNormContract:
    contract = preset.rmsnorm(offset=decoder.family.offset_norm)
    fits = ("1+w", "lp(1+w)") if decoder.family.offset_norm else ("w",)
    if contract.weight not in fits:
        raise UsageError(
            f"the contract says weight={contract.weight}, and norms of {decoder.family.name} multiply by {fits[0]}"
        )
    return contract


def _align_norms(alignment: Alignment, decoder: Decoder) -> None:
    """Norms, and the residual adds whose sums they read; see :mod:`rpadiag.regions.addends`."""
    contract = alignment.contracts["rmsnorm"]
    assert isinstance(contract, RmsNormContract)
    channel, operation = Channel(), RmsNormOperation(contract, alignment.kernels)
    reads_unrounded = contract.sum == "fp32" or contract.variance == "unrounded"
    keep = reads_unrounded or contract.dsum == "fp32"
    reads_sum = NormForward(operation=operation, channel=channel, reads_sum=keep)
    plain = NormForward(operation=operation, channel=channel, reads_sum=False)
    chosen, last = set(alignment.layers), alignment.num_layers - 1
    family = decoder.family
    for number, layer in enumerate(decoder.layers):
        aligned, above = number in chosen, number + 1 in chosen or (number == last and number in chosen)
        truncate = contract.store == "truncate" and aligned
        if aligned or (above and keep):
            spec = LayerForward(
                number=number,
                family=family,
                channel=channel,
                operation=operation,
                incoming=aligned and number > 0 and reads_unrounded,
                after_attention=SumPlan(truncate=truncate, keep=keep and aligned),
                after_mlp=SumPlan(truncate=truncate, keep=keep and above),
            )
            alignment._install(layer, spec)
        if aligned:
            first, second, *behind = _norm_order(layer, four_norms=family.four_norms)
            inside = dataclasses.replace(reads_sum, expects=(number, "its second norm") if reads_unrounded else None)
            before = (number - 1, f"the first norm of layer {number}") if spec.incoming else None
            outer = dataclasses.replace(reads_sum, expects=before)
            for norm, forward in ((first, outer), (second, inside), *((n, plain) for n in behind)):
                for own in own_modules(norm, family, "norm"):
                    alignment._install(own, forward)
    if last in chosen:
        expects = (last, "the final norm") if reads_unrounded else None
        alignment._install(decoder.final_norm, dataclasses.replace(reads_sum, expects=expects))


def _align_carried_norms(alignment: Alignment, decoder: Decoder) -> None:
    """Norms and residual adds of a stream that is wider than its tensors; see :mod:`rpadiag.regions.align_carry`."""
    contract, family = alignment.contracts["rmsnorm"], decoder.family
    assert isinstance(contract, RmsNormContract)
    axes = (contract.sum, contract.variance, contract.store, contract.scale, contract.rstd)
    if family.four_norms or axes != ("fp32", "unrounded", "rne", "fp32", "fp32"):
        raise UsageError(
            f"carry={alignment.carry} is for layers with two norms that read unrounded sums and round nothing inside, stored to nearest",
            detail=f"the model is {family.name}, the contract {contract.name()}",
            hint="use contract fp32-output, or carry=lp in a contract of your own",
        )
    channel, operation = Channel(wide=True), RmsNormOperation(contract, alignment.kernels)
    norm = CarriedNormForward(operation=operation, channel=channel)
    last = alignment.num_layers - 1
    for number in alignment.layers:
        layer: Any = decoder.layers[number]
        incoming = number - 1 in alignment.layers
        spec = CarriedLayerForward(number=number, carry=alignment.carry, channel=channel, incoming=incoming)
        alignment._install(layer, spec)
        first, second = _norm_order(layer, four_norms=False)
        inside = dataclasses.replace(norm, expects=(number, "its second norm"))
        before = (number - 1, f"the first norm of layer {number}") if incoming else None
        for module, forward in ((first, dataclasses.replace(norm, expects=before)), (second, inside)):
            for own in own_modules(module, family, "norm"):
                alignment._install(own, forward)
    if last in alignment.layers:
        alignment._install(decoder.final_norm, dataclasses.replace(norm, expects=(last, "the final norm")))


def _norm_order(layer: Any, *, four_norms: bool) -> tuple[nn.Module, ...]:
    """The norms that read the residual stream first, then those behind attention and MLP."""
    if not four_norms:
        return layer.input_layernorm, layer.post_attention_layernorm
    return (
        layer.input_layernorm,
        layer.pre_feedforward_layernorm,
        layer.post_attention_layernorm,
        layer.post_feedforward_layernorm,
    )


def _align_head_norms(alignment: Alignment, decoder: Decoder, preset: Preset) -> None:
    operation = RmsNormOperation(_norm_contract(decoder, preset), alignment.kernels)
    forward = NormForward(operation=operation, channel=Channel(), reads_sum=False)
    for number in alignment.layers:
        attention: Any = decoder.layers[number].self_attn
        for norm in (attention.q_norm, attention.k_norm):
            for own in own_modules(norm, decoder.family, "norm"):
                alignment._install(own, forward)


def _align_rope(alignment: Alignment, decoder: Decoder, preset: Preset, *, fused: bool) -> None:
    contract = alignment.contracts["rope"]
    assert isinstance(contract, RopeContract)
    if contract.layout != "neox":
        raise InputError(
            f"the contract says layout={contract.layout}, and {decoder.family.name} in transformers pairs (i, i + d/2)",
            hint="the layout belongs to the weights: use contract.replace(layout='neox')",
        )
    forward = AttentionForward(
        family=decoder.family,
        rotate=RopeOperation(contract, alignment.kernels),
        norm_rotate=NormRopeOperation(_norm_contract(decoder, preset), contract) if fused else None,
    )
    uncast = contract.cache == "fp32"
    for number, layer in enumerate(decoder.layers):
        for attention in own_modules(layer, decoder.family, "attention"):
            if number in alignment.layers:
                alignment._install(attention, forward)
            elif uncast:
                alignment._install(attention, CastAttentionForward(original=type(attention).forward))
    if uncast:
        alignment._install(decoder.rotary, UncastRotaryForward(original=type(decoder.rotary).forward))


def _align_swiglu(alignment: Alignment, decoder: Decoder) -> None:
    contract = alignment.contracts["swiglu"]
    assert isinstance(contract, SwigluContract)
    forward = MlpForward(operation=SwigluOperation(contract, alignment.kernels))
    for number in alignment.layers:
        for mlp in own_modules(decoder.layers[number], decoder.family, "mlp"):
            alignment._install(mlp, forward)
