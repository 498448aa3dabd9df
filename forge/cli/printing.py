"""Printing to a terminal: every text goes through `forge.plain_text` first, since programs and models wrote some of it."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
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


def make_table(*headings: str, text: frozenset[str] = frozenset()) -> Table:
    """Return an empty table of plain columns; those named in `text` are set left, the others right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as it is: a cut number or id is worse than a long line, above all in a pipe or a log."""
    before = console.width
    console.width = 10_000
    try:
        console.width = max(before, Measurement.get(console, console.options, table).maximum)
        console.print(table, crop=False)
    finally:
        console.width = before
