"""The run directory: what a command writes and every report, gate and comparison reads.

Nothing else in rpadiag knows the names of the files in it. ``docs/run-format.md`` is generated from
:mod:`rpadiag.runs.schema`.
"""

from rpadiag.runs.claim import create_run
from rpadiag.runs.manifest import token_digest, weights_digest
from rpadiag.runs.reader import Run, check_same_inputs, open_run
from rpadiag.runs.writer import RunWriter

__all__ = [
    "Run",
    "RunWriter",
    "check_same_inputs",
    "create_run",
    "open_run",
    "token_digest",
    "weights_digest",
]
