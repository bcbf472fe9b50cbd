"""Contracts of an engine that shows attention alone, told from whole layers.

Between two attentions lie a residual add, a norm, SwiGLU, another add, a norm, the projections and RoPE; compiled vLLM shows none of them,
only q, k, v and the output of attention. Given that output in each of its layers, the trainer makes the next layer's q, k and v, and
under the right roundings they are the engine's bit for bit. An order of addition may spoil some rows (tokens); a wrong rounding moves a fifth
of the elements and more, so that hardly a row is left. What is counted is therefore rows that agree in every element.

Layer 0 reads embeddings: it tells the norm without a residual and RoPE. Layer 1 has passed both adds and SwiGLU; layer 2 also tells whether
a sum is carried beyond a layer (:mod:`rpadiag.regions.align_carry`). Projections are merged as vLLM lays them out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpadiag.contracts import Contract
from rpadiag.findings import Finding
from rpadiag.regions.fingerprint_file import RegionSummary, agreeing_presets, known_as, level_one
from rpadiag.regions.presets import Preset, find_preset
from rpadiag.sites import layer_site

if TYPE_CHECKING:
    import torch

    from rpadiag.engines.base import Capture
    from rpadiag.engines.bundle import Bundle
    from rpadiag.engines.trainer import TrainerEngine

NUM_LAYERS = 3  # that are looked at
POINTS = ("v", "q_rope", "k_rope")
FITS = 0.2  # share of rows that agree in every element: a candidate with fewer is not taken for the engine's
MIN_REFUTING = 8  # rows that agree under the best candidate and not under another: so many exclude the other,
MAX_AGAINST = 0.1  # unless more than this many times as many do the opposite
MAX_TOKENS = 256
MIN_TOKENS = 16
NORMS = (("fp32", "unrounded"), ("lp", "rounded"), ("lp", "unrounded"))  # sum, variance


@dataclass(frozen=True, kw_only=True)
class BlockFingerprint:
    """contracts: of the regions that are told. carry: None where it is not. rows: share of exact rows of the best candidate, by site.

    runner_up: share of rows that are exact at all of a layer's sites under the next best candidate, at most over the layers. reasons: region -> why it is not told.
    """

    contracts: Mapping[str, Contract]
    carry: str | None
    rows: Mapping[str, float]
    runner_up: float
    num_tokens: int
    num_candidates: int
    reasons: Mapping[str, str]

    def summary(self, region: str) -> RegionSummary:
        """What :func:`rpadiag.regions.fingerprint_file.file_content` takes."""
        contract = self.contracts.get(region)
        return RegionSummary(
            region=region, contract=contract, num_sites=len(self.rows), num_determined=len(self.rows) if contract is not None else 0,
            reason=self.reasons.get(region, ""), presets=agreeing_presets(region, contract) if contract is not None else (),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Evidence, as the file keeps it."""
        return {
            "exact_rows": dict(self.rows), "runner_up_exact_rows": self.runner_up, "num_tokens": self.num_tokens,
            "num_candidates": self.num_candidates,
        }  # fmt: skip


def block_sites(num_layers: int) -> list[str]:
    """What has to be captured."""
    return [layer_site(n, point) for n in range(min(NUM_LAYERS, num_layers)) for point in (*POINTS, "attn")]


def can_tell(trainer: TrainerEngine, bundle: Bundle) -> bool:
    """Whether the bundle shows attention of the first layers, and the model is one whose layers are plain."""
    from rpadiag.regions.align_families import find_decoder

    facts = trainer.facts
    shown = set(bundle.capture(0).sites)
    plain = not facts.expert_layers and not find_decoder(trainer.model).family.four_norms
    return plain and facts.num_layers >= 2 and shown >= set(block_sites(facts.num_layers))


