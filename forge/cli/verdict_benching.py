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
from forge.cli.printing import make_table, print_line, print_table
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
    table = make_table(
        "controls run", "predictions", "worlds", "calls", "truth refuted", "untruth supported", "true of refuted",
        "untrue of supported", "undecided", "truth supported", "where separated",
        text=frozenset({"controls run", "predictions"}),
    )  # fmt: skip
    for way, by_kind in document["ways"].items():
        for kind, row in by_kind.items():
            refuted = row["true_refuted"] + row["false_refuted"]
            supported = row["true_supported"] + row["false_supported"]
            true = row["true_supported"] + row["true_refuted"] + row["true_inconclusive"]
            table.add_row(
                way if kind == next(iter(by_kind)) else "",
                kind,
                str(row["worlds"]),
                "" if row["calls_per_world"] is None else f"{row['calls_per_world']:.2f}",
                _share(row["true_refuted"], row["given"]),
                _share(row["false_supported"], row["given"]),
                _share(row["true_refuted"], refuted),
                _share(row["false_supported"], supported),
                "" if row["inconclusive"] is None else f"{row['inconclusive']:.0%}",
                _share(row["true_supported"], true),
                _share(row["supported_separated"], row["separated"]),
            )
    return table


def print_verdicts(document: dict[str, Any], console: Console) -> None:
    """Print the table with what its columns count."""
    luck = document["luck"]
    print_line(
        console, f"rule {document['rule']}, {document['worlds']} worlds of seed {document['seed']}", style="bold"
    )
    print_table(console, verdict_table(document))
    for line in (
        "calls: per world, for controls. truth refuted, untruth supported: of all verdicts that say something, which are mostly",
        "refutations of what is untrue; the two columns after them: of the refuted alone, and of the supported alone.",
        "undecided: of all hypotheses. where separated: of true causes that registered predictions set apart from every rival.",
        "Misspecified predictions miss what their own cause does; in worlds of 'none of these' no hypothesis is true.",
        f"Of {luck['triggered']} gains that were mere luck {luck['confirmed']} held when they were measured again.",
    ):
        print_line(console, line, style="dim")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} of {whole}" if whole else ""
