"""Random interleavings of reservations, results, failures of the host and killed openings keep the budget exact."""

from __future__ import annotations

import os
import queue
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hypotheses.ledger import (
    BudgetExhausted,
    EvaluationInProgress,
    Ledger,
    LedgerConflict,
    LedgerRefused,
    Settlement,
)
from hypotheses.ledger.lock import boot_id
from tests.ledger_builders import candidate, new_campaign, new_program, scored

NUM_KEYS = 7
NUM_THREADS = 4
KEYS = st.integers(0, NUM_KEYS - 1)
THREADS = st.integers(0, NUM_THREADS - 1)
CRASHED = Settlement(outcome="crashed", reason="it raised")


class Thread:
    """A thread that does one thing after the other, as told."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[tuple[Callable[[], Any], queue.Queue[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def start(self, task: Callable[[], Any]) -> queue.Queue[Any]:
        """Begin a task; what it returned or raised comes out of the queue."""
        answer: queue.Queue[Any] = queue.Queue()
        self._tasks.put((task, answer))
        return answer

    def end(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, answer = item
            try:
                answer.put(task())
            except Exception as err:
                answer.put(err)


class BudgetMachine(RuleBasedStateMachine):
    """A ledger with several threads, whose opening may be abandoned at any time; beside it what should be in the file."""

    @initialize(budget=st.integers(0, 5))
    def create(self, budget: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.threads = [Thread() for _ in range(NUM_THREADS)]
        self.budget = budget
        self.ledger = Ledger.create(self.path, new_campaign(budget=budget))
        self.abandoned: list[Ledger] = []
        self.programs = [self.ledger.add_program(new_program(number)) for number in range(NUM_KEYS)]
        self.ids: dict[int, str] = {}
        self.state: dict[int, str] = {}  # "held" by this opening, "idle" (released, or its opening is gone), "settled"
        self.attempts: dict[int, int] = {}
        self.results: dict[int, Settlement] = {}
        self.watch = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, isolation_level=None)

    def ask(self, thread: int, task: Callable[[], Any]) -> Any:
        return self.threads[thread].start(task).get(timeout=60)

    def reserved(self, key: int, answer: Any) -> None:
        """Hold an answer to a reservation, given while nothing else ran, against what is known; then know more."""
        now = self.state.get(key)
        if now is None and len(self.state) >= self.budget:
            assert isinstance(answer, BudgetExhausted), answer
        elif now == "held":
            assert isinstance(answer, EvaluationInProgress), answer
        else:
            self.attempts[key] = self.attempts.get(key, 0) + (now != "settled")
            assert (answer.is_settled, answer.attempt) == (now == "settled", self.attempts[key])
            self.ids[key] = answer.id
            self.state[key] = "settled" if now == "settled" else "held"

    @rule(key=KEYS, thread=THREADS)
    def reserve(self, key: int, thread: int) -> None:
        self.reserved(key, self.ask(thread, lambda: self.ledger.reserve_evaluation(candidate(self.programs[key]))))

    @rule(key=KEYS, thread=THREADS, result=st.sampled_from([scored(), scored(2.0, 2.5), CRASHED]))
    def settle(self, key: int, thread: int, result: Settlement) -> None:
        if key not in self.ids:
            return
        answer = self.ask(thread, lambda: self.ledger.settle_evaluation(self.ids[key], result))
        if self.state[key] == "held":
            assert answer.result == result
            self.state[key], self.results[key] = "settled", result
        elif self.state[key] == "idle":
            assert isinstance(answer, LedgerRefused), answer
        elif result == self.results[key]:
            assert answer.result == result
        else:
            assert isinstance(answer, LedgerConflict), answer

    @rule(key=KEYS, thread=THREADS)
    def release(self, key: int, thread: int) -> None:
        if key not in self.ids:
            return
        answer = self.ask(thread, lambda: self.ledger.release_evaluation(self.ids[key], reason="no memory"))
        if self.state[key] == "held":
            assert (answer.state, answer.attempt) == ("reserved", self.attempts[key])
            self.state[key] = "idle"
        else:
            assert isinstance(answer, LedgerRefused), answer

    @rule(keys=st.lists(KEYS, min_size=NUM_THREADS, max_size=NUM_THREADS))
    def reserve_at_once(self, keys: list[int]) -> None:
        """All threads reserve at the same moment: whatever the order was, it is one that could have been."""
        barrier = threading.Barrier(NUM_THREADS)

        def task(key: int) -> Any:
            barrier.wait(60)
            return self.ledger.reserve_evaluation(candidate(self.programs[key]))

        answers = [
            thread.start(lambda key=key: task(key))  # type: ignore[misc]
            for thread, key in zip(self.threads, keys, strict=True)
        ]
        given = [(key, answer.get(timeout=60)) for key, answer in zip(keys, answers, strict=True)]
        # Those who got something came first; then those who were told that somebody else had, or that nothing was left.
        for key, answer in sorted(given, key=lambda pair: isinstance(pair[1], Exception)):
            self.reserved(key, answer)

    @rule(keys=st.lists(KEYS, min_size=NUM_THREADS, max_size=NUM_THREADS))
    def settle_at_once(self, keys: list[int]) -> None:
        """All threads settle at the same moment, some the same call and each with a result of its own."""
        tasks = [(key, scored(float(number))) for number, key in enumerate(keys) if self.state.get(key) == "held"]
        answers = [
            thread.start(lambda key=key, result=result: self.ledger.settle_evaluation(self.ids[key], result))  # type: ignore[misc]
            for thread, (key, result) in zip(self.threads, tasks, strict=False)
        ]
        given = [(key, result, answer.get(timeout=60)) for (key, result), answer in zip(tasks, answers, strict=True)]
        for key in {key for key, _, _ in given}:
            stored = [result for k, result, answer in given if k == key and not isinstance(answer, Exception)]
            assert len(stored) == 1, f"{len(stored)} results were taken for one call"
            assert all(isinstance(a, LedgerConflict) for k, _, a in given if k == key and isinstance(a, Exception)), (
                given
            )
            self.state[key], self.results[key] = "settled", stored[0]

    @rule(politely=st.booleans())
    def kill_and_reopen(self, politely: bool) -> None:
        """End the opening, or abandon it as `kill -9` does: the lock goes, leases and connections stay as they are."""
        if politely:
            self.ledger.close()
        else:
            assert self.ledger._lock is not None
            self.ledger._lock.release()
            self.abandoned.append(self.ledger)
        self.ledger = Ledger.open(self.path)
        self.state = {key: "idle" if now == "held" else now for key, now in self.state.items()}

    @precondition(lambda self: hasattr(self, "watch"))
    @invariant()
    def the_budget_is_exact(self) -> None:
        used = sum(now == "settled" for now in self.state.values())
        total, in_file, reserved, free = self.select("SELECT total, used, reserved, free FROM budget")[0]
        assert (total, in_file, reserved) == (self.budget, used, len(self.state) - used)
        assert in_file + reserved + free == total
        assert free >= 0
        for kind, count in (("evaluation_reserved", len(self.state)), ("evaluation_settled", used)):
            assert self.select(f"SELECT count(*) FROM events WHERE kind = '{kind}'") == [(count,)]
        seen = self.ledger.budget()
        assert seen.used + seen.reserved + seen.free == seen.total == self.budget

    @precondition(lambda self: hasattr(self, "watch"))
    @invariant()
    def leases_tell_who_started_what(self) -> None:
        leases = self.select(
            "SELECT evaluation_id, max(attempt), count(*) FILTER (WHERE action = 'taken') FROM leases GROUP BY 1"
        )
        assert sorted(leases) == sorted((self.ids[key], n, n) for key, n in self.attempts.items())
        assert self.select("SELECT DISTINCT pid, boot_id FROM leases") in ([], [(os.getpid(), boot_id())])

    def select(self, query: str) -> list[tuple[Any, ...]]:
        return self.watch.execute(query).fetchall()

    def teardown(self) -> None:
        if not hasattr(self, "watch"):
            return
        for key in [key for key, now in self.state.items() if now != "settled"]:
            if self.state[key] == "idle":
                self.reserve(key, 0)
            self.settle(key, 1, scored())
        assert self.select("SELECT count(*) FROM evaluations WHERE outcome IS NOT NULL") == [(len(self.state),)]
        assert self.select("SELECT used, reserved FROM budget") == [(len(self.state), 0)]
        assert self.ledger.check_invariants() == []
        for thread in self.threads:
            thread.end()
        self.watch.close()
        for ledger in (self.ledger, *self.abandoned):
            ledger.close()
        self.folder.cleanup()


def test_used_reserved_and_free_always_sum_to_the_budget() -> None:
    run_machine(max_examples=20, stateful_step_count=25)


@pytest.mark.slow
def test_used_reserved_and_free_sum_to_the_budget_in_many_long_runs() -> None:
    run_machine(max_examples=200, stateful_step_count=60)


def run_machine(**changes: Any) -> None:
    run_state_machine_as_test(
        BudgetMachine, settings=settings(deadline=None, suppress_health_check=list(HealthCheck), **changes)
    )