def fingerprint_blocks(trainer: TrainerEngine, bundle: Bundle) -> BlockFingerprint:
    """Search the roundings layer by layer. trainer: the plain model, which is left as it was."""
    from rpadiag.engines.merged import merged_projections

    rows = _Rows(trainer, bundle)
    roundings = itertools.product(("lp", "fp32"), ("fp32", "lp"), ("fp32", "lp"), rows.boundaries)
    with merged_projections(trainer.model):
        tried = {"rope": _ranked(rows, 0, [_variant(cache=c, products=p, scale=s, mid=m) for c, p, s, m in roundings])}
        best = tried["rope"][0].preset
        second = [
            _of(best, silu=silu, norm=norm, carry=carry)
            for silu in ("fp32", "lp")
            for norm in NORMS
            for carry in (
                ("lp", "layer") if norm == NORMS[0] and best.rmsnorm(offset=False).scale == "fp32" else ("lp",)
            )
        ]
        tried["layer"] = _ranked(rows, 1, second)
        best = tried["layer"][0].preset
        last = min(NUM_LAYERS, trainer.facts.num_layers) - 1
        if last > 1:
            carries = ("layer", "stream") if best.carry == "layer" else (best.carry,)
            tried["carry"] = _ranked(rows, last, [dataclasses.replace(best, carry=c) for c in carries])
    return _judged(tried, rows)


class _Rows:
    """Exact rows of a candidate, over the first sequences of a bundle."""

    def __init__(self, trainer: TrainerEngine, bundle: Bundle) -> None:
        self.trainer, self.bundle = trainer, bundle
        self.boundaries = ("fp32", "lp") if trainer.facts.qk_norm else ("lp",)
        self.indices, self.num_tokens = [], 0
        for index, sequence in enumerate(bundle.sequences):
            if self.num_tokens and self.num_tokens + len(sequence.token_ids) > MAX_TOKENS:
                break
            self.indices.append(index)
            self.num_tokens += len(sequence.token_ids)

    def exact(self, preset: Preset, layer: int) -> dict[str, torch.Tensor]:
        """Bool [rows] by site of ``layer``: every element of a trainer aligned to ``preset`` is the engine's."""
        import torch

        from rpadiag.engines.borrowed import borrowed_attention
        from rpadiag.regions.align import align

        sites = [layer_site(layer, point) for point in POINTS]
        found: dict[str, list[torch.Tensor]] = {site: [] for site in sites}
        model = self.trainer.model
        with align(model, contract=preset):
            for index in self.indices:
                capture = self.bundle.capture(index)

                def attend(number: int, *_qkv: torch.Tensor, capture: Capture = capture) -> torch.Tensor:
                    if number == layer:
                        raise _Enough
                    return capture.read(layer_site(number, "attn"))

                def on_site(site: str, ours: torch.Tensor, capture: Capture = capture) -> None:
                    theirs = capture.read(site)
                    same = ours.to(theirs.device).reshape(theirs.shape) == theirs
                    found[site].append(same.all(dim=-1)[1:].cpu())  # at position 0 RoPE leaves everything as it is

                with borrowed_attention(model, attend), contextlib.suppress(_Enough):
                    self.trainer.forward(capture.sequence.token_ids, sites=sites, on_site=on_site)
        return {site: torch.cat(parts) for site, parts in found.items()}


class _Enough(Exception):
    """The layer that was asked for has been seen."""


def _variant(*, cache: str, products: str, scale: str, mid: str) -> Preset:
    base = find_preset("fp32-output")
    regions = {
        **base.regions,
        "rope": base.regions["rope"].replace(cache=cache, products=products),
        "rmsnorm": base.regions["rmsnorm"].replace(scale=scale),
        "qk_norm": base.regions["qk_norm"].replace(mid=mid),
    }
    return dataclasses.replace(base, name="candidate", regions=regions)


