"""Printing to a terminal: every text goes through `forge.plain_text` first, since programs and models wrote some of it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from forge.plain_text import one_line, spell_out


def print_line(console: Console, text: str, *, style: str = "", gap: bool = False) -> None:
    """Print one line, however the text tries to be more; `gap` puts an empty one before it."""
    if gap:
        console.print()
    console.print(Text(one_line(text), style=style), soft_wrap=True)


def print_block(console: Console, text: str, *, style: str = "") -> None:
    """Print a text of several lines."""
    console.print(Text(spell_out(text), style=style), soft_wrap=True)


def in_cell(text: object) -> Text:
    """Return the text of a table's cell: one line, no markup."""
    return Text(one_line(text))
