"""Fingerprints of every site of a bundle: what each region's kernel read and wrote, and the weights it used.

Shape legend: T tokens, W width, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rpadiag.errors import CaptureError
from rpadiag.regions.fingerprint import Fingerprint
from rpadiag.sites import layer_site, split_site

if TYPE_CHECKING:
    import torch

    from rpadiag.engines.base import Capture, ModelFacts

MAX_ROWS = 512  # tokens looked at per site; level-one axes need 64
POSITIONS_ASSUMED = "the capture records no positions; 0, 1, 2, ... were assumed, and no contract fits at those"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Sites of several sequences laid end to end, up to MAX_ROWS tokens."""

    captures: Sequence[Capture]
    lengths: Sequence[int]

    def has(self, *sites: str) -> bool:
        return all(site in capture.sites for site in sites for capture in self.captures)

    def read(self, site: str) -> torch.Tensor:
        """[T, W], at most MAX_ROWS rows."""
        import torch

        parts, rows = [], 0
        for capture in self.captures:
            parts.append(capture.read(site)[: MAX_ROWS - rows].clone())
            rows += parts[-1].shape[0]
            if rows >= MAX_ROWS:
                break
        return torch.cat(parts)

    @property
    def positions_recorded(self) -> bool:
        """Whether the engine recorded the positions of every token; else :meth:`positions` assumes them."""
        return all(capture.positions is not None for capture in self.captures)

    def positions(self) -> torch.Tensor:
        """int64 [T] of the same tokens; 0, 1, 2, ... of each sequence where the engine did not record them."""
        import torch

        parts = []
        for capture, length in zip(self.captures, self.lengths, strict=True):
            seen = capture.positions
            parts.append(torch.arange(length) if seen is None else torch.from_numpy(seen.copy()))
        return torch.cat(parts)[:MAX_ROWS]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the regions read beside activations. norms: site -> weight. inv_freqs: float32 [rotary/2] of each layer."""

    norms: Mapping[str, torch.Tensor]
    inv_freqs: Sequence[torch.Tensor]
    rope_scale: float = 1.0


def weights_of(model: Any, facts: ModelFacts) -> Weights:
    """Norm weights and inverse frequencies of a transformers model, on the CPU."""
    from rpadiag.regions.align_families import find_decoder

    decoder = find_decoder(model)
    norms = {"final_norm": decoder.final_norm.weight}
    for n, layer in enumerate(decoder.layers):
        parts: Any = layer
        norms[layer_site(n, "input_norm")] = parts.input_layernorm.weight
        if decoder.family.four_norms:
            norms[layer_site(n, "attn_norm")] = parts.post_attention_layernorm.weight
            norms[layer_site(n, "post_norm")] = parts.pre_feedforward_layernorm.weight
            norms[layer_site(n, "mlp_norm")] = parts.post_feedforward_layernorm.weight
        else:
            norms[layer_site(n, "post_norm")] = parts.post_attention_layernorm.weight
        if facts.qk_norm:
            norms[layer_site(n, "q_norm")] = parts.self_attn.q_norm.weight
            norms[layer_site(n, "k_norm")] = parts.self_attn.k_norm.weight
    rotary: Any = decoder.rotary
    return Weights(
        norms={s: w.detach().cpu() for s, w in norms.items()},  # type: ignore[operator]
        inv_freqs=[inv_freq_of(rotary, layer).float().cpu() for layer in decoder.layers],
        rope_scale=float(getattr(rotary, "attention_scaling", 1.0)),
    )


def inv_freq_of(rotary: Any, layer: Any) -> torch.Tensor:
    """Inverse frequencies [rotary/2] of a layer: the rotary embedding's own, or those of the layer's kind of attention."""
    if hasattr(rotary, "inv_freq"):
        table: torch.Tensor = rotary.inv_freq.detach()
        return table
    of_kind: torch.Tensor = getattr(rotary, f"{layer.self_attn.layer_type}_inv_freq").detach()
    return of_kind


@dataclass(kw_only=True)
class SiteFingerprints:
    """Fingerprints by region and site; plain: norms without a residual; missing: region -> why sites were left out.

    rotations: rope of queries and keys from the joint search, which needs no rounded value between the norm and the rotation.
    """

    found: dict[str, dict[str, Fingerprint]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    rotations: dict[str, Fingerprint] = field(default_factory=dict)

    def add(self, region: str, site: str, fingerprint: Fingerprint) -> None:
        self.found.setdefault(region, {})[site] = fingerprint

    @property
    def sites(self) -> dict[str, Fingerprint]:
        """All of them by site; a joint search adds its parts as ``site (region)``."""
        out: dict[str, Fingerprint] = {}
        for region, group in self.found.items():
            for site, fingerprint in group.items():
                out[site if site not in out else f"{site} ({region})"] = fingerprint
        return out


def sites_to_capture(facts: ModelFacts, regions: Sequence[str]) -> list[str]:
    """Sites that the fingerprints of these regions read, in execution order."""
    points: set[str] = set()
    if "rmsnorm" in regions:
        points |= {"embed", "input_norm", "o", "attn_norm", "resid_attn", "post_norm"}
        points |= {"down", "mlp_norm", "expert_out", "resid_mlp", "final_norm"}
    if "rope" in regions or "qk_norm" in regions:
        points |= {"q", "k", "q_norm", "k_norm", "q_rope", "k_rope"}
    if "swiglu" in regions:
        points |= {"gate", "up", "act"}
    return [s for s in facts.sites if split_site(s)[1] in points]


def fingerprint_sites(
    captured: Captured, weights: Weights, facts: ModelFacts, regions: Sequence[str], on_layer: Callable[[], None]
) -> SiteFingerprints:
    """Every region of every layer."""
    result = SiteFingerprints()
    for n in range(facts.num_layers):
        for region in regions:
            _REGIONS[region](result, captured, weights, facts, n)
        if facts.qk_norm and "rope" in regions:
            _rope_behind_norms(result, captured, weights, facts, n)
        on_layer()
    if "rmsnorm" in regions:
        _fused_norm(result, captured, weights, facts, "final_norm", layer_site(facts.num_layers - 1, "resid_mlp"))
    for region in regions:
        if region not in result.found:
            result.missing.setdefault(region, f"no site of {region} was captured together with its inputs")
    return result


def _norm_layer(result: SiteFingerprints, captured: Captured, weights: Weights, facts: ModelFacts, n: int) -> None:
    from rpadiag.regions.fingerprint_rmsnorm import fingerprint_rmsnorm

    if n:
        _fused_norm(result, captured, weights, facts, layer_site(n, "input_norm"), layer_site(n - 1, "resid_mlp"))
    _fused_norm(result, captured, weights, facts, layer_site(n, "post_norm"), layer_site(n, "resid_attn"))
    behind = (("attn_norm", "o"), ("mlp_norm", "down"))
    plain = [(layer_site(n, norm), layer_site(n, x)) for norm, x in behind if layer_site(n, norm) in facts.sites]
    for site, x in ([("layers.0.input_norm", "embed")] if n == 0 else []) + plain:
        if captured.has(x, site):
            out = captured.read(site)
            found = fingerprint_rmsnorm(captured.read(x), _like(weights.norms[site], out), out, eps=facts.rms_eps)
            result.add("rmsnorm", site, found)
            result.plain.append(site)


def _fused_norm(
    result: SiteFingerprints, captured: Captured, weights: Weights, facts: ModelFacts, site: str, stream: str
) -> None:
    """A norm that reads the sum stored at ``stream``, from the addends of that sum."""
    from rpadiag.regions.fingerprint_rmsnorm import fingerprint_rmsnorm

    residual, x = facts.reads(stream)
    if not captured.has(site, x, residual):
        result.missing["rmsnorm"] = f"{site} needs {x} and {residual}, which this engine did not show"
        return
    out = captured.read(site)
    found = fingerprint_rmsnorm(
        captured.read(x), _like(weights.norms[site], out), out, eps=facts.rms_eps, residual=captured.read(residual)
    )
    result.add("rmsnorm", site, found)


def _like(weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype in which the engine held it: the activations' unless it is kept in float32."""
    import torch

    return weight if weight.dtype == torch.float32 and out.dtype == torch.float32 else weight.to(out.dtype)