def _of(preset: Preset, *, silu: str, norm: tuple[str, str], carry: str) -> Preset:
    regions = {
        **preset.regions,
        "swiglu": preset.regions["swiglu"].replace(silu=silu),
        "rmsnorm": preset.regions["rmsnorm"].replace(sum=norm[0], variance=norm[1]),
    }
    return dataclasses.replace(preset, regions=regions, carry=carry)


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One candidate at one layer. rows: bool by site; every: rows that agree at all of them."""

    preset: Preset
    rows: Mapping[str, torch.Tensor]

    @property
    def every(self) -> torch.Tensor:
        first, *others = self.rows.values()
        for other in others:
            first = first & other
        return first

    @property
    def share(self) -> float:
        return float(self.every.float().mean())

    def excludes(self, other: _Tried) -> bool:
        """Whether rows agree under this candidate that do not under the other, and hardly any the other way round."""
        mine, theirs = self.every, other.every
        refuting, against = int((mine & ~theirs).sum()), int((theirs & ~mine).sum())
        return refuting >= MIN_REFUTING and against <= MAX_AGAINST * refuting


def _ranked(rows: _Rows, layer: int, candidates: Sequence[Preset]) -> list[_Tried]:
    """The candidates at one layer, the one with the most rows first."""
    return sorted((_Tried(preset=p, rows=rows.exact(p, layer)) for p in candidates), key=lambda one: -one.share)


def _judged(stages: Mapping[str, list[_Tried]], rows: _Rows) -> BlockFingerprint:
    """What the stages tell: up to the first at which nothing fits or two candidates do."""
    best = list(stages.values())[-1][0].preset
    contracts: dict[str, Contract] = {}
    reasons: dict[str, str] = {}
    regions = {
        "rope": ("rope", *(("qk_norm",) if len(rows.boundaries) > 1 else ())),
        "layer": ("rmsnorm", "swiglu"),
        "carry": (),
    }
    failed, runner_up = "", 0.0
    seen: dict[str, float] = {}
    for stage, (top, *others) in stages.items():
        alike = [other for other in others if not top.excludes(other)]
        if not failed and rows.num_tokens < MIN_TOKENS:
            failed = f"{rows.num_tokens} tokens are too few to count rows"
        elif not failed and top.share < FITS:
            failed = f"no candidate makes {100 * FITS:.0f} % of the rows bit for bit (the best {100 * top.share:.1f} %)"
        elif not failed and alike:
            failed = f"another candidate makes {100 * alike[0].share:.1f} % of the rows bit for bit, the best {100 * top.share:.1f} %"
        if not failed:
            seen |= {site: float(r.float().mean()) for site, r in top.rows.items()}
            runner_up = max([runner_up, *(other.share for other in others[:1])])
        for region in regions[stage]:
            if failed:
                reasons[region] = f"attention's inputs do not tell it: {failed}"
            else:
                contracts[region] = best.regions[region]
    untold = failed or (best.carry == "layer" and "carry" not in stages)  # two layers cannot tell how far
    return BlockFingerprint(
        contracts=contracts, carry=None if untold else best.carry, rows=seen, runner_up=runner_up, num_tokens=rows.num_tokens,
        num_candidates=sum(map(len, stages.values())), reasons=reasons,
    )  # fmt: skip


CARRIED = {
    "lp": "every residual add reads the sum before it as it was stored",
    "layer": "the second residual add of a layer reads the first one's sum unrounded",
    "stream": "no residual add reads a rounded sum",
}


def block_findings(found: BlockFingerprint, regions: Sequence[str], label: str) -> Iterator[Finding]:
    """One sentence per region, and one on the carry."""
    least = min(found.rows.values(), default=0.0)
    evidence = (
        f"{100 * least:.1f} % of the rows of q, k and v or more are its bits in every layer looked at, of the next best candidate "
        f"{100 * found.runner_up:.1f} % (n = {found.num_tokens:,} tokens)"
    )
    numbers = {"exact_rows": least, "runner_up_exact_rows": found.runner_up, "num_tokens": found.num_tokens}
    for rank, region in enumerate(regions):
        contract = found.contracts.get(region)
        if contract is None:
            text = f"{region} of {label}: {found.reasons.get(region, 'not told by attention alone')}"
            yield Finding(
                code="not-determined", severity="warning", text=text, region=region, numbers=numbers, rank=rank
            )
            continue
        names = known_as(agreeing_presets(region, contract))
        axes = " ".join(f"{axis}={value}" for axis, value in level_one(contract))
        text = f"{region} of {label}, told from whole layers: {axes}{names}; {evidence}"
        yield Finding(code="contract", severity="info", text=text, region=region, numbers=numbers, rank=rank)
    if found.carry is not None:
        text = f"Residual stream of {label}: {CARRIED[found.carry]} (carry={found.carry})."
        yield Finding(code="carry", severity="info", text=text, region="rmsnorm", numbers=numbers, rank=8)
