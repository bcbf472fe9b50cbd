"""Errors a user can act on.

Every expected failure is an :class:`RpadiagError`: what happened (``message``), why (``detail``) and
what to do (``hint``). The command line prints the three and leaves with ``exit_code``; anything else
that escapes is a bug in rpadiag and leaves with 3.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

EXIT_OK = 0
EXIT_GATE_FAILED = 1
EXIT_UNANSWERABLE = 2
EXIT_BUG = 3


class RpadiagError(Exception):
    """The question cannot be answered: usage, missing input, or inputs that do not fit together.

    message: one sentence saying what happened, with the value at fault.
    detail:  why, or the evidence (optional).
    hint:    what to do next (optional).
    """

    exit_code = EXIT_UNANSWERABLE

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(self.detail)
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_plain(self) -> list[str | None]:
        """Class name, message, detail and hint: plain values, for another process."""
        return [type(self).__name__, self.message, self.detail, self.hint]


class UsageError(RpadiagError):
    """An argument that means nothing here: an unknown name, a value out of range."""


class InputError(RpadiagError):
    """A model, prompt file, bundle or run that is missing, broken or of the wrong kind."""


class MissingDependencyError(RpadiagError):
    """A package this request needs is not installed; ``hint`` is the install line."""


class NotComparableError(RpadiagError):
    """Two sides that were given different tokens, weights or positions."""


class CaptureError(RpadiagError):
    """A requested site never fired, or fired with a shape that the site map does not expect."""


class EngineError(RpadiagError):
    """An engine failed to start or died while running."""


def from_plain(plain: Sequence[str | None], *, place: str = "") -> RpadiagError:
    """The error that :meth:`RpadiagError.to_plain` took apart; ``place`` goes before its message."""
    kind, message, detail, hint = plain
    error: RpadiagError = globals()[str(kind)](f"{place}{message}", detail=detail, hint=hint)
    return error


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Error for a name that is not in a closed list: lists the known ones and the nearest match."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of the known {kind}s"
    return UsageError(f"unknown {kind}: {name}", detail=f"known {kind}s: {', '.join(names)}", hint=hint)
