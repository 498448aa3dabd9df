"""Kills processes that write to a ledger, at every point or at random ones, and checks by SQL what they leave.

A program of its own, because it forks: a process is then alive within milliseconds, and dies at the very statement.
``python -m tests.ledger_killer points STRIDE FOLDER`` or ``python -m tests.ledger_killer moments SEED FOLDER``.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from hypotheses.ledger import BudgetExhausted, Ledger, Settlement
from hypotheses.ledger.lock import boot_id
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, scored

LONG_EVIDENCE = {"events": [{"index": index, "op": "weight", "layer": "blocks.0.q"} for index in range(2000)]}
NUM_WORKERS = 8
BUDGET = 10


def forked(work: Callable[[], None], *, kill_after_s: float | None = None) -> int:
    """Run `work` in a forked process, killing it after a while; return its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check(path: Path, budget: int) -> tuple[int, int]:
    """Check by SQL what must hold at every moment; return used and reserved calls."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def select(query: str) -> list[tuple[Any, ...]]:
        return connection.execute(query).fetchall()

    ((total, used, reserved, free),) = select("SELECT total, used, reserved, free FROM budget")
    assert total == used + reserved + free == budget, (total, used, reserved, free)
    assert free >= 0, free
    ((starts, distinct),) = select(
        "SELECT count(*), count(DISTINCT ref) FROM events WHERE kind = 'evaluation_reserved'"
    )
    assert starts == distinct == used + reserved <= budget, (starts, distinct, used, reserved)
    ((ends, distinct),) = select("SELECT count(*), count(DISTINCT ref) FROM events WHERE kind = 'evaluation_settled'")
    assert ends == distinct == used, (ends, distinct, used)
    assert select("SELECT count(*) FROM evaluations WHERE outcome IS NOT NULL") == [(used,)]
    unordered = select(
        "SELECT evaluation_id FROM leases GROUP BY evaluation_id HAVING max(attempt) <> count(*) OR min(attempt) <> 1"
    )
    assert unordered == [], unordered
    assert {boot for (boot,) in select("SELECT DISTINCT boot_id FROM leases")} <= {boot_id()}
    connection.close()
    return used, reserved


def two_evaluations(path: Path) -> None:
    """The work of the sweep: two calls with evidence that goes to a file, then nothing is free."""
    with Ledger.open(path) as ledger:
        for number in range(2):
            program = ledger.add_program(new_program(number))
            evidence = LONG_EVIDENCE | {"layers": {"a": {"number": number}}}
            evaluate(ledger, candidate(program), scored(2.5 + number, 3.0, evidence=evidence))
        try:
            ledger.reserve_evaluation(candidate(ledger.add_program(new_program(2))))
        except BudgetExhausted:
            return
        raise AssertionError("a third call of two was given")


def kill_at(point: int) -> None:
    """Let this process die before its n-th step: a statement, a commit, a flush or a renaming."""
    steps = iter(range(point + 1))

    def step(*_: Any) -> None:
        if next(steps) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", step)
    event.listen(Engine, "commit", step)
    flush, rename = os.fsync, Path.replace
    os.fsync = lambda descriptor: (step(), flush(descriptor))[1]
    Path.replace = lambda self, target: (step(), rename(self, target))[1]  # type: ignore[method-assign,assignment]


def at_points(stride: int, folder: Path) -> None:
    """Kill at every point (or every `stride`-th), take over, and compare with a run that nobody disturbed."""
    calm = folder / "calm" / "ledger.sqlite"
    calm.parent.mkdir()
    Ledger.create(calm, new_campaign(budget=2)).close()
    fresh = folder / "fresh"
    shutil.copytree(calm.parent, fresh)
    two_evaluations(calm)
    with Ledger.open(calm, read_only=True) as reader:
        expected = reader.content_hash(), len(reader.events())
    num_killed = 0
    num_orphans = 0
    left: set[tuple[int, int]] = set()
    for point in range(0, 10_000, stride):
        path = folder / str(point) / "ledger.sqlite"
        shutil.copytree(fresh, path.parent)

        def work(path: Path = path, point: int = point) -> None:
            kill_at(point)
            two_evaluations(path)

        code = forked(work)
        used, reserved = check(path, 2)
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        num_killed += 1
        left.add((used, reserved))
        files = list(path.parent.glob("blobs/*.gz"))
        num_orphans += len(files) - used
        two_evaluations(path)
        assert check(path, 2) == (2, 0)
        with Ledger.open(path, read_only=True) as reader:
            assert (reader.content_hash(), len(reader.events())) == expected, point
            assert max(e.attempt for e in reader.evaluations()) <= 2
            assert sum(e.attempt - 1 for e in reader.evaluations()) == reserved, point
            assert reader.check_invariants() == [], point
        shutil.rmtree(path.parent)
    else:
        raise AssertionError("the work never ended")
    assert num_killed > 60 // stride, num_killed
    print(f"killed at {num_killed} points; {num_orphans} files without a row; left (used, reserved): {sorted(left)}")


def eight_workers(path: Path, seed: int) -> None:
    """Eight threads, each with keys of its own, more than there are calls."""
    with Ledger.open(path) as ledger:
        barrier = threading.Barrier(NUM_WORKERS)

        def work(worker: int) -> None:
            dice = random.Random(f"{seed} {worker}")
            barrier.wait()
            for number in range(worker, 3 * NUM_WORKERS, NUM_WORKERS):
                program = ledger.add_program(new_program(100 + number))
                try:
                    evaluation = ledger.reserve_evaluation(candidate(program))
                except BudgetExhausted:
                    continue  # a later key may be one that an earlier process left reserved
                if not evaluation.is_settled:
                    time.sleep(dice.random() / 50)
                    crashed = Settlement(outcome="crashed", reason="it raised")
                    ledger.settle_evaluation(evaluation.id, crashed if number % 3 == 0 else scored(float(number)))

        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            list(pool.map(work, range(NUM_WORKERS)))


def at_moments(seed: int, folder: Path) -> None:
    """Kill eight workers at random moments, again and again, until a process comes to its end."""
    path = folder / "ledger.sqlite"
    Ledger.create(path, new_campaign(budget=BUDGET)).close()
    dice = random.Random(seed)
    num_killed = 0
    num_taken_over = 0
    while True:
        patience = dice.random() * 0.2 * (1 + num_killed / 5)
        code = forked(lambda: eight_workers(path, dice.randrange(10**6)), kill_after_s=patience)
        used, reserved = check(path, BUDGET)
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        num_killed += 1
        num_taken_over += reserved
    assert (used, reserved) == (BUDGET, 0)
    with Ledger.open(path, read_only=True) as reader:
        assert sum(e.is_settled for e in reader.evaluations()) == BUDGET
        assert reader.check_invariants() == []
    connection = sqlite3.connect(path)
    ((processes, attempts),) = connection.execute("SELECT count(DISTINCT pid), max(attempt) FROM leases").fetchall()
    connection.close()
    print(
        f"{num_killed} processes killed, {processes} had leases; {num_taken_over} taken over; at most {attempts} attempts"
    )


if __name__ == "__main__":
    {"points": at_points, "moments": at_moments}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
