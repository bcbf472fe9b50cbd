"""Explanations of differing tokens, positions, masks and weights: what must stop before numerics are looked at."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rpadiag.compare.diagnose_identity import equals_an_input
from rpadiag.compare.diagnose_structure import prefix_boundary
from rpadiag.compare.diagnose_subset import rank_of_difference
from rpadiag.compare.explain import Context, Explanation, Pair, percent, rel_error
from rpadiag.compare.roles import Role
from rpadiag.structure import same_values


def mismatched_shapes(site: str, role: Role, a: Tensor, b: Tensor) -> Explanation:
    """Two tensors that cannot be laid over one another: how they line up, if they do."""
    sizes = f"shapes {list(a.shape)} and {list(b.shape)}"
    numbers: dict[str, object] = {"shape_a": list(a.shape), "shape_b": list(b.shape)}
    if a.ndim != b.ndim or a.shape[1:] != b.shape[1:] or not a.ndim:
        if a.numel() == b.numel() and same_values(a.reshape(-1), b.reshape(-1)):
            text = f"{sizes} hold the same values in the same order: flattened differently"
            return Explanation(
                code="reshaped", severity="data", text=text, proof="identity", region="data", numbers=numbers
            )
        text = f"{sizes}: the two sides hold different things here"
        return Explanation(code="shapes", severity="data", text=text, proof="identity", region="data", numbers=numbers)
    short, long, name = (a, b, "B") if len(a) < len(b) else (b, a, "A")
    extra = len(long) - len(short)
    what = "tokens" if role.kind == "tokens" else "rows"
    lead = common_prefix(short, long)
    tail = common_prefix(short.flip(0), long.flip(0))
    numbers |= {"extra": extra, "longer_side": name, "common_prefix": lead, "common_suffix": tail}
    count = "one" if extra == 1 else str(extra)
    base = f"stop before numerics: sequences differ in length by {count} ({sizes}, {site})"
    if tail == len(short):
        text = f"{base}; suffixes equal after dropping {count} leading entr{'y' if extra == 1 else 'ies'} of {name}"
        if what == "tokens":
            head = [int(v) for v in long[: extra + 1].reshape(-1)[:4]]
            if extra == 1 and len(head) > 1 and head[0] == head[1]:
                text += f": one leading BOS ({head[0]}) too many, BOS was added twice"
            else:
                text += f": leading tokens {head[:extra]} (BOS, a system prompt or left padding)"
    elif lead == len(short):
        text = f"{base}; prefixes equal, {name} has {count} more at the end: truncation, EOS or right padding"
    elif lead + tail >= len(short):
        text = f"{base}; {name} has {count} more at index {lead}, all else equal: inserted or dropped in the middle"
    else:
        text = f"{base}; equal up to index {lead} and over the last {tail}: tokenised differently in between"
    return Explanation(code="length", severity="data", text=text, proof="identity", region="data", numbers=numbers)


def common_prefix(a: Tensor, b: Tensor) -> int:
    """Number of leading slices that are equal."""
    n = min(len(a), len(b))
    same = (a[:n] == b[:n]).reshape(n, -1).all(1) if n else torch.zeros(0, dtype=torch.bool)
    return int(same.long().cumprod(0).sum())


def integers(pair: Pair) -> Iterator[Explanation]:
    """Token ids, positions, masks: any difference is a difference of the data."""
    a, b = pair.a.to(torch.int64), pair.b.to(torch.int64)
    differs = a != b
    n = int(differs.sum())
    first = [int(i) for i in torch.nonzero(differs)[0]]
    if pair.role.kind == "positions":
        yield positions(pair, a, b, first)
        return
    if pair.role.region == "router":
        return
    region, severity = ("data", "data") if pair.role.region in ("data", "unknown") else (pair.role.region, "semantic")
    lag = _lag(a, b)
    text = f"stop before numerics: {n:,} of {a.numel():,} {pair.role.kind} differ, first at index {first}"
    if lag is not None:
        text = f"stop before numerics: B[t] == A[t{lag:+d}]: the {pair.role.kind} are shifted by {abs(lag)}"
    elif n == 1:
        text += f" ({int(a[differs][0])} against {int(b[differs][0])})"
    yield Explanation(
        code="inputs-differ",
        severity=severity,
        text=text,
        proof="identity",
        region=region,
        numbers={"num": n, "first": first, "lag": lag},
    )


def _lag(a: Tensor, b: Tensor) -> int | None:
    for k in range(1, min(8, len(a) // 2) + 1) if a.ndim else ():
        if same_values(a[k:], b[:-k]):
            return k
        if same_values(a[:-k], b[k:]):
            return -k
    return None


def positions(pair: Pair, a: Tensor, b: Tensor, first: list[int]) -> Explanation:
    """What two differing position vectors are: an offset, a reset at a document boundary, rounding."""
    delta = (b - a).reshape(-1)
    rounded = a.float().bfloat16().to(torch.int64)
    numbers: dict[str, object] = {"first": first}
    k = first[-1]
    severity, region = "data", "data"
    if bool((delta == delta[0]).all()):
        text = f"positions are offset by {int(delta[0])} everywhere: harmless under RoPE alone (it is relative), not for absolute embeddings or windows"
        numbers["offset"] = int(delta[0])
    elif same_values(rounded, b):
        text = "B.positions == bf16(A.positions): positions beyond 256 collapse onto the bf16 grid, neighbouring tokens share an angle"
        severity, region = "semantic", "rope"
    elif a.ndim == 1 and prefix_boundary(a, b, axis=0) is not None and bool((delta[k:] == delta[k]).all()):
        side = "A" if int(delta[k]) > 0 else "B"
        text = (
            f"positions agree before index {k} and are offset by {int(delta[k])} from the boundary (index {k}) on: {side} restarts there "
            "-> documents packed in one row: first document bit-equal, everything after the boundary differs"
        )
        numbers |= {"boundary": k, "offset": int(delta[k])}
    else:
        text = f"positions differ first at index {first}, by {int(delta[delta != 0][0])}"
    return Explanation(
        code="positions-differ", severity=severity, text=text, proof="identity", region=region, numbers=numbers
    )


def weights(pair: Pair, ctx: Context) -> Iterator[Explanation]:
    """Parameters differ: nothing downstream may be blamed on a kernel."""
    c = pair.change
    how = f"weights differ before any activation is compared ({percent(c.differing)} of {pair.site}, relative L2 {c.rel_l2:.3g}); do not attribute to kernels"
    stale = list(equals_an_input(pair, ctx))
    if stale:
        source = stale[0].numbers["input"]
        side = stale[0].numbers["side"]
        text = f"{how}; {side} equals {source} bit for bit, so {side} runs with the weights of another step or checkpoint (stale after sync)"
        yield Explanation(
            code="stale-weights", severity="semantic", text=text, proof="identity", numbers=stale[0].numbers
        )
        return
    rank = rank_of_difference(pair)
    if rank is not None:
        text = f"{how}; they differ by a matrix of rank {rank}: a LoRA adapter is merged on one side only"
        yield Explanation(code="low-rank", severity="semantic", text=text, proof="solved", numbers={"rank": rank})
        return
    small = rel_error(pair.b, pair.a)
    guess = "another training step (stale weights)" if small < 0.3 else "another checkpoint, layer or layout"
    yield Explanation(
        code="weights-differ", severity="semantic", text=f"{how}; parameter hashes differ: {guess}", proof="solved", numbers={"rel_l2": small},
    )  # fmt: skip
