"""Which rounding contracts reproduce a captured output bit for bit: the fingerprint of a black box.

Every level-one contract of a region is evaluated on the captured inputs and compared with the captured output. The
answer is a set: one contract (determined), several that this data cannot tell apart (not determined, with
the axis and the reason), or none (no known contract, with the structure of the differences). Nothing is
guessed: a contract counts as refuted only by more elements than level-two effects could move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpadiag.contracts import Contract, contract_from_dict
from rpadiag.errors import UsageError
from rpadiag.structure import Structure, describe_structure, mismatches, num_mismatches

MIN_ROWS = 64  # var_src flips whole rows: fewer rows cannot refute it (research: p 0.005 at 8192 columns, clustered)
RARE = 1e-4  # level-two effects move at most about this share of elements
MIN_REFUTING = 8  # elements that must speak against a contract before it counts as refuted
ORDER_ROWS = 256  # vLLM's CUDA norms add in one order below this number of rows and in another from there on
SCREEN_ROWS = 96  # rows of the first pass, which drops contracts that are far off
NUM_KEPT = 4  # contracts that it never drops
PIECE_ROWS, PIECE_ELEMENTS = 8, 8192  # least size of a piece: smaller ones cost more in calls than they save
MAX_PIECES = 6
STATUSES = ("determined", "not determined", "no known contract")
LP_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

Evaluate = Callable[[Contract], Tensor]  # contract -> output rows [R, ...]


@dataclass(frozen=True, kw_only=True)
class Ambiguity:
    """An axis on which contracts that fit equally well differ, and why this data cannot tell."""

    axis: str
    values: tuple[str, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"axis": self.axis, "values": list(self.values), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class LevelTwo:
    """Cause of rare mismatches (at most 1e-4 of the elements). contract: a variant with none left, if one has none."""

    cause: str
    num_differing: int
    contract: Contract | None = None

    def to_dict(self) -> dict[str, Any]:
        contract = self.contract.to_dict() if self.contract else None
        return {"cause": self.cause, "num_differing": self.num_differing, "contract": contract}


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What one captured region tells about its contract.

    matches: contracts that fit: bit for bit, or but for ``level_two.num_differing`` of ``num_elements``.
    runner_up: the best contract that does not fit, with its share of differing elements.
    ambiguities, reasons: why the status is ``not determined``. structure: only when no contract fits, against
    the closest one, which is then ``runner_up``.
    """

    region: str
    status: str
    dtype: str
    num_rows: int
    num_elements: int
    matches: tuple[Contract, ...] = ()
    runner_up: Contract | None = None
    runner_up_differing: float | None = None
    level_two: LevelTwo | None = None
    ambiguities: tuple[Ambiguity, ...] = ()
    reasons: tuple[str, ...] = ()
    structure: Structure | None = None

    @property
    def contract(self) -> Contract | None:
        """The contract, when it is determined."""
        return self.matches[0] if self.status == "determined" else None

    @property
    def text(self) -> str:
        """One sentence."""
        n = f"n = {self.num_elements} elements, {self.num_rows} rows"
        other = ""
        if self.runner_up is not None and self.runner_up_differing is not None:
            other = f"; next best {self.runner_up.name(self.dtype)} misses {100 * self.runner_up_differing:.3g} %"
        if self.status == "determined":
            rare = f", but for {self.level_two.num_differing} ({self.level_two.cause})" if self.level_two else ""
            return f"{self.matches[0].name(self.dtype)} reproduces every element{rare} ({n}{other})"
        if self.status == "not determined":
            why = "; ".join(self._why())
            fitting = " or ".join(m.name(self.dtype) for m in self.matches[:4]) or self.region
            return f"not determined: {fitting} ({why}; {n}{other})"
        assert self.structure is not None
        return f"no known contract of {self.region} reproduces the output{other}; {self.structure.text} ({n})"

    def _why(self) -> list[str]:
        """Reasons, each once, with the axes that it keeps untold."""
        axes: dict[str, list[str]] = {}
        for a in self.ambiguities:
            axes.setdefault(a.reason, []).append(a.axis)
        return [f"{', '.join(names)}: {reason}" for reason, names in axes.items()] + [
            r for r in self.reasons if r not in axes
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "region": self.region, "status": self.status, "dtype": self.dtype,
            "num_rows": self.num_rows, "num_elements": self.num_elements,
            "matches": [m.to_dict() for m in self.matches],
            "runner_up": self.runner_up.to_dict() if self.runner_up else None,
            "runner_up_differing": self.runner_up_differing,
            "level_two": self.level_two.to_dict() if self.level_two else None,
            "ambiguities": [a.to_dict() for a in self.ambiguities],
            "reasons": list(self.reasons),
            "structure": self.structure.to_dict() if self.structure else None,
            "text": self.text,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Inverse of :meth:`to_dict`."""
        if data.get("status") not in STATUSES:
            raise UsageError(
                f"not a fingerprint: status {data.get('status')!r}", detail=f"known: {', '.join(STATUSES)}"
            )
        two = data.get("level_two")
        structure = data.get("structure")
        return cls(
            region=data["region"], status=data["status"], dtype=data["dtype"],
            num_rows=data["num_rows"], num_elements=data["num_elements"],
            matches=tuple(contract_from_dict(m) for m in data["matches"]),
            runner_up=contract_from_dict(data["runner_up"]) if data["runner_up"] else None,
            runner_up_differing=data["runner_up_differing"],
            level_two=LevelTwo(
                cause=two["cause"], num_differing=two["num_differing"],
                contract=contract_from_dict(two["contract"]) if two["contract"] else None,
            ) if two else None,
            ambiguities=tuple(
                Ambiguity(axis=a["axis"], values=tuple(a["values"]), reason=a["reason"]) for a in data["ambiguities"]
            ),
            reasons=tuple(data["reasons"]),
            structure=Structure(**structure) if structure else None,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Search:
    """One region's question to :func:`identify`.

    candidates: contracts to try. at: int64 row indices -> what evaluates contracts on those rows; what they share is made
    once. piecewise: a row has the same bits whatever rows are evaluated with it (a vector exponential has others at the
    end of a tensor; so has a sum on a GPU, where no search goes piece by piece).
    blind_spot: reason why an axis cannot be told on this data, or None.
    variants: level-two variants of a contract. cause: what rare mismatches are called if no variant explains them.
    min_rows: rows without which ``min_rows_axis`` is not told.
    """

    region: str
    candidates: Sequence[Contract]
    at: Callable[[Tensor], Evaluate]
    blind_spot: Callable[[str], str | None]
    piecewise: bool = False
    variants: Callable[[Contract], Iterable[Contract]] = lambda _: ()
    cause: str = "reduction order"
    min_rows: int = 0
    min_rows_axis: str = ""


def is_power_of_two(x: Tensor) -> bool:
    """Whether every element is 0 or +-2^k."""
    mantissa, _ = torch.frexp(x.float().abs())
    return bool(((mantissa == 0.5) | (x == 0)).all())


def is_exact(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether every element is representable in ``dtype``."""
    return bool((x.to(dtype).to(x.dtype) == x).all())


def check_capture(region: str, out: Tensor, *inputs: Tensor) -> str:
    """Short dtype name of a captured output; wrong ranks, devices and empty tensors raise."""
    if out.numel() == 0:
        raise UsageError(f"fingerprint of {region}: the captured output is empty")
    for x in inputs:
        if x.shape[0] != out.shape[0]:
            raise UsageError(
                f"fingerprint of {region}: {x.shape[0]} input rows for {out.shape[0]} output rows",
                hint="inputs and output must come from the same tokens",
            )
        if x.device != out.device:
            raise UsageError(f"fingerprint of {region}: inputs on {x.device}, output on {out.device}")
    return LP_NAMES.get(out.dtype, str(out.dtype).removeprefix("torch."))


def not_low_precision(region: str, out: Tensor, dtype: str) -> Fingerprint | None:
    """The answer for an output that is not 16 bit: nothing was rounded to lp, so no contract can be told."""
    if out.dtype in LP_NAMES:
        return None
    return Fingerprint(
        region=region, status="not determined", dtype=dtype, num_rows=out.shape[0], num_elements=out.numel(),
        reasons=(f"the output was captured in {dtype}; contracts are told from 16-bit outputs",),
    )  # fmt: skip


def identify(search: Search, out: Tensor) -> Fingerprint:
    """Fingerprint of a captured output [R, ...] (16 bit)."""
    dtype = check_capture(search.region, out)
    flat = out.reshape(out.shape[0], -1)
    rows = flat.shape[0]
    counts = _mismatches(search, flat)
    ordered = sorted(counts, key=lambda c: counts[c])
    best = counts[ordered[0]]
    limit = RARE * flat.numel()
    base: dict[str, Any] = {
        "region": search.region, "dtype": dtype, "num_rows": rows, "num_elements": flat.numel(),
    }  # fmt: skip
    if best > limit:
        expected = search.at(torch.arange(rows))(ordered[0]).reshape(rows, -1)
        return Fingerprint(
            **base, status="no known contract", runner_up=ordered[0], runner_up_differing=best / flat.numel(),
            structure=describe_structure(expected, flat),
        )  # fmt: skip
    refuting = _refuting(best, limit)
    fitting = [c for c in ordered if counts[c] == best or counts[c] < refuting]
    exact = [c for c in fitting if counts[c] == best]
    others = [c for c in ordered if c not in fitting]
    level_two = _level_two(search, exact[0], flat, best) if best else None
    ambiguities = _ambiguities(search, fitting, counts, best)
    reasons = []
    if rows < search.min_rows:
        reasons.append(
            f"too few rows: {rows}, and the {search.min_rows_axis} axis is told by whole rows: at least {search.min_rows} are needed"
        )
    return Fingerprint(
        **base,
        status="determined" if len(fitting) == 1 and not reasons else "not determined",
        matches=tuple(fitting),
        runner_up=others[0] if others else None,
        runner_up_differing=counts[others[0]] / flat.numel() if others else None,
        level_two=level_two,
        ambiguities=ambiguities,
        reasons=tuple(reasons),
    )


def _refuting(best: int, limit: float) -> float:
    """Number of elements that refute a contract when the best one misses ``best``; one above ``limit`` counts as that."""
    return max(MIN_REFUTING, 10 * min(best, limit), limit if best else 0)


def _mismatches(search: Search, flat: Tensor) -> dict[Contract, int]:
    """Elements that differ, per contract still in the race: all rows for the near ones, a sample for the far ones."""
    rows = flat.shape[0]
    limit = RARE * flat.numel()

    def runner_up(found: Sequence[int]) -> int | None:
        return min((n for n in found if n >= _refuting(min(found), limit)), default=None)

    if rows <= 2 * SCREEN_ROWS:
        return _race(search, search.candidates, flat, torch.arange(rows), runner_up)
    sample = torch.linspace(0, rows - 1, SCREEN_ROWS).long()

    def bar(found: Iterable[int]) -> int:
        return max(min(found) * 4, int(0.03 * sample.numel() * flat.shape[1]))

    def first_far(found: Sequence[int]) -> int | None:
        return min((n for n in sorted(found)[NUM_KEPT:] if n > bar(found)), default=None)

    first = _race(search, search.candidates, flat, sample, first_far)
    scale = rows / SCREEN_ROWS
    near = sorted(first, key=lambda c: first[c])
    kept = [c for i, c in enumerate(near) if i < NUM_KEPT or first[c] <= bar(first.values())]
    exact = _race(search, kept, flat, torch.arange(rows), runner_up)
    return {c: exact[c] if c in exact else int(first[c] * scale) for c in near}


def _race(
    search: Search,
    candidates: Sequence[Contract],
    flat: Tensor,
    rows: Tensor,
    enough: Callable[[Sequence[int]], int | None],
) -> dict[Contract, int]:
    """Elements of these rows that differ, per contract; of one that differs in more than ``enough``, only so many.

    All run on a first piece of the rows. Those that lead there run on to the end until their counts tell what is enough,
    which no further count may raise; the others run on for as long as they have not reached it.
    """
    size = rows.numel() * flat.shape[1]
    apart = search.piecewise and flat.device.type == "cpu"
    num = max(1, min(MAX_PIECES, len(rows) // PIECE_ROWS, size // PIECE_ELEMENTS)) if apart else 1
    pieces = [_counter(search, flat, rows[k::num]) for k in range(num)]
    counts = {c: pieces[0](c) for c in candidates}
    finished: dict[Contract, int] = {}
    bound = None
    for c in sorted(counts, key=lambda c: counts[c]):
        counts[c] = finished[c] = counts[c] + sum(piece(c) for piece in pieces[1:])
        bound = enough(list(finished.values()))
        if bound is not None:
            break
    while len(pieces) > 1 and bound is not None:
        piece = pieces.pop()
        for c in candidates:
            if c not in finished and counts[c] <= bound:
                counts[c] += piece(c)
    return counts


def _counter(search: Search, flat: Tensor, rows: Tensor) -> Callable[[Contract], int]:
    """contract -> elements of these rows that differ."""
    evaluate, part = search.at(rows), flat[rows]
    if bool(part.isnan().any()):
        return lambda contract: num_mismatches(evaluate(contract).reshape(part.shape), part)
    return lambda contract: int(torch.count_nonzero(evaluate(contract).reshape(part.shape) != part))


def _level_two(search: Search, contract: Contract, flat: Tensor, best: int) -> LevelTwo:
    """Name the cause of rare mismatches: the level-two variant that removes them all, else the region's usual one.

    A variant has to explain the rows that differ, and some more, before it is tried on all of them: never fewer than
    ``ORDER_ROWS``, because an order of addition may depend on the number of rows.
    """
    rows = torch.arange(flat.shape[0])
    expected = search.at(rows)(contract).reshape(flat.shape)
    wrong = mismatches(expected, flat).any(dim=1)
    first = rows[torch.argsort(wrong.to(torch.int8), descending=True, stable=True)][: max(int(wrong.sum()), ORDER_ROWS)]
    for variant in search.variants(contract):
        if _counter(search, flat, first)(variant) == 0 and _counter(search, flat, rows)(variant) == 0:
            changed = [a for a in contract.axes if getattr(variant, a.name) != getattr(contract, a.name)]
            cause = ", ".join(f"{a.name}={getattr(variant, a.name)}" for a in changed)
            return LevelTwo(cause=cause, num_differing=best, contract=variant)
    return LevelTwo(cause=search.cause, num_differing=best)


def _ambiguities(
    search: Search, fitting: Sequence[Contract], counts: Mapping[Contract, int], best: int
) -> tuple[Ambiguity, ...]:
    """Axes on which the fitting contracts differ, each with the reason why the data cannot tell."""
    found = []
    for axis in fitting[0].axes:
        values = tuple(dict.fromkeys(str(getattr(c, axis.name)) for c in fitting))
        if len(values) > 1:
            weakest = max(counts[c] for c in fitting)
            fallback = (
                f"all of them give the same {'bits' if best == 0 else 'number of rare mismatches'} on this data"
                if weakest == best
                else f"told apart by at most {weakest - best} elements, {MIN_REFUTING} are needed: capture more rows"
            )
            found.append(Ambiguity(axis=axis.name, values=values, reason=search.blind_spot(axis.name) or fallback))
    return tuple(found)
