"""Text of unknown origin made safe to show: no character that moves a cursor, colours a terminal or reorders a line.

Prompts, tokens, file names and manifests come from elsewhere. Control characters become their pictures (ESC is shown as
\u241b), characters that change the direction of text and those that no XML document may hold become \ufffd. Everything
else, of any script, stays as it is.
"""

from __future__ import annotations

import re

_KEPT = "\n\t"
_REORDERING = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[\x00-\x1f\x7f-\x9f{_REORDERING}\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """The text with every unsafe character replaced by a visible one; newlines and tabs stay."""
    return _UNSAFE.sub(_shown, text)


def one_line(text: str) -> str:
    """The same on one line: runs of white space become a single space."""
    return printable(" ".join(text.split()))


def _shown(match: re.Match[str]) -> str:
    char = match[0]
    if char in _KEPT:
        return char
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
