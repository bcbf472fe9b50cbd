"""``python -m rpadiag`` and the ``rpadiag`` script."""

from __future__ import annotations

import gc
import os
import sys

COLLECT_RARELY = (
    20_000,
    10,
    50,
)  # importing the trainer stack makes half a million objects, and none of them is garbage


def main() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(*COLLECT_RARELY)
    from rpadiag.cli.app import run

    code = run()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the destructors of a process group wait for ranks that may have ended in an error
    sys.exit(code)


if __name__ == "__main__":
    main()
