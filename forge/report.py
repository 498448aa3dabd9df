"""The report of a campaign in Markdown. Text that a program or a model wrote is kept inside its cell."""

from __future__ import annotations

import html

from jinja2 import Environment, PackageLoader, StrictUndefined

from forge.honesty import Consequence, followed, share
from forge.plain_text import spell_out
from forge.summary import Summary

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]|#~"})


def cell(text: object) -> str:
    """Return text as one line that cannot end its table cell, open markup or start HTML."""
    return html.escape(" ".join(spell_out(str(text)).split()), quote=False).translate(_SPECIAL)


def number(value: float | None, digits: int) -> str:
    """Return a number with fixed digits, or a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share in percent, or a dash for none."""
    return "-" if value is None else f"{100 * value:.1f}%"


def _followed(consequence: Consequence) -> str:
    return "; ".join(followed(consequence)) or "nothing"


def render_report(summary: Summary) -> str:
    """Return the report as Markdown."""
    environment = Environment(loader=PackageLoader("forge", "."), undefined=StrictUndefined, autoescape=False)
    environment.filters.update(cell=cell, number=number, percent=percent, share=share, followed=_followed)
    figures = summary.figures
    improved = len(figures) > 1 and figures[-1].program_id != figures[-2].program_id
    return environment.get_template("report.md.j2").render(s=summary, improved=improved) + "\n"
