"""Run the worlds and show the counts: ``quantforge bench verdicts``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from evaluators.errors import UserError
from forge.cli.benching import require_writable
from forge.worlds.bench import judge_worlds


def bench_verdicts(worlds: int, *, seed: int, out: Path | None) -> dict[str, Any]:
    """Judge so many worlds and return the counts; keep them in `out` if given.

    Raises:
        UserError: no worlds, or an `out` that cannot be written.
    """
    if worlds < 1:
        raise UserError(f"worlds is {worlds}; give at least 1")
    if out is not None:
        require_writable(out)
    console = Console(stderr=True)
    tally = judge_worlds(worlds, seed, progress=lambda numbers: track(numbers, description="worlds", console=console))
    document = tally.to_json(worlds=worlds, seed=seed)
    if out is not None:
        out.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return document


def verdict_table(document: dict[str, Any]) -> Table:
    """Return the document as a table."""
    luck = document["luck"]
    table = Table(
        title=f"rule {document['rule']}, {document['worlds']} worlds of seed {document['seed']}",
        caption=(
            "calls: per world. truth refuted, untruth held (supported): of the verdicts that say something. undecided: of all"
            f" hypotheses. Of {luck['triggered']} gains that were mere luck {luck['confirmed']} held when measured again."
        ),
        title_justify="left",
        caption_justify="left",
    )
    columns = (
        "way",
        "worlds",
        "seen",
        "calls",
        "truth refuted",
        "untruth held",
        "undecided",
        "truth held if separated",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("way", "worlds") else "right")
    for way, by_kind in document["ways"].items():
        for kind, row in by_kind.items():
            table.add_row(
                way if kind == next(iter(by_kind)) else "",
                kind,
                str(row["worlds"]),
                "" if row["calls_per_world"] is None else f"{row['calls_per_world']:.2f}",
                _share(row["true_refuted"], row["given"]),
                _share(row["false_supported"], row["given"]),
                "" if row["inconclusive"] is None else f"{row['inconclusive']:.0%}",
                _share(row["supported_separated"], row["separated"]),
            )
        table.add_section()
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} of {whole}" if whole else ""