def _rope_layer(result: SiteFingerprints, captured: Captured, weights: Weights, facts: ModelFacts, n: int) -> None:
    from rpadiag.regions.fingerprint_rope import fingerprint_rope, rope_table

    cos, sin = rope_table(captured.positions(), weights.inv_freqs[n], scale=weights.rope_scale)
    for kind in ("q", "k"):
        site = layer_site(n, f"{kind}_rope")
        source = layer_site(n, f"{kind}_norm" if facts.qk_norm else kind)
        if not captured.has(site, source):
            result.missing["rope"] = f"{site} needs {source}, which this engine did not show"
            continue
        x, out = (captured.read(s).unflatten(-1, (-1, facts.head_dim)) for s in (source, site))
        found = fingerprint_rope(x, captured.positions(), out, cos=cos, sin=sin)
        result.add("rope", site, _with_positions(found, captured))


def _with_positions(found: Fingerprint, captured: Captured) -> Fingerprint:
    """A contract that fits bit for bit proves assumed positions; where none fits, they are a reason that none does."""
    if captured.positions_recorded or found.status != "no known contract":
        return found
    return replace(found, status="not determined", reasons=(*found.reasons, POSITIONS_ASSUMED))


def _swiglu_layer(result: SiteFingerprints, captured: Captured, weights: Weights, facts: ModelFacts, n: int) -> None:
    from rpadiag.regions.fingerprint_swiglu import fingerprint_swiglu

    gate, up, act = (layer_site(n, p) for p in ("gate", "up", "act"))
    if act not in facts.sites:
        if "act" in facts.absent:
            result.missing["swiglu"] = facts.absent["act"]
        return
    if captured.has(gate, up, act):
        result.add("swiglu", act, fingerprint_swiglu(captured.read(gate), captured.read(up), captured.read(act)))
    else:
        result.missing["swiglu"] = f"{act} needs {gate} and {up}, which this engine did not show"


