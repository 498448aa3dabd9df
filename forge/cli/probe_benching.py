"""Try every evasion and show what was said of it: ``quantforge bench probes``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from forge.cli.benching import require_writable
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


def probe_table(document: dict[str, Any]) -> Table:
    """Return the document as a table."""
    wrong = document["wrong"]
    table = Table(
        title=f"{document['cases']} changes of one program on {document['subject']}",
        caption=(
            "knockout, call, artifact: the probes on the whole subject, also where screening had refused the change. "
            + (f"Wrong: {', '.join(wrong)}." if wrong else "Every sound change reads executed, and no other does.")
        ),
        title_justify="left",
        caption_justify="left",
    )
    for column in ("change", "screening", "knockout", "call", "artifact", "may be explained", "reads"):
        table.add_column(column)
    for row in document["rows"]:
        screening = row["screening"].split(": ")[0]
        table.add_row(
            row["what"],
            screening,
            row["knockout"],
            row["call"],
            row["artifact"],
            ", ".join(row["explained"]),
            row["reads"],
        )
    return table
