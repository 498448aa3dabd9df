"""The kill-and-resume table: one row for each point of `tests.crash_points`.

    python -m tests.crash_table [FOLDER] [--only POINT ...] [--in-turn N]

One campaign is killed for each point, or at N points in turn, far apart, which takes less time.

Takes about half an hour. The folder (a temporary one by default) keeps every run for a closer look.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.crash_points import BY_NAME, POINTS, Point
from tests.crash_runs import Crashes, Row

HEAD = (
    "point",
    "exit",
    "calls before",
    "calls after",
    "attempts",
    "same incumbent",
    "same hash",
    "seconds",
    "problems",
)


def lines(rows: Iterable[Row]) -> Iterable[str]:
    """Return the table in Markdown; calls are used + reserved + free."""
    yield f"| {' | '.join(HEAD)} |"
    yield f"| {' | '.join('---' for _ in HEAD)} |"
    for row in rows:
        cells = (
            row.point,
            str(row.status),
            "no run folder" if row.before is None else " + ".join(map(str, row.before)),
            " + ".join(map(str, row.after)),
            str(row.attempts),
            "yes" if row.same_incumbent else "NO",
            "yes" if row.same_hash else "NO",
            f"{row.wall_s:.0f}",
            "; ".join(row.problems) or "none",
        )
        yield f"| {' | '.join(cells)} |"


def chains(points: Sequence[Point], length: int) -> list[tuple[Point, ...]]:
    """Return the points in groups of at most `length`, each in order and with its members far apart; set-up ones alone."""
    loop = [point for point in points if not point.setup]
    number = -(-len(loop) // length)
    return [(point,) for point in points if point.setup] + [tuple(loop[first::number]) for first in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), default=None)
    parser.add_argument("--in-turn", type=int, default=1)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="quantforge-crashes-"))
    crashes = Crashes.build(folder)
    points = [point for point in POINTS if given.only is None or point.name in given.only]
    rows = (row for chain in chains(points, given.in_turn) for row in crashes.kill_in_turn(chain))
    for line in lines(rows):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
