"""Holds one sequence's forward on the trainer against what the rollout engine captured of it.

Two views of every site. *Total*: the trainer's own forward against the capture; a site inherits whatever happened
below it. *Local*: the trainer's operation fed the capture's own inputs, so that only what this operation does differs
remains. Tensors live no longer than their comparison: the trainer hands each site over inside its forward, the capture
is read one site at a time from disk.

Shape legend: T tokens of one sequence, W width of a site.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rpadiag.bits import UlpStats, to_numpy_bits, ulp_stats
from rpadiag.compare.aggregate import Aggregate
from rpadiag.compare.evidence import PositionCheck
from rpadiag.compare.experts import Flips, count_flips, tied_tokens
from rpadiag.compare.reductions import Reductions
from rpadiag.errors import CaptureError
from rpadiag.sites import reduced_site, region_of, split_site

if TYPE_CHECKING:
    import torch

PAIR = "trainer|rollout"
CACHED_INPUTS = 6  # the residual stream is read by a norm and by the next add; nothing is read later than that
UNCACHED_POINTS = ("logits",)
_Sourced = dict[str, UlpStats]  # by source, ``prefill`` and ``decode``


class Scores(Protocol):
    """What pairing needs of a sequence's scores; see ``rpadiag.engines.base.TokenScores``."""

    @property
    def logprob(self) -> Any: ...
    @property
    def positions(self) -> Any: ...


class Captured(Protocol):
    """What pairing needs of a capture; see ``rpadiag.engines.base.Capture``."""

    @property
    def sites(self) -> Sequence[str]: ...
    @property
    def positions(self) -> Any: ...
    def read(self, site: str) -> Any: ...


