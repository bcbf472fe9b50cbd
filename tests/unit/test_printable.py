"""Text of unknown origin, made safe to show."""

from __future__ import annotations

import unicodedata
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from rpadiag.printable import one_line, printable


def test_escape_sequence_is_shown_and_not_obeyed() -> None:
    assert printable("\x1b[31mred\x1b[0m\x07") == "␛[31mred␛[0m␇"
    assert printable("\x9b2J") == "\ufffd2J"  # the one-byte form of ESC [


def test_text_cannot_be_reordered() -> None:
    assert printable("a\u202eb\u2066c") == "a\ufffdb\ufffdc"


def test_text_of_every_script_stays() -> None:
    text = "naïve 漢字 עברית ✓\n\tend"
    assert printable(text) == text
    assert one_line(text) == "naïve 漢字 עברית ✓ end"


@given(st.text(alphabet=st.characters()))
def test_result_holds_no_control_character_and_is_legal_xml(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    element = ET.Element("a")
    element.text = shown
    assert ET.fromstring(ET.tostring(element, encoding="utf-8")).text == (shown or None)
