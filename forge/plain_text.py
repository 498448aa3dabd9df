"""Foreign text made harmless: what could move a cursor, hide, reorder or forge a line is spelt out or joined.

Programs, language models, file names and servers write texts that end up on a terminal, in a report and in prompts. One
function decides for all of them which characters are never passed on as they are.
"""

from __future__ import annotations

import re
import unicodedata

_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Controls (ANSI escapes among them), formats (text direction, zero width), lone surrogates, private use, separators."""
_BREAK = re.compile(r"[ \t]*[\n\t][\n\t ]*")


def spell_out(text: str) -> str:
    r"""Return `text` with every unsafe character as its escape (``\x1b``); line feeds and tabs stay."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in _UNSAFE
        else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: object) -> str:
    """Return text spelt out on one line; blanks at its beginning stay, so that our own indentation does."""
    return _BREAK.sub(" ", spell_out(str(text))).rstrip()


def first_line(text: str) -> str:
    """Return the first line of a text, spelt out; the empty text for an empty one."""
    lines = spell_out(text).split("\n", 1)
    return lines[0].rstrip()


def storable(text: str) -> str:
    """Return `text` without what cannot be stored: NUL is left out, lone surrogates become ``?``."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
