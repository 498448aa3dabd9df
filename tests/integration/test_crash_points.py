"""A campaign survives `kill -9` at every boundary of its loop: killed, resumed, it ends as if nothing had happened.

The points are in `tests.crash_points`. Here they are met several to a campaign, far apart, so that the same run is also killed
again and again; `python -m tests.crash_table` kills one campaign for each point and prints the table.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from hypotheses.ledger import Ledger
from tests.crash_points import POINTS, Point
from tests.crash_runs import Crashes
from tests.crash_table import chains
from tests.driver_forks import ROOT, end_nurseries
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, scored

pytestmark = pytest.mark.timeout(900)  # whole campaigns, several times: seconds on quiet cores, minutes on busy ones

SETUP = tuple(point.name for point in POINTS if point.setup)
CHAINS = chains([point for point in POINTS if not point.setup], 6)


@pytest.mark.slow
def test_killed_while_it_is_made_while_it_is_set_up_and_inside_a_commit(tmp_path: Path) -> None:
    kills = ("ledger-inside", "between-noise-draws", "settle-inside-commit")
    crashes = Crashes.build(tmp_path, budget=1, kills=kills)
    ended = crashes.go(crashes.begun)
    assert crashes.compare(crashes.begun, ended) == [], f"killed at {kills}"
    assert ended.summary["budget"]["used"] == 1


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    end_nurseries()


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Crashes:
    """A run that was killed at every point of its set-up; the others start from copies of it."""
    return Crashes.shared(shared_folder(tmp_path_factory), kills=SETUP)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all test processes of this session."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "crashes" / "all"


@pytest.mark.slow
def test_killed_at_every_point_of_its_set_up(crashes: Crashes) -> None:
    run = crashes.place("set-up")
    ended = crashes.go(run)
    assert crashes.compare(run, ended) == [], f"killed at {SETUP}"


@pytest.mark.slow
@pytest.mark.parametrize("points", CHAINS, ids=lambda points: "+".join(point.name for point in points))
def test_killed_at_points_of_its_loop(crashes: Crashes, points: tuple[Point, ...]) -> None:
    for row in crashes.kill_in_turn(points):
        assert row.problems == (), f"killed at {row.point}, which left {row.before} calls used, reserved and free"
        assert (row.status, row.same_incumbent, row.same_hash) == (-signal.SIGKILL, True, True)


def test_every_point_of_the_loop_is_in_a_chain() -> None:
    order = [point.name for point in POINTS if not point.setup]
    assert sorted(point.name for chain in CHAINS for point in chain) == sorted(order)
    assert len(SETUP) + len(order) >= 14
    for chain in CHAINS:
        names = [point.name for point in chain]
        assert names == sorted(names, key=order.index), "a point that lies behind is never met again"


COMMITS = """
import sys
from hypotheses.ledger import Ledger
from tests.ledger_builders import candidate, evaluate, new_program, scored
with Ledger.open(sys.argv[1]) as ledger:
    print("open", flush=True)
    for number in range(int(sys.argv[2])):
        source = f"# {number}\\n" + "x" * 20_000
        program = ledger.add_program(new_program(1000 + number, source=source))
        evaluation = evaluate(ledger, candidate(program, turn=number), scored(2.0 + number, 3.0))
        print(evaluation.id, flush=True)
"""


@pytest.mark.slow
def test_killed_at_random_moments_of_heavy_commits(tmp_path: Path) -> None:
    """What was acknowledged before the kill is there after it, whole, and nothing else is half there."""
    num_calls = 200
    path = tmp_path / "run.sqlite"
    Ledger.create(path, new_campaign(budget=num_calls)).close()
    moments = random.Random(7)
    acknowledged: set[str] = set()
    num_kills = 0
    while len(acknowledged) < num_calls:
        process = subprocess.Popen(
            [sys.executable, "-c", dedent(COMMITS), str(path), str(num_calls)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        # Behind what is replayed, so that every round gets further.
        for _ in range(len(acknowledged) + moments.randrange(5, 30)):
            process.stdout.readline()
        time.sleep(moments.random() * 0.01)
        process.kill()
        rest, _ = process.communicate()
        num_kills += process.returncode == -signal.SIGKILL
        with Ledger.open(path, read_only=True) as reader:
            settled = {evaluation.id for evaluation in reader.evaluations() if evaluation.is_settled}
            budget = reader.budget()
            assert reader.check_invariants() == []
        assert set(rest.split()) <= settled, f"acknowledged, yet gone after kill {num_kills}"
        assert acknowledged <= settled
        assert budget.used == len(settled)
        assert budget.reserved <= 1
        assert budget.used + budget.reserved + budget.free == num_calls
        acknowledged = settled
    assert num_kills >= 5
    calm = tmp_path / "calm.sqlite"
    with Ledger.create(calm, new_campaign(budget=num_calls)) as ledger:
        for number in range(num_calls):
            program = ledger.add_program(new_program(1000 + number, source=f"# {number}\n" + "x" * 20_000))
            evaluate(ledger, candidate(program, turn=number), scored(2.0 + number, 3.0))
        expected = ledger.content_hash()
    with Ledger.open(path, read_only=True) as reader:
        assert reader.content_hash() == expected
