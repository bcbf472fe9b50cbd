"""For torchrun: several command lines of rpadiag one after another in the same ranks, so that torch is imported once for all.

``commands_in_turn.py DIRECTORY``: reads ``commands.json`` there, a list of (port, arguments), and writes for command n and rank r
``n-r.out``, ``n-r.err`` and, last, ``n-r.code``. The ranks meet at a port of its own for each command: keys of a group that has ended stay in
torchrun's store.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from rpadiag.cli.app import run


def main(directory: Path) -> None:
    rank = os.environ["RANK"]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for number, (port, arguments) in enumerate(json.loads((directory / "commands.json").read_text())):
        os.environ["MASTER_PORT"] = str(port)
        place = directory / f"{number}-{rank}"
        with place.with_suffix(".out").open("w") as out, place.with_suffix(".err").open("w") as err:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(arguments)
        place.with_suffix(".code").write_text(str(code))
    os._exit(0)  # as rpadiag leaves under torchrun


if __name__ == "__main__":
    main(Path(sys.argv[1]))
