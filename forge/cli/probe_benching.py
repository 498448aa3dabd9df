"""Try every evasion and show what was said of it: ``quantforge bench probes``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from forge.cli.benching import require_writable
from forge.cli.printing import print_line
from forge.evasions.cases import CASES
from forge.evasions.table import RECIPE, probe_rows


def bench_probes(*, out: Path | None) -> dict[str, Any]:
    """Run all cases and return what was said of each; keep it in `out` if given.

    Raises:
        UserError: an `out` that cannot be written.
        SandboxUnavailableError: this host cannot isolate.
    """
    if out is not None:
        require_writable(out)
    console = Console(stderr=True)
    rows = list(probe_rows(told=lambda cases: track(cases, description="cases", console=console, total=len(CASES))))
    document = {
        "subject": RECIPE["subject"]["reference"],
        "cases": len(rows),
        "wrong": [row.key for row in rows if not row.is_right],
        "rows": [row.to_json() for row in rows],
    }
    if out is not None:
        out.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return document


def print_probes(document: dict[str, Any], console: Console) -> None:
    """Print two lines for each change: what it is and how it reads, and what was said on the way."""
    print_line(console, f"{document['cases']} changes of one program on {document['subject']}", style="bold")
    for row in document["rows"]:
        print_line(console, f"{row['what']}: {row['reads']}", style="bold", gap=True)
        screening = row["screening"].split(": ")[0]
        told = f"knockout {row['knockout']}, call {row['call']}, artifact {row['artifact']}"
        explained = ", ".join(row["explained"]) or "nothing"
        print_line(console, f"  screening: {screening}; probes: {told}; may be explained: {explained}")
    wrong = document["wrong"]
    for line in (
        f"Wrong: {', '.join(wrong)}." if wrong else "Every sound change reads executed, and no other does.",
        "A claim is read where it was made. A mechanism that acts elsewhere may be explained, and discharges nothing.",
        "The probes are those of the whole subject, asked also where screening had refused the change.",
    ):
        print_line(console, line, style="dim", gap=line.startswith(("Wrong", "Every")))
