"""Foreign text cannot move a cursor, forge a line or reach a terminal as anything but printable characters."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.plain_text import first_line, one_line, spell_out, storable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u200bc", r"a\u202eb\u200bc"),
        ("\ud800", r"\ud800"),
        ("a\r\nb\rc\td", "a\nb\nc\td"),
        ("äöü 漢字 ½", "äöü 漢字 ½"),
    ],
)
def test_unsafe_characters_are_spelt_out_and_others_stay(text: str, shown: str) -> None:
    assert spell_out(text) == shown


@given(st.text(alphabet=st.characters()))
def test_one_line_is_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.splitlines() in ([], [line])
    assert not {unicodedata.category(character) for character in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    line.encode()


def test_indentation_of_our_own_stays_and_breaks_become_blanks() -> None:
    assert one_line("  rival a:\n\n   forged line\tend \n") == "  rival a: forged line end"


@pytest.mark.parametrize(("text", "first"), [("", ""), ("\n", ""), ("a \nb", "a"), ("\x0bx\ny", r"\x0bx")])
def test_first_line_of_any_text(text: str, first: str) -> None:
    assert first_line(text) == first


@given(st.text(alphabet=st.characters()))
def test_what_is_storable_is_unicode_without_nul(text: str) -> None:
    kept = storable(text)
    assert "\x00" not in kept
    kept.encode()
    if "\x00" not in text and not any("\ud800" <= character <= "\udfff" for character in text):
        assert kept == text
