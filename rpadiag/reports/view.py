"""What a page shows, as plain data between the run and the template: figures, tables, blocks, sections.

Also the one way that numbers are written in reports, so that the same value reads the same everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NBSP = "\u00a0"
MINUS = "\u2212"
MISSING = "\u2013"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table; numeric columns are right-aligned with tabular figures."""

    title: str
    numeric: bool = True
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of already formatted cells. ``emphasis``: indices of rows to set apart."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    emphasis: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One position of the switch over a figure: the traces that it shows, and layout merged over the figure's."""

    label: str
    traces: tuple[int, ...]
    note: str
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A plot: Plotly data and layout in light colours.

    narrow: layout keys that replace those of ``layout`` on a phone. alt: what the plot says, for those who do
    not see it. table: the same numbers. explorer: what each cell of a map opens, as the script of the page reads it
    (see :mod:`rpadiag.reports.site_details`).
    """

    key: str
    title: str
    caption: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    narrow: Mapping[str, Any]
    alt: str
    choices: Sequence[Choice] = ()
    table: Table | None = None
    explorer: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenInContext:
    """A token with the text before and after it, and its numbers by column."""

    before: str
    token: str
    after: str
    where: str
    cells: Sequence[str]
    argmax_differs: bool


@dataclass(frozen=True, kw_only=True)
class SequenceRow:
    """A sequence in the list of those furthest apart. name: how its prompt begins. share: its bar, of the longest one."""

    prompt: int
    name: str
    cells: Sequence[str]
    share: float
    outlier: bool


@dataclass(frozen=True, kw_only=True)
class SequenceList:
    """Sequences whose tokens the page holds. packed: gzip of JSON in base64, opened by the page when a row is."""

    key: str
    columns: Sequence[Column]
    rows: Sequence[SequenceRow]
    packed: str
    left_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of one run beside others. note: how far it is from the first run's. changed: not what the first run has.

    text: as a page shows it. value, se: the number itself (or the word) and its standard error, where there is one.
    """

    text: str
    value: float | int | str | None = None
    se: float | None = None
    note: str = ""
    changed: bool = False


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Runs in columns. columns: (name, when). groups: (title, rows), a row being (label, hint, one cell for each run)."""

    columns: Sequence[tuple[str, str]]
    groups: Sequence[tuple[str, Sequence[tuple[str, str, Sequence[Cell]]]]]


@dataclass(frozen=True, kw_only=True)
class Command:
    """Something to type or to paste, and what it does."""

    text: str
    code: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One headline number. ``compare``: what to hold it against."""

    label: str
    value: str
    unit: str
    compare: str


@dataclass(frozen=True, kw_only=True)
class Block:
    """A titled part of a section: paragraphs, then figures, sequences, tokens, tables and commands, whichever it has."""

    key: str
    title: str
    lead: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    tokens: Sequence[TokenInContext] = ()
    token_columns: Sequence[Column] = ()
    sequences: SequenceList | None = None
    beside: Beside | None = None
    commands: Sequence[Command] = ()
    notes: Sequence[str] = ()
    warning: str | None = None
    side_by_side: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """How a run was made: the command to repeat it, the facts worth reading, the whole manifest as JSON text."""

    name: str
    command: str
    facts: Sequence[tuple[str, str]]
    manifest: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A finding as shown: severity, sentence, and the site or region it is about."""

    severity: str
    text: str
    about: str | None


@dataclass(frozen=True, kw_only=True)
class Section:
    """Everything about one run, or about a comparison and the attribution that belongs to it."""

    key: str
    title: str
    subtitle: str
    kind: str | None
    sentence: str | None
    stacks: Sequence[tuple[str, str]]
    tiles: Sequence[Tile] = ()
    findings: Sequence[Statement] = ()
    further: Sequence[Statement] = ()
    blocks: Sequence[Block] = field(default_factory=tuple)
    records: Sequence[RunRecord] = field(default_factory=tuple)


def is_missing(value: Any) -> bool:
    """None and NaN (how pandas hands back null)."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def number(value: Any, digits: int = 3) -> str:
    """Significant digits; powers of ten outside 0.001 to 99,999; ``0`` only for an exact zero."""
    if is_missing(value):
        return MISSING
    value = float(value)
    if value == 0:
        return "0"
    if math.isinf(value):
        return "infinite" if value > 0 else f"{MINUS}infinite"
    size = abs(value)
    if size < 1e-3 or size >= 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def count(value: Any) -> str:
    """An integer with thousands separators."""
    return MISSING if is_missing(value) else f"{int(value):,}".replace("-", MINUS)


def percent(share: Any) -> str:
    """A share as a percentage; ``0 %`` and ``100 %`` only when exact."""
    if is_missing(share):
        return MISSING
    share = float(share)
    if share in (0.0, 1.0):
        return f"{share * 100:.0f}{NBSP}%"
    if 0.9995 <= share < 1.0:
        return f">{NBSP}99.9{NBSP}%"
    return f"{number(share * 100, 3 if share >= 0.1 else 2)}{NBSP}%"


def words(value: Any, absent: str = "") -> str:
    """Text of a nullable column."""
    return value if isinstance(value, str) and value else absent


def spoken(text: str) -> str:
    """A sentence of a run as pages write its numbers: thousands set apart, powers of ten with a minus sign."""
    text = re.sub(r"(?<![\w.,])\d{5,}(?![\w.])", lambda m: f"{int(m[0]):,}", text)
    return re.sub(r"(?<=\d)e-0?(\d+)\b", lambda m: f"e{MINUS}{m[1]}", text)


def plural(n: int, noun: str) -> str:
    """``1 token``, ``2,712 tokens``."""
    return f"{count(n)} {noun}" if n == 1 else f"{count(n)} {noun}s"
