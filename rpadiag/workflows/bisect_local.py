"""Local evidence of a bisection: what each region makes at its sites, and where that leads to first order.

The aligned trainer runs under a few noise draws. At every site of a switched region the trainer's own operation is fed the aligned
forward's input; the difference e is what the region makes there. Its mean over draws goes through the trainer's FP32 derivative: forward
mode for the change of each logprob (J e, by part), one backward pass for the sum of changes by region and layer. Nothing here is averaged
over the chaos that follows a rounding difference, so it is another witness than the replicates, not a cheaper one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.attribution.design import Part, layers_by_region
from rpadiag.findings import Finding
from rpadiag.sites import RESIDUAL_ADDS, region_of, split_site
from rpadiag.structure import ONE_SIDED_LIMIT

if TYPE_CHECKING:
    import torch

    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.linear import LinearTrainer
    from rpadiag.engines.switches import TrainerSwitches
    from rpadiag.engines.trainer import TrainerEngine

NUM_DRAWS = 4  # the rounding of one forward is noise of its own: J e of one draw is mostly that
CHUNK_TOKENS = 512  # tokens times draws whose intermediates are held at a time: 0.4 GB for a 135M model
DRAW_SEED = 3_000_017
MERGED_POINTS = ("q", "k", "v", "gate", "up")
MIN_ONE_SIDED = 8
Key = tuple[str, int | None]


@dataclass(kw_only=True)
class Made:
    """What a region makes in one layer when it is fed the aligned forward's input; ``layer`` None is behind the layers.

    num_away, num_toward: differing elements that the trainer's own operation has further from, or nearer to, zero than the
    aligned one. shift: first-order change of the mean logprob when this region is not aligned in this layer, nats.
    """

    region: str
    layer: int | None
    num_elements: int = 0
    num_differing: int = 0
    num_away: int = 0
    num_toward: int = 0
    shift: float = 0.0

    @property
    def balance(self) -> float:
        """(away - toward) / (away + toward); 0 where nothing differs."""
        return (self.num_away - self.num_toward) / max(1, self.num_away + self.num_toward)

    @property
    def one_sided(self) -> bool:
        """Every difference points the same way, as truncation on one side makes them."""
        return self.num_away + self.num_toward >= MIN_ONE_SIDED and abs(self.balance) >= ONE_SIDED_LIMIT


@dataclass(frozen=True, kw_only=True)
class LocalEvidence:
    """made: by region and layer. differing: share of elements that differ, by part name. effects: first-order change [N] of
    each logprob when a part is not aligned, nats, by part name; empty with the ``reason`` where the trainer cannot be differentiated."""

    made: tuple[Made, ...]
    differing: Mapping[str, float]
    effects: Mapping[str, NDArray[np.float64]]
    num_draws: int
    reason: str | None = None

    def of_region(self, region: str) -> Made:
        """All layers of a region together."""
        total = Made(region=region, layer=None)
        for one in self.made:
            if one.region == region:
                for name in ("num_elements", "num_differing", "num_away", "num_toward", "shift"):
                    setattr(total, name, getattr(total, name) + getattr(one, name))
        return total

    def to_dict(self) -> dict[str, Any]:
        """JSON form: one row per region and layer."""
        rows = [{**vars(m), "balance": m.balance, "one_sided": m.one_sided} for m in self.made]
        return {"num_draws": self.num_draws, "reason": self.reason, "made": [_without_nan(row) for row in rows]}

    def one_sided_sentences(self) -> list[str]:
        """One sentence for each region whose differences all point one way."""
        out = []
        for region in dict.fromkeys(m.region for m in self.made):
            total = self.of_region(region)
            if total.one_sided:
                truncating = "aligned" if total.balance > 0 else "trainer's own"
                out.append(
                    f"{region}: one-sided: {100 * total.num_differing / total.num_elements:.2g} % of elements differ and all but "
                    f"{min(total.num_away, total.num_toward):,} of {total.num_away + total.num_toward:,} are nearer to zero in the "
                    f"{truncating} computation, as truncation does."
                )
        return out


def local_findings(evidence: LocalEvidence) -> list[Finding]:
    """Regions whose differences all point one way, and why there are no first-order effects, where there are none."""
    found = [
        Finding(code="one-sided", severity="notice", text=text, region=text.partition(":")[0], rank=12)
        for text in evidence.one_sided_sentences()
    ]
    if evidence.reason is not None:
        found.append(
            Finding(code="no-first-order", severity="info", text=f"No first-order effects: {evidence.reason}.", rank=60)
        )
    return found


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """NaN, which JSON does not have, as None."""
    return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in row.items()}


def local_evidence(
    trainer: TrainerEngine,
    sequences: Sequence[TokenSequence],
    switches: TrainerSwitches,
    parts: Sequence[Part],
    *,
    num_draws: int = NUM_DRAWS,
) -> LocalEvidence:
    """Measure the local evidence of ``parts`` around the trainer with all of them aligned. Nothing may be aligned yet."""
    return _Evidence(trainer, switches, parts, num_draws).of(sequences)


@dataclass(kw_only=True)
class _Chunk:
    """Sequences, with their numbers, whose intermediates are held together."""

    sequences: list[tuple[int, TokenSequence]] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [len(s.token_ids) for _, s in self.sequences]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def rows(self, place: int) -> slice:
        """Where the sequence at a place is in tensors [tokens, W] of one draw."""
        start = sum(self.lengths[:place])
        return slice(start, start + self.lengths[place])


class _Evidence:
    def __init__(
        self, trainer: TrainerEngine, switches: TrainerSwitches, parts: Sequence[Part], num_draws: int
    ) -> None:
        self._trainer = trainer
        self._switches = switches
        self._num_draws = num_draws
        num_layers = trainer.facts.num_layers
        self._aligned = layers_by_region([s for p in parts for s in p.switches], num_layers)
        self._sites = {p.name: _sites_of(p, trainer.facts.sites, num_layers) for p in parts}
        wanted = {site for sites in self._sites.values() for site in sites}
        self._wanted = [s for s in trainer.facts.sites if s in wanted]
        self._reads = {site: trainer.reads(site) for site in self._wanted}
        self._made: dict[Key, Made] = {}
        self._counts: dict[str, tuple[int, int]] = {}  # site -> differing, elements

    def of(self, sequences: Sequence[TokenSequence]) -> LocalEvidence:
        from rpadiag.engines.linear import LinearTrainer

        effects: dict[str, list[Any]] = {name: [None] * len(sequences) for name in self._sites}
        linear = LinearTrainer(self._trainer)
        reason = None
        for chunk in _chunks(sequences, CHUNK_TOKENS // self._num_draws):
            errors = self._errors(chunk)
            if reason is None:
                try:
                    for places in _padded_groups(chunk.lengths):
                        self._propagate(linear, chunk, places, errors, effects)
                except (
                    RuntimeError,
                    NotImplementedError,
                ) as error:  # an operator of the model without a derivative
                    reason = f"the trainer cannot be differentiated: {str(error).splitlines()[0]}"
        total = sum(len(s.token_ids) - 1 for s in sequences)
        for made in self._made.values():
            made.shift = made.shift / total if reason is None else float("nan")
        return LocalEvidence(
            made=tuple(self._made.values()),
            differing={name: self._differing(sites) for name, sites in self._sites.items()},
            effects={} if reason else {name: np.concatenate(found) for name, found in effects.items()},
            num_draws=self._num_draws,
            reason=reason,
        )

    def _differing(self, sites: Sequence[str]) -> float:
        found = [self._counts[site] for site in sites if split_site(site)[1] not in RESIDUAL_ADDS]
        return sum(n for n, _ in found) / max(1, sum(n for _, n in found))

    def _propagate(
        self,
        linear: LinearTrainer,
        chunk: _Chunk,
        places: Sequence[int],
        errors: Mapping[str, torch.Tensor],
        effects: Mapping[str, list[Any]],
    ) -> None:
        """Send the errors of the chunk's sequences at ``places`` through the derivative, all of them at once."""
        from torch.nn.utils.rnn import pad_sequence

        ids = [chunk.sequences[place][1].token_ids for place in places]
        padded = {}
        for site, error in errors.items():
            if bool((laid := pad_sequence([error[chunk.rows(p)] for p in places], batch_first=True)).any()):
                padded[site] = laid
        for name, sites in self._sites.items():
            here = {site: padded[site] for site in sites if site in padded}
            changes = linear.changes_of(ids, here) if here else [np.zeros(len(i) - 1) for i in ids]
            for place, change in zip(places, changes, strict=True):
                effects[name][chunk.sequences[place][0]] = change
        some = [site for site in self._wanted if site in padded]
        for site, gradient in linear.gradients_of(ids, some).items() if some else ():
            self._of(site).shift += float((gradient.double() * padded[site].to(gradient.device).double()).sum())

    def _of(self, site: str) -> Made:
        layer, _ = split_site(site)
        key = region_of(site), layer
        return self._made.setdefault(key, Made(region=key[0], layer=layer))

    def _errors(self, chunk: _Chunk) -> dict[str, torch.Tensor]:
        """Mean over draws of the trainer's own operation less the aligned one at each site, float32 [tokens, W]."""
        import torch

        captured = self._capture(chunk)
        lengths = [len(s.token_ids) for _, s in chunk.sequences] * self._num_draws
        positions = torch.cat([torch.arange(n) for n in lengths])
        out = {}
        for site in self._wanted:
            inputs = [captured[name] for name in self._reads[site]]
            own = self._own(site, inputs, positions, lengths)
            self._count(site, captured[site], own)
            difference = own.to(torch.float32) - captured[site].to(torch.float32)
            out[site] = difference.reshape(self._num_draws, chunk.num_tokens, -1).mean(dim=0)
        return out

    def _own(
        self, site: str, inputs: Sequence[torch.Tensor], positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """The trainer's own operation on all rows at once; attention, which joins tokens, sequence by sequence."""
        import torch

        if split_site(site)[1] != "attn":
            return self._trainer.replay(site, inputs, positions=positions)
        parts = zip(*(x.split(list(lengths)) for x in inputs), strict=True)
        return torch.cat([self._trainer.replay(site, part, positions=range(len(part[0]))) for part in parts])

    def _capture(self, chunk: _Chunk) -> dict[str, torch.Tensor]:
        """Every tensor that is needed of the aligned forward, [draws * tokens, W], draw after draw.

        Sequences of equal length are rows of one batch, under every draw.
        """
        needed = {*self._wanted, *(name for reads in self._reads.values() for name in reads)}
        sites = [s for s in self._trainer.facts.sites if s in needed]
        found: dict[str, torch.Tensor] = {}
        with self._switches.aligned(self._aligned):
            for length in sorted(set(chunk.lengths)):
                places = [place for place, other in enumerate(chunk.lengths) if other == length]

                def keep(site: str, tensor: torch.Tensor, places: Sequence[int] = places, length: int = length) -> None:
                    width = tensor.shape[-1]
                    laid = tensor.reshape(self._num_draws, len(places), length, width)
                    if site not in found:
                        found[site] = tensor.new_empty(self._num_draws, chunk.num_tokens, width)
                    for number, place in enumerate(places):
                        found[site][:, chunk.rows(place)] = laid[:, number]

                rows = [chunk.sequences[place] for place in places]
                with _noisy_embedding(self._trainer, rows, self._num_draws):
                    ids = [sequence.token_ids for _, sequence in rows] * self._num_draws
                    self._trainer.visit_batch(ids, sites=sites, on_site=keep)
        return {site: tensor.flatten(0, 1) for site, tensor in found.items()}

    def _count(self, site: str, aligned: torch.Tensor, own: torch.Tensor) -> None:
        if split_site(site)[1] in RESIDUAL_ADDS:
            return
        made = self._of(site)
        larger = (own.abs() > aligned.abs()).sum()
        differing = int((own != aligned).sum())
        before = self._counts.get(site, (0, 0))
        self._counts[site] = before[0] + differing, before[1] + own.numel()
        made.num_elements += own.numel()
        made.num_differing += differing
        made.num_away += int(larger)
        made.num_toward += differing - int(larger)


def _noisy_embedding(trainer: TrainerEngine, rows: Sequence[tuple[int, TokenSequence]], num_draws: int) -> Any:
    """The embedding output of a batch moved while the block runs: every numbered sequence of ``rows`` under draw 0, then 1, ..."""
    import contextlib

    import torch

    from rpadiag.engines.noise import ulp_draws
    from rpadiag.engines.sections import moved_embedding

    width = trainer.facts.hidden_size
    drawn = [
        ulp_draws(len(sequence.token_ids), width, seed=DRAW_SEED + draw, number=number)
        for draw in range(num_draws)
        for number, sequence in rows
    ]
    stack = contextlib.ExitStack()
    hook = moved_embedding(torch.from_numpy(np.stack(drawn)).to(trainer.device))
    module = trainer.model.get_submodule(trainer.family.trainer["embed"].module)
    stack.callback(module.register_forward_hook(hook).remove)
    return stack


def _sites_of(part: Part, available: Sequence[str], num_layers: int) -> list[str]:
    """Sites of a part's regions in its layers; the final norm goes with the last layer, the logits with the head."""
    layers = layers_by_region(part.switches, num_layers)
    out = []
    for site in available:
        layer, point = split_site(site)
        region = region_of(site)
        if region not in layers or point in ("embed", "logprob"):
            continue
        if region == "matmul" and point not in MERGED_POINTS:
            continue
        if region == "lm_head" or (num_layers - 1 if layer is None else layer) in layers[region]:
            out.append(site)
    return out


def _chunks(sequences: Sequence[TokenSequence], num_tokens: int) -> Iterator[_Chunk]:
    """Sequences in order, as many at a time as the budget holds, at least one."""
    chunk = _Chunk()
    for number, sequence in enumerate(sequences):
        if chunk.sequences and chunk.num_tokens + len(sequence.token_ids) > num_tokens:
            yield chunk
            chunk = _Chunk()
        chunk.sequences.append((number, sequence))
    yield chunk


def _padded_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Places of sequences that go through one right-padded pass, longest first: at most a quarter of a pass is padding."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        last = [*groups[-1], place] if groups else []
        padded = len(last) * max((lengths[p] for p in last), default=0)
        if last and 4 * sum(lengths[p] for p in last) >= 3 * padded:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