def _qk_layer(result: SiteFingerprints, captured: Captured, weights: Weights, facts: ModelFacts, n: int) -> None:
    from rpadiag.regions.fingerprint_qk import fingerprint_qk_rope

    if not facts.qk_norm:
        result.missing["qk_norm"] = f"family {facts.family} has no per-head norm"
        return
    for kind in ("q", "k"):
        raw, site, out = (layer_site(n, p) for p in (kind, f"{kind}_norm", f"{kind}_rope"))
        if not captured.has(raw, out):
            result.missing["qk_norm"] = f"{out} needs {raw}, which this engine did not show"
            continue
        x, rotated = (captured.read(s).unflatten(-1, (-1, facts.head_dim)) for s in (raw, out))
        rotated = rotated[:128]
        joint = fingerprint_qk_rope(
            x[:128], _like(weights.norms[site], rotated), captured.positions()[:128], rotated,
            eps=facts.rms_eps, inv_freq=weights.inv_freqs[n], scale=weights.rope_scale,
        )  # fmt: skip
        result.rotations[out] = _with_positions(joint["rope"], captured)
        result.add("qk_norm", out, _with_positions(joint["qk_norm"], captured))
        result.add("rmsnorm of q and k", site, _with_positions(joint["rmsnorm"], captured))


def _rope_behind_norms(
    result: SiteFingerprints, captured: Captured, weights: Weights, facts: ModelFacts, n: int
) -> None:
    """Rotations that no contract reproduces from the normed values as they were stored, told together with the norm in front of them."""
    rope = result.found.get("rope", {})
    unknown = [s for p in ("q_rope", "k_rope") if (s := layer_site(n, p)) in rope and not rope[s].matches]
    if unknown and not set(unknown) & set(result.rotations):
        _qk_layer(result, captured, weights, facts, n)
    for site in unknown:
        if site in result.rotations and result.rotations[site].matches:
            rope[site] = result.rotations[site]


_Layer = Callable[[SiteFingerprints, Captured, Weights, "ModelFacts", int], None]
_REGIONS: dict[str, _Layer] = {
    "rope": _rope_layer,
    "swiglu": _swiglu_layer,
    "rmsnorm": _norm_layer,
    "qk_norm": _qk_layer,
}


def captured_from(captures: Iterator[tuple[Capture, int]]) -> Captured:
    """Captures and their lengths in tokens, as one."""
    pairs = list(captures)
    if not pairs:
        raise CaptureError("nothing was captured", hint="give at least one prompt")
    return Captured(captures=[c for c, _ in pairs], lengths=[n for _, n in pairs])
