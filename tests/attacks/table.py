"""The table of `evaluators/SECURITY.md`, made from the attacks: ``python -m tests.attacks.table`` prints it."""

from __future__ import annotations

from itertools import groupby

from tests.attacks import ATTACKS
from tests.attacks.artifacts import FILE_ATTACKS
from tests.attacks.attack import Attack

HEADER = "| attack | what holds | how it ends | without isolation |\n| --- | --- | --- | --- |"


def without_isolation(attack: Attack) -> str:
    """Return what the table says of ``--sandbox none``."""
    if attack.harm:
        return f"not run: {attack.harm}"
    return "**does not hold**" if attack.needs_isolation else "holds"


def row(attack: Attack) -> str:
    """Return the row of one attack; the ones of the default suite carry a star."""
    endings = ", ".join(outcome.value for outcome in attack.outcomes)
    name = f"`{attack.name}`" + (" *" if attack.quick else "")
    return f"| {name} | {attack.property} | {endings} | {without_isolation(attack)} |"


def table() -> str:
    """Return the tables of all themes, and that of the artifact files."""
    parts = []
    for theme, attacks in groupby(ATTACKS, key=lambda attack: attack.theme):
        parts.append("\n".join([f"### {theme.replace('_', ' ')}", "", HEADER, *map(row, attacks)]))
    files = [f"| `{attack.name}` * | {attack.property} | refused | holds |" for attack in FILE_ATTACKS]
    parts.append("\n".join(["### artifact files", "", HEADER, *files]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(table())
