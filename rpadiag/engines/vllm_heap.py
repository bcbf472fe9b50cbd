"""The garbage collector of the process that hosts vLLM.

Importing vLLM makes 600,000 objects that live as long as the process. Between them, vLLM's loader, runner and shutdown and
our own unloading run six full collections for every model that takes another's place, and each would walk through all of
these objects: seconds, where the model itself loads in a fraction of one.
"""

from __future__ import annotations

import gc

RARELY = (20_000, 10, 50)  # thresholds while importing: hardly anything of it is garbage


def spare_imports() -> None:
    """Leave everything that exists out of all later collections: for after the import of vLLM, before there is a model.

    vLLM freezes the heap around an engine and thaws it when the engine ends, which would bring the imports back: from here
    on both do nothing. The second call and later ones change nothing.
    """
    if gc.get_freeze_count():
        return
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, _as_it_is)


def _as_it_is() -> None:
    """In place of ``gc.freeze`` and ``gc.unfreeze``."""
