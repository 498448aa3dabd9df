"""`quantforge` with fixed replies and a moment to die at: the process that crash tests start.

    python -m tests.crash_driver run RECIPE --out FOLDER [--point NAME [--count N] [--signal KILL]] [--outage-turn N]
    python -m tests.crash_driver resume FOLDER [the same]

Everything but the proposer is the product: command line, loop, ledger, sandbox, workers. `tests.crash_points` has the points;
`python -m tests.crash_table` kills at each of them and prints what became of it.
"""

from __future__ import annotations

import argparse
import signal

from forge import launch
from forge.cli.app import app
from forge.recipe import Recipe
from tests.crash_campaign import FixedProposer
from tests.crash_points import BY_NAME, arm


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("run", "resume"))
    parser.add_argument("where", help="a recipe to run, or a run folder to resume")
    parser.add_argument("--out", help="the run folder to make")
    parser.add_argument("--point", choices=sorted(BY_NAME))
    parser.add_argument("--count", type=int, help="at which passage of the point, in place of its own")
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM", "INT"))
    parser.add_argument("--outage-turn", type=int, help="the proposer cannot be reached from this turn on")
    given = parser.parse_args(arguments)

    def make_proposer(recipe: Recipe) -> FixedProposer:
        return FixedProposer(given.outage_turn)

    # A shell starts background jobs with Ctrl-C ignored, and so would be whatever such a job tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch.make_proposer = make_proposer  # type: ignore[assignment]
    if given.point is not None:
        arm(BY_NAME[given.point], number=signal.Signals[f"SIG{given.signal}"], count=given.count)
    out = ["--out", given.out] if given.out is not None else []
    app([given.command, given.where, *out, "--json"])


if __name__ == "__main__":
    main()
