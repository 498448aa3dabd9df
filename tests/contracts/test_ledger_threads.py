"""Several threads on one opening: exact budget, a position that only grows, nobody loses sight of what he wrote."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hypotheses.ledger import (
    BudgetExhausted,
    EvaluationInProgress,
    Ledger,
    LedgerBusy,
    LedgerConflict,
    LedgerRefused,
    NewNote,
    Settlement,
)
from tests.ledger_builders import candidate, control_evaluation, new_campaign, new_program, observe, register, scored

NUM_WORKERS = 8


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run functions in threads of their own that start at once; return what each returned or raised."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return work()
        except Exception as err:
            return err

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def test_eight_workers_that_go_on_until_nothing_is_free_start_ten_and_store_ten(ledger: Ledger) -> None:
    def work(worker: int) -> tuple[list[str], BudgetExhausted]:
        settled: list[str] = []
        for number in range(1000):
            program = ledger.add_program(new_program(1000 * worker + number))
            try:
                evaluation = ledger.reserve_evaluation(candidate(program))
            except BudgetExhausted as end:
                return settled, end
            assert ledger.evaluation(evaluation.id).state == "reserved"
            result = scored(float(worker)) if number % 2 else Settlement(outcome="crashed", reason="it raised")
            assert ledger.settle_evaluation(evaluation.id, result).result == result
            assert ledger.evaluation(evaluation.id).is_settled
            settled.append(evaluation.id)
        raise AssertionError("the budget never ended")

    answers = together(*(partial(work, worker) for worker in range(1, NUM_WORKERS + 1)))
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    ids = [name for names, _ in answers for name in names]
    assert len(ids) == len(set(ids)) == 10
    assert all((end.total, end.used + end.reserved) == (10, 10) for _, end in answers)
    connection = sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True)
    assert connection.execute("SELECT total, used, reserved, free FROM budget").fetchone() == (10, 10, 0, 0)
    for kind in ("evaluation_reserved", "evaluation_settled"):
        assert connection.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).fetchone() == (10,)
    assert connection.execute("SELECT count(*), max(attempt) FROM leases").fetchone() == (10, 1)
    connection.close()
    assert ledger.check_invariants() == []


def test_the_position_only_grows_and_every_thread_sees_what_it_wrote(ledger: Ledger) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            seen.append(ledger.position)

    def work(worker: int) -> None:
        for number in range(12):
            program = ledger.add_program(new_program(100 * worker + number))
            assert ledger.position >= program.seq
            assert program in ledger.programs()
            note = ledger.add_note(NewNote(turn=worker, topic="x", text=str(number)))
            assert [n.text for n in ledger.notes() if n.turn == worker] == [str(n) for n in range(number + 1)]
            assert ledger.position >= note.seq

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = together(*(partial(work, worker) for worker in range(1, 5)))
    stop.set()
    watcher.join()
    assert answers == [None] * 4
    assert seen == sorted(seen)
    assert ledger.position == ledger.events()[-1].seq
    assert ledger.num_unreplayed() == 0


def test_an_order_of_events_is_the_order_of_commits(ledger: Ledger) -> None:
    """What a position covers is committed: no reader at that position is surprised by an earlier event later on."""
    stop = threading.Event()
    failures: list[str] = []

    def watch() -> None:
        known = 0
        while not stop.is_set():
            position = ledger.position
            events = [event.seq for event in ledger.events() if event.seq <= position]
            if events != list(range(1, position + 1)) or position < known:
                failures.append(f"{known} then {position}: {events}")
            known = position

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(10):
        together(*(partial(ledger.add_program, new_program(100 * worker + number)) for worker in range(1, 5)))
    stop.set()
    watcher.join()
    assert failures == []
    assert len(ledger.programs()) == 40


def test_replaying_threads_start_nothing_again_and_are_charged_nothing(path: Path) -> None:
    with Ledger.create(path, new_campaign()) as first:
        programs = [first.add_program(new_program(number)) for number in range(8)]
        for program in programs:
            first.settle_evaluation(first.reserve_evaluation(candidate(program)).id, scored(2.5))
        events = first.events()
    with Ledger.open(path) as second:

        def work(number: int) -> bool:
            program = second.add_program(new_program(number))
            evaluation = second.reserve_evaluation(candidate(program))
            assert second.evaluation(evaluation.id) == evaluation
            budget = second.budget()
            assert budget.used + budget.reserved + budget.free == budget.total == 10
            return evaluation.is_settled

        assert together(*(partial(work, number) for number in range(8))) == [True] * 8
        assert second.events() == events
        assert second.num_unreplayed() == 0


def test_a_key_that_one_thread_holds_is_in_progress_for_the_others_until_it_is_given_back(ledger: Ledger) -> None:
    new = candidate(ledger.add_program(new_program()))
    for attempt in (1, 2, 3):
        answers = together(*[lambda: ledger.reserve_evaluation(new)] * NUM_WORKERS)
        (held,) = [answer for answer in answers if not isinstance(answer, EvaluationInProgress)]
        assert held.attempt == attempt
        assert ledger.budget().reserved == 1
        give_back = partial(ledger.release_evaluation, held.id, reason="no memory")
        released = together(*[give_back] * NUM_WORKERS)
        assert sum(not isinstance(answer, LedgerRefused) for answer in released) == 1
    evaluation = ledger.reserve_evaluation(new)
    ledger.settle_evaluation(evaluation.id, scored())
    answers = together(*[lambda: ledger.reserve_evaluation(new)] * NUM_WORKERS)
    assert all(answer.is_settled for answer in answers)


def test_of_eight_results_for_one_call_one_is_stored_and_the_others_conflict(ledger: Ledger) -> None:
    evaluation = ledger.reserve_evaluation(candidate(ledger.add_program(new_program())))
    works = [partial(ledger.settle_evaluation, evaluation.id, scored(float(loss))) for loss in range(NUM_WORKERS)]
    answers = together(*works)
    assert sum(isinstance(answer, LedgerConflict) for answer in answers) == NUM_WORKERS - 1
    again = together(*[lambda: ledger.settle_evaluation(evaluation.id, _stored(ledger, evaluation.id))] * 4)
    assert again == [ledger.evaluation(evaluation.id)] * 4
    assert [event.kind for event in ledger.events()].count("evaluation_settled") == 1


def _stored(ledger: Ledger, evaluation_id: str) -> Settlement:
    result = ledger.evaluation(evaluation_id).result
    assert result is not None
    return result


def test_the_last_free_call_goes_to_one(path: Path) -> None:
    with Ledger.create(path, new_campaign(budget=1)) as ledger:
        programs = [ledger.add_program(new_program(number)) for number in range(NUM_WORKERS)]
        works = [partial(ledger.reserve_evaluation, candidate(program)) for program in programs]
        answers = together(*works)
        assert sum(isinstance(answer, BudgetExhausted) for answer in answers) == NUM_WORKERS - 1
        assert (ledger.budget().reserved, ledger.budget().free) == (1, 0)


def test_what_one_thread_registered_another_may_run(ledger: Ledger) -> None:
    registration = register(ledger, observe(ledger))
    without = ledger.add_program(new_program(9, origin="control"))
    works = [partial(ledger.add_note, NewNote(turn=n, topic="x", text="y")) for n in range(6)]
    answers = together(lambda: ledger.reserve_evaluation(control_evaluation(registration, without)), *works)
    assert answers[0].control_id == registration.controls[0].id


def test_closing_waits_for_the_write_in_progress_and_refuses_every_later_call(path: Path) -> None:
    ledger = Ledger.create(path, new_campaign())
    inside, go_on = threading.Event(), threading.Event()
    answers: list[Any] = []

    def write() -> None:
        with ledger._write() as tx:
            inside.set()
            go_on.wait(10)
            answers.append(tx.event("test", "x"))

    writer = threading.Thread(target=write)
    writer.start()
    inside.wait(10)
    closer = threading.Thread(target=ledger.close)
    closer.start()
    time.sleep(0.2)
    assert closer.is_alive(), "close did not wait for the write in progress"
    with pytest.raises(LedgerBusy):
        Ledger.open(path)
    go_on.set()
    writer.join()
    closer.join()
    assert len(answers) == 1
    for call in (lambda: ledger.add_program(new_program()), ledger.programs, ledger.budget):
        with pytest.raises(LedgerRefused, match="was closed; open it again"):
            call()
    ledger.close()
    with Ledger.open(path) as again:
        assert [event.kind for event in again.events()] == ["campaign", "test"]