class Trainer(Protocol):
    """What pairing needs of a trainer engine; see ``rpadiag.engines.trainer.TrainerEngine``.

    Where there are no operations to replay, ``on_site`` and captures may hand over arrays of bit patterns instead of tensors.
    """

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        sites: Sequence[str] = (),
        on_site: Callable[[str, Any], None] | None = None,
    ) -> Any: ...
    def reads(self, site: str) -> tuple[str, ...]: ...
    def replay(
        self,
        site: str,
        inputs: Sequence[torch.Tensor],
        *,
        positions: Any = None,
        token_ids: Sequence[int] | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class SequencePair:
    """One sequence as the rollout saw it, with its scores and its capture.

    prompt: index of the prompt. token_ids: T ids. num_prompt_tokens: the first ids that were prefilled.
    """

    prompt: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    scores: Scores
    capture: Captured


class Pairing:
    """Compares sequences one after another; keeps only pooled statistics.

    precision: ``model`` (the run's dtype) or ``fp32`` (the control).
    sites: the sites to compare, in execution order.
    experts_per_token: of a model with experts; 0 counts no flips of their choice.
    no_local: why nothing can be replayed. Then a site has a local divergence only where everything that it reads is equal to the
        bit on both stacks: what differs there, it made.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        sites: Sequence[str],
        precision: str,
        experts_per_token: int = 0,
        no_local: str | None = None,
    ) -> None:
        self.trainer = trainer
        self.experts_per_token = experts_per_token
        self.no_local = no_local
        self.sites = list(sites)
        self.precision = precision
        self.aggregate = Aggregate()
        self.reductions = Reductions()
        for site in self.sites:
            self.aggregate.add(site)

    def compare(self, pair: SequencePair) -> tuple[Any, list[dict[str, Any]]]:
        """The trainer's scores of the sequence and its rows of ``sites.parquet``."""
        totals: dict[str, _Sourced] = {}
        reader = _InputCache(pair.capture)
        present = set(pair.capture.sites)
        wanted = [s for s in self.sites if s in present and s != "logprob" and not reduced_site(s)]

        flips: dict[str, dict[str, Flips]] = {}

        def on_site(site: str, tensor: Any) -> None:
            theirs = reader.read(site) if split_site(site)[1] == "router" else pair.capture.read(site)
            totals[site] = _by_source(site, tensor, theirs, pair.num_prompt_tokens)
            flips[site] = self._flips(site, tensor, theirs, pair.num_prompt_tokens)

        scores = self.trainer.forward(pair.token_ids, sites=wanted, on_site=on_site)
        if "logprob" in self.sites:
            totals["logprob"] = _logprob_by_source(scores.logprob, pair)
        locals_: dict[str, _Sourced] = {}
        reasons: dict[str, str] = {}
        for site in self.sites:
            try:
                locals_[site] = self._local(site, pair, reader, present, totals, flips)
            except _NoLocal as why:
                reasons[site] = str(why)
        return scores, self._rows(pair, totals, locals_, reasons, flips)

    def _flips(self, site: str, ours: Any, theirs: Any, num_prompt_tokens: int) -> dict[str, Flips]:
        """Choices of experts that differ, by source; empty for what is no router."""
        if not self.experts_per_token or split_site(site)[1] != "router":
            return {}
        a, b = _bits(ours), _bits(theirs)
        return {
            source: count_flips(a[rows], b[rows], self.experts_per_token)
            for source, rows in _rows_by_source(len(a), num_prompt_tokens)
        }

    def _local(
        self,
        site: str,
        pair: SequencePair,
        reader: _InputCache,
        present: set[str],
        totals: Mapping[str, _Sourced],
        flips: dict[str, dict[str, Flips]],
    ) -> _Sourced:
        if given := reduced_site(site):
            return self._reduction(site, given, pair, reader, present)
        inputs = self.trainer.reads(site)
        if not inputs:
            raise _NoLocal("reads no captured site; its total is what it makes itself")
        missing = [s for s in inputs if s not in present]
        if missing:
            raise _NoLocal(f"input {', '.join(missing)} was not captured on the rollout stack")
        if site not in present and site != "logprob":
            raise _NoLocal("not captured on the rollout stack")
        if self.no_local is not None:
            if site not in totals or any(s not in totals or _differs(totals[s]) for s in inputs):
                raise _NoLocal(self.no_local)
            return totals[site]
        tensors = [reader.read(s) for s in inputs]
        if site == "logprob":
            replayed = self.trainer.replay(site, tensors, positions=pair.capture.positions, token_ids=pair.token_ids)
            return _logprob_by_source(replayed.reshape(-1).numpy(), pair)
        replayed = self.trainer.replay(site, tensors, positions=pair.capture.positions)
        theirs, num_prompt_tokens = reader.read(site), pair.num_prompt_tokens
        for source, local in self._flips(site, replayed, theirs, num_prompt_tokens).items():
            flips[site][source] = replace(flips[site][source], num_local_flips=local.num_flips)
        if split_site(site)[1] == "expert_out":
            # equal logits at the boundary leave the choice to the implementation, and no rounding tells two experts apart
            clear = ~tied_tokens(_bits(tensors[1]), self.experts_per_token)
            replayed, theirs = replayed[clear], theirs[clear]
            num_prompt_tokens = int(clear[:num_prompt_tokens].sum())
        return _by_source(site, replayed, theirs, num_prompt_tokens)

    def _reduction(self, site: str, given: str, pair: SequencePair, reader: _InputCache, present: set[str]) -> _Sourced:
        """An all-reduce fed the ranks' own partial products, against what the engine gave."""
        if site not in present or given not in present:
            raise _NoLocal("the partial products or their sum were not captured on the rollout stack")
        partials, total = pair.capture.read(site), reader.read(given)
        dtype = str(total.dtype).removeprefix("torch.")
        bits = _bits(total)
        ours = self.reductions.add(
            split_site(site)[1], _bits(partials), bits, dtype="bfloat16" if dtype in ("int16", "uint16") else dtype
        )
        return _by_source(site, ours, bits, pair.num_prompt_tokens)

    def _rows(
        self,
        pair: SequencePair,
        totals: dict[str, _Sourced],
        locals_: dict[str, _Sourced],
        reasons: dict[str, str],
        flips: Mapping[str, Mapping[str, Flips]],
    ) -> list[dict[str, Any]]:
        rows = []
        for site in self.sites:
            layer, point = split_site(site)
            for source in ("prefill", "decode"):
                total = totals.get(site, {}).get(source)
                local = locals_.get(site, {}).get(source)
                if total is None and local is None:
                    continue
                flipped = flips.get(site, {}).get(source)
                self.aggregate.add(site, total=total, local=local, flips=flipped)
                row: dict[str, Any] = {
                    "prompt": pair.prompt,
                    "precision": self.precision,
                    "source": source,
                    "layer": layer,
                    "site": site,
                    "point": point,
                    "region": region_of(site),
                    "pair": PAIR,
                    "local_reason": reasons.get(site),
                    "inherited_differing": _inherited(total, local),
                }
                row |= (total.columns() if total else {}) | (local.columns("local_") if local else {})
                row |= flipped.columns() if flipped else {}
                rows.append(row)
            if site in reasons:
                self.aggregate.add(site, local_reason=reasons[site])
        return rows


class _NoLocal(Exception):
    """A site has no local divergence; the text says why."""


class _InputCache:
    """The few tensors read last, so that a site feeding two operations is read from disk once."""

    def __init__(self, capture: Captured) -> None:
        self._capture = capture
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def read(self, site: str) -> Any:
        if site in self._kept:
            self._kept.move_to_end(site)
            return self._kept[site]
        tensor = self._capture.read(site)
        if split_site(site)[1] not in UNCACHED_POINTS:
            self._kept[site] = tensor
            if len(self._kept) > CACHED_INPUTS:
                self._kept.popitem(last=False)
        return tensor


def _by_source(site: str, ours: Any, theirs: Any, num_prompt_tokens: int) -> _Sourced:
    """Statistics of two [T, W] tensors or arrays of bit patterns, prompt rows and generated rows apart.

    Raises CaptureError for different shapes or dtypes: neither is cut or cast to fit.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise CaptureError(
            f"the stacks' tensors of {site} do not match: trainer {_shown(ours)}, rollout {_shown(theirs)}",
            hint="the site map of this family is wrong for one of the stacks, one of them is sharded, or their dtypes differ; "
            "other sites can be compared with --sites",
        )
    rows = len(ours)
    ours, theirs = _bits(ours), _bits(theirs)
    out = {}
    for source, part in _rows_by_source(rows, num_prompt_tokens):
        out[source] = ulp_stats(ours[part], theirs[part])
    return out


def _rows_by_source(num_rows: int, num_prompt_tokens: int) -> list[tuple[str, slice]]:
    """Which rows of a sequence were prefilled and which decoded, where there are any."""
    split = min(num_prompt_tokens, num_rows)
    parts = (("prefill", slice(0, split)), ("decode", slice(split, num_rows)))
    return [(source, part) for source, part in parts if part.stop > part.start]


def _bits(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else to_numpy_bits(values.detach().cpu())


def _shown(values: Any) -> str:
    name = str(values.dtype).removeprefix("torch.")
    return f"{tuple(values.shape)} {'bfloat16' if name == 'int16' else name}"


def _differs(stats: _Sourced) -> bool:
    return any(s.num_differing for s in stats.values())


def _logprob_by_source(ours: Any, pair: SequencePair) -> _Sourced:
    """FP32 logprobs: entry i scores token i + 1, which the rollout prefilled or sampled."""
    p = np.asarray(ours, dtype=np.float32)
    q = np.asarray(pair.scores.logprob, dtype=np.float32)
    split = pair.num_prompt_tokens - 1
    out = {}
    for source, start, stop in (("prefill", 0, split), ("decode", split, len(q))):
        if stop > start:
            out[source] = ulp_stats(np.ascontiguousarray(p[start:stop]), np.ascontiguousarray(q[start:stop]))
    return out


def _inherited(total: UlpStats | None, local: UlpStats | None) -> float | None:
    if total is None or local is None:
        return None
    return max(total.differing - local.differing, 0.0)


def check_positions(pairs: Sequence[tuple[int, Any, Any]]) -> PositionCheck:
    """Compare positions as used: (prompt, trainer's [T], rollout's [T]) for each sequence, None where not observed."""
    offsets = set()
    for prompt, ours, theirs in pairs:
        if ours is None or theirs is None:
            continue
        rows = min(len(ours), len(theirs))
        difference = np.asarray(ours[:rows]) - np.asarray(theirs[:rows])
        if len(difference) and (difference != difference[0]).any():
            index = int(np.argmax(difference != difference[0]))
            return PositionCheck(kind="different", prompt=prompt, index=index)
        if len(difference):
            offsets.add(int(difference[0]))
    if not offsets:
        return PositionCheck(kind="unobserved")
    if offsets == {0}:
        return PositionCheck(kind="equal")
    if len(offsets) == 1:
        return PositionCheck(kind="shifted", offset=offsets.pop())
    # Each sequence is shifted by its own constant (left padding, say): RoPE does not see that either.
    return PositionCheck(kind="shifted", offset=max(offsets, key=abs), uniform=False)
