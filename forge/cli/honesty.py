"""The account of a campaign in the terminal: what predictions were worth, where calls went, what verdicts changed."""

from __future__ import annotations

from rich.console import Console

from forge.cli.printing import in_cell, make_table, print_line, print_table
from forge.honesty import Author, Honesty, followed, share

_LEGEND = (
    "claimed: of hypotheses that a proposer named when it proposed; surviving: of those that were not refuted.",
    "held: the measured interval lies within the predicted one, with the interval that a share of so few can have;",
    "refuted: the two are apart; undecided: neither. Of true claims nearly all predictions should hold.",
    "half width: of the predicted interval; distance: of its middle from what was measured. Whoever knows what will come",
    "predicts intervals not much wider than twice the distance.",
)


def print_honesty(honesty: Honesty, console: Console) -> None:
    """Print the whole account."""
    print_line(console, "honesty", style="bold", gap=True)
    calls = honesty.calls
    print_line(
        console,
        f"  settled calls: {calls.candidates} candidates, {calls.confirmations} confirmations, {calls.controls} controls"
        + (f", {calls.other} last measurements" if calls.other else ""),
    )
    for author in honesty.authors:
        _print_author(author, console)
    for line in _LEGEND if honesty.authors else ():
        print_line(console, f"    {line}", style="dim")
    changed = [row for row in honesty.consequences if not row.is_nothing]
    if honesty.consequences:
        idle = len(honesty.consequences) - len(changed)
        print_line(console, f"  {len(honesty.consequences)} verdicts; nothing followed from {idle} of them")
    for row in changed:
        print_line(console, f"    {row.status} {row.mechanism} through {row.cause}: {'; '.join(followed(row))}")


def _print_author(author: Author, console: Console) -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in author.hypotheses.items())
    print_line(console, f"  {author.name}: {author.observations} observations explained; hypotheses: {statuses}")
    table = make_table(
        "predictions of", "width", "held", "undecided", "refuted", "half width", "distance",
        text=frozenset({"predictions of", "width", "held"}),
    )  # fmt: skip
    for coverage in author.coverage:
        table.add_row(
            in_cell(f"    {coverage.group}"), "any", share(coverage.inside), str(coverage.undecided),
            str(coverage.refuted), "", "",
        )  # fmt: skip
        for row in coverage.bins:
            table.add_row(
                "", f"{row.over:g} to {row.up_to:g}", share(row.inside), "", "",
                f"{row.mean_half_width:.2f}", f"{row.mean_distance:.2f}",
            )  # fmt: skip
    print_table(console, table)
