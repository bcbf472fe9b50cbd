"""Holding gates against runs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from rpadiag.errors import EXIT_GATE_FAILED, EXIT_OK, EXIT_UNANSWERABLE, UsageError
from rpadiag.findings import GateResult
from rpadiag.gates.grammar import Gate
from rpadiag.gates.margins import margin_of
from rpadiag.gates.measures import NotMeasured, commands_of, measure
from rpadiag.runs import Run, check_same_inputs

_HOLDS = {
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_WORDS = {"<=": "at most", "<": "below", ">=": "at least", ">": "above", "==": "", "!=": "other than"}


def judge(gates: Sequence[Gate], runs: Sequence[Run], baselines: Sequence[Run] = ()) -> list[GateResult]:
    """Every gate on every run that its metric is about, in the order of the gates.

    A gate on a bisection's numbers is not held against a comparison that lies beside it; a gate that is about none of
    the runs has status ``error``. Raises UsageError for a relative gate without any baseline, NotComparableError for a
    baseline of other tokens or weights.
    """
    relative = [g for g in gates if g.relative]
    if relative and not baselines:
        raise UsageError(
            f"gate {relative[0].text!r} needs a baseline", hint="add --baseline RUN, or baseline = PATH to the policy"
        )
    base_of = functools.cache(lambda run: baseline_for(run, baselines))
    out: list[GateResult] = []
    for gate in gates:
        fitting = [r for r in runs if r.manifest.get("command") in commands_of(gate.metric)]
        out += [_judge(gate, run, base_of) for run in fitting]
        if not fitting:
            needed = " or ".join(commands_of(gate.metric))
            have = ", ".join(f"{r.path.name} ({r.manifest.get('command')})" for r in runs)
            out.append(
                _result(gate, "", "error", f"{gate.metric} is a number of a {needed} run, and none was given: {have}")
            )
    return out


def exit_code(results: Sequence[GateResult]) -> int:
    """2 when a gate could not be answered, else 1 when one failed, else 0."""
    statuses = {r.status for r in results}
    return EXIT_UNANSWERABLE if "error" in statuses else EXIT_GATE_FAILED if "fail" in statuses else EXIT_OK


def baseline_for(run: Run, baselines: Sequence[Run]) -> Run | None:
    """The baseline that the same command wrote, checked to be of the same inputs; None if there is none."""
    command = run.manifest.get("command")
    found = next((b for b in baselines if b.manifest.get("command") == command), None)
    if found is not None and command != "rollouts":  # those sample new tokens every time
        check_same_inputs(run, found, prompts_only=True)
    return found


def _judge(gate: Gate, run: Run, base_of: Callable[[Run], Run | None]) -> GateResult:
    try:
        value = measure(run, gate.metric)
        if not gate.relative:
            return _absolute(gate, run, value)
        base = base_of(run)
        if base is None:
            raise NotMeasured(f"no baseline is a {run.manifest.get('command')} run, as {run.path} is")
        return _relative(gate, run, value, base)
    except NotMeasured as error:
        return _result(gate, str(run.path), "error", error.message)


def _absolute(gate: Gate, run: Run, value: float | str) -> GateResult:
    holds = _HOLDS[gate.op](value, gate.bound)
    wanted = f"{_WORDS[gate.op]} {_written(gate.bound)}".strip()
    text = f"{gate.metric} is {_written(value)}; the gate wants {wanted}"
    return _result(gate, str(run.path), "pass" if holds else "fail", text, value=value, bound=gate.bound)


def _relative(gate: Gate, run: Run, value: float | str, base: Run) -> GateResult:
    before = measure(base, gate.metric)
    if isinstance(value, str) or isinstance(before, str) or isinstance(gate.bound, str):
        holds = _HOLDS[gate.op](value, before)
        text = f"{gate.metric} is {value}; in the baseline {base.path} it is {before}"
        return _result(gate, str(run.path), "pass" if holds else "fail", text, value=value, bound=before)
    bound = gate.factor * before + gate.bound
    excess = value - bound
    holds = _HOLDS[gate.op](excess, 0.0)
    told = f"{gate.metric} is {_written(value)}, in the baseline {base.path} {_written(before)}"
    common = {"value": value, "bound": bound}
    if holds:
        return _result(gate, str(run.path), "pass", told, margin=0.0, **common)
    margin = margin_of(run, base, gate.metric, gate.factor)
    if margin is None:
        text = f"{told}: that is beyond {_written(bound)}, and the error of this difference is not known"
        return _result(gate, str(run.path), "error", text, **common)
    beyond = f"beyond {_written(bound)} by {_written(abs(excess))}, error {_written(margin)} (2 standard errors)"
    within = abs(excess) < margin if gate.op in ("<", ">") else abs(excess) <= margin
    text = f"{told}: {beyond}{', so no difference is shown' if within else ''}"
    return _result(gate, str(run.path), "pass" if within else "fail", text, margin=margin, **common)


def _result(gate: Gate, run: str, status: str, text: str, **numbers: float | str | None) -> GateResult:
    return GateResult(name=gate.name, gate=gate.text, status=status, text=text, run=run, reason=gate.reason, **numbers)  # type: ignore[arg-type]


def _written(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.4g}"
