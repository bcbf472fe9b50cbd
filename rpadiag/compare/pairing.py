"""Holds one sequence's forward on the trainer against what the rollout engine captured of it.

Two views of every site. *Total*: the trainer's own forward against the capture; a site inherits whatever happened
below it. *Local*: the trainer's operation fed the capture's own inputs, so that only what this operation does differs
remains. Tensors live no longer than their comparison: the trainer hands each site over inside its forward, the capture
is read one site at a time from disk.

Shape legend: T tokens of one sequence, W width of a site.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rpadiag.bits import UlpStats, to_numpy_bits, ulp_stats
from rpadiag.compare.aggregate import Aggregate
from rpadiag.compare.evidence import PositionCheck
from rpadiag.errors import CaptureError
from rpadiag.sites import region_of, split_site

if TYPE_CHECKING:
    import torch

PAIR = "trainer|rollout"
CACHED_INPUTS = 6  # the residual stream is read by a norm and by the next add; nothing is read later than that
UNCACHED_POINTS = ("logits",)


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
    def read(self, site: str) -> torch.Tensor: ...


class Trainer(Protocol):
    """What pairing needs of a trainer engine; see ``rpadiag.engines.trainer.TrainerEngine``."""

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        sites: Sequence[str] = (),
        on_site: Callable[[str, torch.Tensor], None] | None = None,
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
    """

    def __init__(self, trainer: Trainer, *, sites: Sequence[str], precision: str) -> None:
        self.trainer = trainer
        self.sites = list(sites)
        self.precision = precision
        self.aggregate = Aggregate()
        for site in self.sites:
            self.aggregate.add(site)

    def compare(self, pair: SequencePair) -> tuple[Any, list[dict[str, Any]]]:
        """The trainer's scores of the sequence and its rows of ``sites.parquet``."""
        totals: dict[str, dict[str, UlpStats]] = {}
        reader = _InputCache(pair.capture)
        present = set(pair.capture.sites)
        wanted = [s for s in self.sites if s in present and s != "logprob"]

        def on_site(site: str, tensor: torch.Tensor) -> None:
            totals[site] = _by_source(tensor, pair.capture.read(site), pair.num_prompt_tokens)

        scores = self.trainer.forward(pair.token_ids, sites=wanted, on_site=on_site)
        if "logprob" in self.sites:
            totals["logprob"] = _logprob_by_source(scores.logprob, pair)
        locals_: dict[str, dict[str, UlpStats]] = {}
        reasons: dict[str, str] = {}
        for site in self.sites:
            try:
                locals_[site] = self._local(site, pair, reader, present)
            except _NoLocal as why:
                reasons[site] = str(why)
        return scores, self._rows(pair, totals, locals_, reasons)

    def _local(self, site: str, pair: SequencePair, reader: _InputCache, present: set[str]) -> dict[str, UlpStats]:
        inputs = self.trainer.reads(site)
        if not inputs:
            raise _NoLocal("reads no captured site; its total is what it makes itself")
        missing = [s for s in inputs if s not in present]
        if missing:
            raise _NoLocal(f"input {', '.join(missing)} was not captured on the rollout stack")
        if site not in present and site != "logprob":
            raise _NoLocal("not captured on the rollout stack")
        tensors = [reader.read(s) for s in inputs]
        if site == "logprob":
            replayed = self.trainer.replay(site, tensors, positions=pair.capture.positions, token_ids=pair.token_ids)
            return _logprob_by_source(replayed.reshape(-1).numpy(), pair)
        replayed = self.trainer.replay(site, tensors, positions=pair.capture.positions)
        return _by_source(replayed, reader.read(site), pair.num_prompt_tokens)

    def _rows(
        self,
        pair: SequencePair,
        totals: dict[str, dict[str, UlpStats]],
        locals_: dict[str, dict[str, UlpStats]],
        reasons: dict[str, str],
    ) -> list[dict[str, Any]]:
        rows = []
        for site in self.sites:
            layer, point = split_site(site)
            for source in ("prefill", "decode"):
                total = totals.get(site, {}).get(source)
                local = locals_.get(site, {}).get(source)
                if total is None and local is None:
                    continue
                self.aggregate.add(site, total=total, local=local)
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
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    def read(self, site: str) -> torch.Tensor:
        if site in self._kept:
            self._kept.move_to_end(site)
            return self._kept[site]
        tensor = self._capture.read(site)
        if split_site(site)[1] not in UNCACHED_POINTS:
            self._kept[site] = tensor
            if len(self._kept) > CACHED_INPUTS:
                self._kept.popitem(last=False)
        return tensor


def _by_source(ours: torch.Tensor, theirs: torch.Tensor, num_prompt_tokens: int) -> dict[str, UlpStats]:
    """Statistics of two [T, W] tensors, prompt rows and generated rows apart.

    Raises CaptureError for different shapes or dtypes: neither is cut or cast to fit.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise CaptureError(
            f"the stacks' tensors do not match: trainer {tuple(ours.shape)} {ours.dtype}, rollout {tuple(theirs.shape)} {theirs.dtype}",
            hint="the site map of this family is wrong for one of the stacks, one of them is sharded, or their dtypes differ",
        )
    rows = len(ours)
    ours = ours.detach().cpu()
    out = {}
    for source, start, stop in (("prefill", 0, min(num_prompt_tokens, rows)), ("decode", num_prompt_tokens, rows)):
        if stop > start:
            out[source] = ulp_stats(to_numpy_bits(ours[start:stop]), to_numpy_bits(theirs[start:stop]))
    return out


def _logprob_by_source(ours: Any, pair: SequencePair) -> dict[str, UlpStats]:
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
