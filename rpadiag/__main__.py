"""``python -m rpadiag`` and the ``rpadiag`` script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    from rpadiag.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
