"""The grammar of gates.

::

    gate   := metric OP bound | "delta(" metric ")" OP number
    OP     := <= | < | >= | > | == | !=
    bound  := number | word | "word" | baseline
    baseline := "baseline" [ "*" number ] [ ("+" | "-") number ]

``delta(m) <= x`` is the same as ``m <= baseline + x``. Metrics are listed by :func:`rpadiag.gates.measures.known_metrics`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rpadiag.errors import UsageError
from rpadiag.gates.measures import check_metric, is_text

OPERATORS = ("<=", ">=", "==", "!=", "<", ">")
ORDERED = ("<=", ">=", "<", ">")

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_GATE = re.compile(
    r"\s*(?:delta\(\s*(?P<delta>[\w.]+)\s*\)|(?P<metric>[\w.]+))\s*(?P<op><=|>=|==|!=|<|>)\s*(?P<bound>.*?)\s*"
)
_BASELINE = re.compile(
    rf"baseline(?:\s*\*\s*(?P<factor>{_NUMBER}))?(?:\s*(?P<sign>[+-])\s*(?P<offset>{_NUMBER.removeprefix('[+-]?')}))?"
)
_WORD = re.compile(r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[\w.\- ]+))""")

_EXAMPLES = "for example k3_kl<=1e-3, first_divergent_site==none, delta(mean_abs_d)<=1e-3 or k3_kl<=baseline*1.1"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One threshold. ``bound`` is a number or a word; with ``relative`` it is ``factor`` * baseline + ``bound``."""

    name: str
    text: str
    metric: str
    op: str
    bound: float | str
    relative: bool = False
    factor: float = 1.0
    reason: str | None = None


def parse_gate(text: str, *, name: str | None = None, reason: str | None = None) -> Gate:
    """A gate from its text. Raises UsageError for what the grammar or the list of metrics does not have."""
    found = _GATE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"gate {text!r} is not METRIC OP VALUE", detail=f"operators: {' '.join(OPERATORS)}", hint=_EXAMPLES
        )
    metric = check_metric(found["delta"] or found["metric"])
    op, written = found["op"], found["bound"]
    label = text.strip() if name is None else name
    if found["delta"]:
        bound = _number(written, text)
        return _checked(
            Gate(name=label, text=text.strip(), metric=metric, op=op, bound=bound, relative=True, reason=reason)
        )
    base = _BASELINE.fullmatch(written)
    if base is not None:
        offset = float(base["offset"] or 0) * (-1 if base["sign"] == "-" else 1)
        factor = float(base["factor"] or 1)
        bound = offset
        return _checked(
            Gate(
                name=label, text=text.strip(), metric=metric, op=op, bound=bound, relative=True, factor=factor, reason=reason,
            )
        )  # fmt: skip
    value = _word(written, text) if is_text(metric) else _number(written, text)
    return _checked(Gate(name=label, text=text.strip(), metric=metric, op=op, bound=value, reason=reason))


def _checked(gate: Gate) -> Gate:
    if isinstance(gate.bound, float) and not (math.isfinite(gate.bound) and math.isfinite(gate.factor)):
        raise UsageError(
            f"gate {gate.text!r}: its number is too large to be held against anything", hint="write a smaller one"
        )
    if is_text(gate.metric):
        if gate.op in ORDERED:
            raise UsageError(f"gate {gate.text!r}: {gate.metric} is a name", hint="hold it with == or !=")
        if gate.relative and (gate.factor != 1 or gate.bound):
            raise UsageError(
                f"gate {gate.text!r}: {gate.metric} is a name", hint="it can only be == baseline or != baseline"
            )
    elif gate.relative and gate.op == "!=":
        raise UsageError(
            f"gate {gate.text!r}: a difference from the baseline cannot be demanded", hint="use <=, >= or =="
        )
    return gate


def _number(written: str, text: str) -> float:
    if written in ("true", "false"):
        return float(written == "true")
    if not re.fullmatch(_NUMBER, written):
        raise UsageError(f"gate {text!r}: {written!r} is not a number", hint=_EXAMPLES)
    return float(written)


def _word(written: str, text: str) -> str:
    found = _WORD.fullmatch(written)
    if found is None:
        raise UsageError(f"gate {text!r}: {written!r} is not a name", hint=_EXAMPLES)
    return next(g for g in found.groups() if g is not None)
