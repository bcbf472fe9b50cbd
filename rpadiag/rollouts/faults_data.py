"""Faults of the data, after which no number means anything: other tokens, other places, missing values, other positions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rpadiag.findings import Finding
from rpadiag.rollouts.fault import MIN_SEQUENCES, correlation, fault
from rpadiag.rollouts.observed import ABOVE_ZERO, LAGS, Observed, Worst

FIT = 0.3  # mean |d| at another lag, of the one at lag 0, that shows a shift
FAR = 0.3  # nats at lag 0, below which a shift is not looked for
TAIL_FIT = 0.25  # the same for a sequence whose end alone is shifted
MIN_TAIL = 6  # tokens before and after the place where that begins
ABOVE_SHARE = 0.25  # of tokens whose log-probability is above 0 by more than rounding
DOUBLED = 0.95  # share of sequences that start with one token twice
PADDED_RATIO = 4.0  # mean |d| of well padded sequences over that of the least padded
PADDED_RANKS = 0.6  # rank correlation of padding and mean |d|
PADDED_ALL = (1.7, 0.85)  # the same two, where every sequence is padded and the correlation has to carry it


# -- data ---------------------------------------------------------------------------------------------


def lengths(seen: Observed) -> Iterator[Finding]:
    if seen.misfits:
        first = seen.misfits[0]
        yield fault(
            "retokenised",
            f"Re-tokenised or cut: {len(seen.misfits):,} of {seen.num_sequences:,} sequences have log-probabilities of another "
            f"number than tokens (first: sequence {first.sequence}, {first.text}). The text was tokenised again, or one side truncated it.",
            num_sequences=len(seen.misfits), first=first.sequence, difference=first.difference,
        )  # fmt: skip


def ids(seen: Observed) -> Iterator[Finding]:
    for kind, name in (("double-bos", "Double BOS"), ("retokenised", "Re-tokenised")):
        found = [(i, words) for i, k, words in seen.other_ids if k == kind]
        if found:
            yield fault(
                kind,
                f"{name}: in {len(found):,} of {seen.num_compared_ids:,} sequences the two sides were given different tokens "
                f"(first: sequence {found[0][0]}, {found[0][1]}).",
                num_sequences=len(found), first=found[0][0],
            )  # fmt: skip


def placeholder(seen: Observed) -> Iterator[Finding]:
    n = seen.num_tokens
    if n and seen.num_zero_p == n and seen.num_zero_q < n:
        yield fault(
            "placeholder",
            f"Placeholder: all {n:,} trainer log-probabilities are exactly 0, which no model gives. The trainer skipped the "
            "forward that computes them (NeMo-RL does with force_on_policy_ratio).",
            num_tokens=n,
        )


def above_zero(seen: Observed) -> Iterator[Finding]:
    for side, values in seen.extents.items():
        if values.num_above > ABOVE_SHARE * seen.num_tokens:
            what = "something else" if values.least < 0 else "probabilities" if values.largest <= 1 else "negated ones"
            yield fault(
                "above-zero",
                f"Above zero: {values.num_above:,} of {seen.num_tokens:,} log-probabilities of the {side} are above {ABOVE_ZERO:g} (the largest {values.largest:.3g}), and "
                f"none can be above 0. The column looks like {what}, not like log-probabilities.",
                num_tokens=values.num_above, largest=values.largest,
            )  # fmt: skip


def zero_filled(seen: Observed) -> Iterator[Finding]:
    if seen.zero_q:
        sequence, position = seen.zero_q[0]
        yield fault(
            "zero-filled",
            f"Zero-filled: at {len(seen.zero_q)}{'' if len(seen.zero_q) < 1000 else ' or more'} tokens the rollout's log-probability is exactly 0 where the "
            f"trainer's is below -3 nats (first: sequence {sequence}, position {position}). They are missing values, or tokens that the rollout did "
            "not sample and the mask does not leave out.",
            num_tokens=len(seen.zero_q), first=sequence, position=position,
        )  # fmt: skip


def shifted(seen: Observed) -> Iterator[Finding]:
    rows = seen.columns()
    if not len(rows["n"]):
        return
    here = float(rows["abs_d"].sum() / rows["n"].sum())
    lags = {k: _ratio(rows[f"lag{k}"].sum(), rows[f"lag_n{k}"].sum()) for k in LAGS}
    best = min(LAGS, key=lags.__getitem__)
    if here > FAR and lags[best] < FIT * here:
        yield fault(
            "shifted",
            f"Shifted by {abs(best)}: the rollout's log-probability of token t stands at t{best:+d} in {seen.num_sequences:,} sequences; moved back, mean |d| falls from "
            f"{here:.3g} to {lags[best]:.3g} nats (n = {seen.num_tokens:,}). Compare log p(token t) with log q(token t): one side is shifted as labels are.",
            lag=best, mean_abs_d=here, mean_abs_d_moved_back=lags[best],
        )  # fmt: skip
        return
    own = rows["abs_d"] / rows["n"]
    long = rows["n"] >= 2 * MIN_TAIL
    for lag in LAGS:
        moved = np.divide(
            rows[f"lag{lag}"], rows[f"lag_n{lag}"], out=np.full(len(own), np.inf), where=rows[f"lag_n{lag}"] > 0
        )
        which = np.flatnonzero(long & (own > FAR) & (moved < FIT * own))
        if len(which):
            yield fault(
                "shifted",
                f"Shifted by {abs(lag)} in {len(which):,} of {seen.num_sequences:,} sequences (first: sequence {int(rows['sequence'][which[0]])}): there the rollout's "
                f"log-probability of token t stands at t{lag:+d}.",
                lag=lag, num_sequences=len(which), first=int(rows["sequence"][which[0]]),
            )  # fmt: skip
            return


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else math.inf


def tails(seen: Observed) -> Iterator[Finding]:
    """Sequences that agree up to a token and are shifted after it: one side has a token more or less there."""
    found = []
    for _, _, worst in sorted(seen.worst, key=lambda w: w[2].sequence):
        where = shifted_tail(worst)
        if where is not None:
            found.append((worst.sequence, *where))
    if found:
        sequence, start, lag = found[0]
        yield fault(
            "retokenised",
            f"Re-tokenised: {len(found)} of the {len(seen.worst)} sequences furthest apart agree up to a token and are shifted after it (first: sequence {sequence}, "
            f"by {abs(lag)} from scored token {start} on). One side has {'more' if lag > 0 else 'fewer'} tokens there, so the text was tokenised again.",
            num_sequences=len(found), first=sequence, start=start, lag=lag,
        )  # fmt: skip


def shifted_tail(worst: Worst) -> tuple[int, int] | None:
    """(index, lag) from which p[t] fits q[t + lag] while it fits q[t] before; None where nothing of the kind fits."""
    p, q = worst.p, worst.q
    here = np.abs(p - q)
    best: tuple[float, int, int] | None = None
    for lag in (-3, -2, -1, 1, 2, 3):
        size = len(p) - abs(lag)
        if size < 2 * MIN_TAIL:
            continue
        shift = np.full(len(p), np.nan)
        if lag > 0:
            shift[:size] = np.abs(p[:size] - q[lag:])
        else:
            shift[-size:] = np.abs(p[-size:] - q[:size])
        before = np.concatenate(([0.0], np.cumsum(here)))
        after = np.concatenate((np.cumsum(np.nan_to_num(shift)[::-1])[::-1], [0.0]))
        cost = before + after
        inside = cost[MIN_TAIL:-MIN_TAIL]
        if len(inside):
            k = int(np.argmin(inside)) + MIN_TAIL
            if best is None or cost[k] < best[0]:
                best = (float(cost[k]), k, lag)
    if best is None or best[0] >= TAIL_FIT * float(here.sum()):
        return None
    return best[1], best[2]


def doubled_start(seen: Observed) -> Iterator[Finding]:
    if seen.num_sequences < 2 or not seen.starts_twice or any(kind == "double-bos" for _, kind, _ in seen.other_ids):
        return
    token, count = max(seen.starts_twice.items(), key=lambda item: item[1])
    if count >= DOUBLED * seen.num_sequences and len(set(seen.prompts)) > 1:
        yield fault(
            "double-bos",
            f"Double BOS: {count:,} of {seen.num_sequences:,} sequences begin with token {token} twice. Both sides saw it, so the comparison holds, but the model was "
            "not trained on it: a chat template writes BOS and the tokenizer adds another.",
            severity="warning", token=token, num_sequences=count,
        )  # fmt: skip


# -- positions ----------------------------------------------------------------------------------------


def padding(seen: Observed) -> Iterator[Finding]:
    rows = seen.columns()
    padding = rows["padding"]
    if len(padding) < MIN_SEQUENCES or len(np.unique(padding)) < 2:
        return
    own = rows["abs_d"] / rows["n"]
    least, most = padding <= np.quantile(padding, 0.25), padding >= np.quantile(padding, 0.75)
    ratio = float(np.mean(own[most])) / max(float(np.mean(own[least])), 1e-12)
    ranks = correlation(padding, own)
    if any(ratio >= a and ranks >= b for a, b in ((PADDED_RATIO, PADDED_RANKS), PADDED_ALL)):
        yield fault(
            "left-padding",
            f"Left padding: mean |d| grows with the padding before a sequence, from {np.mean(own[least]):.3g} nats where there is least to {np.mean(own[most]):.3g} "
            f"where there is most (rank correlation {ranks:.2f}, {len(padding)} sequences). One side counts padding in position_ids or attends to it.",
            ratio=ratio, rank_correlation=ranks,
        )  # fmt: skip


def positions(seen: Observed) -> Iterator[Finding]:
    found = seen.positions_count_padding
    if found and len(found) >= DOUBLED * min(seen.num_padded, 1000):
        sequence, padding = found[0]
        yield fault(
            "left-padding",
            f"Left padding: position_ids count the padding (sequence {sequence}: its first token has position {padding}). Under RoPE alone that is "
            "harmless; with absolute embeddings, sliding windows or long-context scaling it is not.",
            severity="warning", first=sequence, padding=padding,
        )  # fmt: skip
