"""Thresholds on the numbers of a run, and whether they hold: ``k3_kl <= 1e-3``, ``first_divergent_site == none``.

A gate is absolute, or relative to a baseline run and then fails only beyond the error of the difference. A number that a
run does not have is an error, never a pass. The grammar is in :mod:`rpadiag.gates.grammar`, the metrics in
:mod:`rpadiag.gates.measures`.
"""

from rpadiag.gates.changes import changes_between
from rpadiag.gates.grammar import Gate, parse_gate
from rpadiag.gates.judge import exit_code, judge
from rpadiag.gates.policy import Policy, load_policy

__all__ = ["Gate", "Policy", "changes_between", "exit_code", "judge", "load_policy", "parse_gate"]
