"""Where, why and how much a trainer's and a rollout engine's forward passes disagree.

``rpadiag.align(model, ...)`` aligns a trainer in place; ``rpadiag.compare``, ``bisect``, ``capture``, ``fingerprint``, ``rollouts``, ``gate`` and ``report``
are the commands as functions (docs/python-api.md). Importing the package imports nothing heavy: names below are resolved on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpadiag.api import Result as Result
    from rpadiag.api import bisect as bisect
    from rpadiag.api import capture as capture
    from rpadiag.api import compare as compare
    from rpadiag.api import compare_bundles as compare_bundles
    from rpadiag.api import fingerprint as fingerprint
    from rpadiag.api import gate as gate
    from rpadiag.api import open_run as open_run
    from rpadiag.api import report as report
    from rpadiag.api import rollouts as rollouts
    from rpadiag.regions.align import align as align

__version__ = "0.1.0"

_COMMANDS = ("bisect", "capture", "compare_bundles", "fingerprint", "gate", "report")
_PACKAGES = ("compare", "rollouts")  # commands whose name a subpackage has as well
_PUBLIC = {"align": "rpadiag.regions.align", **dict.fromkeys((*_COMMANDS, "open_run", "Result"), "rpadiag.api")}

__all__ = ["__version__", *_PUBLIC, *_PACKAGES]


class _CallablePackage(ModuleType):
    """A subpackage that is its command when it is called: ``rpadiag.compare(...)`` beside ``rpadiag.compare.metrics``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._command(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._command)

    @property
    def _command(self) -> Any:
        return getattr(import_module("rpadiag.api"), self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: the import system binds a subpackage here, whoever imports it first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
