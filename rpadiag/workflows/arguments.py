"""What a Python caller gives, brought to the types of an options class, or refused by the argument's name.

The command line has its parser for this; here text stands for a path and for a list of one, as it does there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rpadiag.errors import UsageError
from rpadiag.sites import ALIGNABLE_REGIONS, ALL

REGION_LISTS = ("align", "regions")  # a comma between names, or `all`
WORDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "True or False", "Path": "a path"}


def named_regions(text: str) -> tuple[str, ...]:
    """``rope,swiglu`` as a tuple; ``all`` is every alignable region. Names are checked by the options class."""
    names = aligned_regions(text)
    return ALIGNABLE_REGIONS if names == (ALL,) else names


def aligned_regions(text: str) -> tuple[str, ...]:
    """``rope,swiglu`` as a tuple; ``all`` stays, because what it comes to depends on the model and the contract."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def of_types(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataclass whose fields are ``str``, ``int``, ``float``, ``bool``, ``Path`` or ``tuple[str, ...]``, or one of these or None.

    Raises UsageError for a value of another kind. Names that the class does not have are left to its own constructor.
    """
    kinds = {f.name: str(f.type) for f in dataclasses.fields(options)}
    return {name: _value(name, value, kinds[name]) if name in kinds else value for name, value in given.items()}


def _value(name: str, value: Any, kind: str) -> Any:
    kind, _, optional = kind.partition(" | ")
    if value is None and optional:
        return None
    if kind == "tuple[str, ...]":
        return _texts(name, value)
    if kind == "Path" and isinstance(value, str | os.PathLike):
        return Path(value)
    if kind == "str" and isinstance(value, str | Path):
        return str(value)
    if isinstance(value, bool):  # which is an Integral too
        if kind == "bool":
            return value
    elif kind == "int" and isinstance(value, Integral):
        return int(value)
    elif kind == "float" and isinstance(value, Real):
        return float(value)
    raise refused(name, value, WORDS[kind])


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        if name == "align":
            return aligned_regions(value)
        return named_regions(value) if name in REGION_LISTS else (value,)
    if not isinstance(value, Iterable):
        raise refused(name, value, "a list of texts")
    texts = tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise refused(name, value, "a list of texts")
    return texts


def paths_of(name: str, value: Any) -> list[Path]:
    """One path or several."""
    several = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(several, Iterable):
        raise refused(name, value, "a path or a list of paths")
    found = list(several)
    if not all(isinstance(one, str | os.PathLike) for one in found):
        raise refused(name, value, "a path or a list of paths")
    return [Path(one) for one in found]


def refused(name: str, value: Any, wanted: str) -> UsageError:
    """The error for an argument of another kind."""
    return UsageError(f"{name} is {value!r:.60}, of type {type(value).__name__}", hint=f"give {wanted}")
