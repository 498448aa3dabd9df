"""`show`: the ledger in the terminal, read beside whoever writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from forge.cli.campaigns import print_edits, print_figures, print_observation, print_summary
from forge.cli.honesty import print_honesty
from forge.cli.printing import in_cell, make_table, print_block, print_line, print_table
from forge.errors import ForgeError
from forge.plain_text import spell_out
from forge.run_folder import RunFolder
from forge.summary import Summary, summarize
from hypotheses.ledger import Ledger, open_to_read
from hypotheses.ledger.errors import LedgerNotFound

PARTS = ("summary", "observations", "edits", "refusals", "honesty", "calls", "notes")

Emit = Callable[[Any], None]


class NothingToShow(ForgeError, ValueError):
    """What was asked for is not in the ledger."""


def show_run(run: Path, what: str, console: Console, emit: Emit | None) -> None:
    """Print one part of a run's ledger, or the source of one program by its id."""
    with open_to_read(RunFolder.open(run).ledger) as ledger:
        ledger.pin()
        if what.startswith("prog-"):
            _show_program(ledger, what, console, emit)
            return
        if what not in PARTS:
            raise NothingToShow(
                f"{what!r} is no part of a ledger; give one of {', '.join(PARTS)}, or the id of a program"
            )
        try:
            summary = summarize(ledger)
        except (LookupError, TypeError, ValueError) as err:
            raise NothingToShow(
                f"a record that others name is not there or not what it was ({err}); show --recompute tells what was altered"
            ) from err
    if emit is not None:
        data = summary.to_json()
        keys = {"edits": "required_edits"}
        emit(data if what == "summary" else data[keys.get(what, what)])
        return
    _print_part(summary, what, console)


def show_recomputation(run: Path, console: Console, emit: Emit | None) -> bool:
    """Derive every verdict of a run again from what was measured, and print each difference; return whether there is none."""
    from forge.recomputing import recompute  # needs what programs are run with, which other parts do not

    with open_to_read(RunFolder.open(run).ledger) as ledger:
        ledger.pin()
        found = recompute(ledger)
    if emit is not None:
        emit(found.to_json())
        return found.holds
    for difference in found.differences:
        print_line(console, f"DIFFERS: {difference}", style="bold red")
    for violation in found.violations:
        print_line(console, f"INVARIANT VIOLATED: {violation}", style="bold red")
    rules = f", by rule {', '.join(found.rules)}" if found.rules else ""
    print_line(console, f"{found.agreeing} of {found.verdicts} verdicts follow from what was measured{rules}")
    if found.waiting:
        print_line(console, f"not judged yet: {', '.join(found.waiting)}")
    return found.holds


def _print_part(summary: Summary, what: str, console: Console) -> None:
    if what == "summary":
        print_summary(summary, console)
    elif what == "observations":
        for observation in summary.observations:
            print_observation(observation, console)
    elif what == "edits":
        print_edits(summary.required_edits, console)
    elif what == "refusals":
        for refusal in summary.refusals:
            print_block(
                console, f"turn {refusal.turn}.{refusal.attempt} {refusal.kind}: {refusal.stage}: {refusal.reason}"
            )
    elif what == "honesty":
        print_honesty(summary.honesty, console)
    elif what == "notes":
        for turn, topic, text in summary.notes:
            print_line(console, f"turn {turn} {topic}: {text}")
    else:
        _print_calls(summary, console)


def _print_calls(summary: Summary, console: Console) -> None:
    print_figures(summary, console)
    table = make_table(
        "turn", "kind", "program", "id", "split", "draw", "outcome", "nats/token", "bits", "seconds", "",
        text=frozenset({"kind", "program", "id", "split", "outcome", ""}),
    )  # fmt: skip
    for row in summary.calls:
        table.add_row(
            "-" if row.turn is None else str(row.turn),
            row.kind,
            in_cell(row.program),
            row.program_id,
            row.split,
            str(row.draw),
            row.outcome,
            "-" if row.nll is None else f"{row.nll:.4f}",
            "-" if row.effective_bits is None else f"{row.effective_bits:.2f}",
            f"{row.wall_s:.1f}",
            "promoted" if row.promoted else "",
        )
    print_table(console, table)


def _show_program(ledger: Ledger, program_id: str, console: Console, emit: Emit | None) -> None:
    try:
        program = ledger.program(program_id)
    except LedgerNotFound as err:
        known = ", ".join(item.id for item in ledger.programs()[:20])
        raise NothingToShow(f"no program {program_id!r} in this ledger; known: {known}") from err
    if emit is not None:
        emit(
            {"id": program.id, "title": program.title, "origin": program.origin, "parent": program.parent_id,
             "mechanisms": list(program.mechanisms), "source": program.source}
        )  # fmt: skip
        return
    print_line(console, f"{program.id} {program.title} ({program.origin}), parent {program.parent_id or 'none'}")
    console.print(Syntax(spell_out(program.source), "python", line_numbers=True, word_wrap=True))
