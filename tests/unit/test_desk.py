"""Evaluator calls as they are bought: in order, side by side, never beyond the budget, and nothing paid for is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators.errors import HostError
from evaluators.results import Split
from forge.desk import Call, Desk
from forge.progress import QuietProgress
from hypotheses.ledger import BudgetExhausted, Evaluation, Ledger, Program
from tests.ledger_builders import new_campaign, new_program
from tests.told_evaluators import Record, told_pool


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(budget=10)) as ledger:
        yield ledger


def programs_in(ledger: Ledger, count: int) -> list[Program]:
    return [ledger.add_program(new_program(number, origin="candidate")) for number in range(count)]


def number_of(source: str) -> int:
    return int(source.split("return ")[1])


def losses(source: str, split: Split, draw: int) -> tuple[float, ...]:
    return (2.0 + number_of(source), 3.0)


def take(desk: Desk, programs: list[Program], taken: list[Evaluation]) -> None:
    calls = (Call(program=program, kind="candidate", turn=turn) for turn, program in enumerate(programs, 1))
    for evaluation in desk.evaluate_all(calls):
        taken.append(evaluation)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_budget_of_ten_starts_ten_and_stores_ten(ledger: Ledger, workers: int) -> None:
    pool, record = told_pool(losses, workers=workers, seconds=lambda source: 0.002 * (number_of(source) % 3))
    taken: list[Evaluation] = []
    programs = programs_in(ledger, 14)
    with pool, pytest.raises(BudgetExhausted):
        take(Desk(ledger, pool, QuietProgress()), programs, taken)
    assert sorted(number_of(source) for source, _, _ in record.starts) == list(range(10))
    assert [evaluation.program_id for evaluation in taken] == [program.id for program in programs[:10]]
    assert [evaluation.nll for evaluation in taken] == [(5.0 + number) / 2 for number in range(10)]
    stored = ledger.evaluations()
    assert [evaluation.is_settled for evaluation in stored] == [True] * 10
    budget = ledger.budget()
    assert (budget.used, budget.reserved, budget.free) == (10, 0, 0)
    assert 1 <= record.most <= workers
    assert ledger.check_invariants() == []


def test_as_many_run_at_a_time_as_there_are_workers(ledger: Ledger) -> None:
    meeting = threading.Barrier(4)

    def together(source: str, split: Split, draw: int) -> tuple[float, ...] | Exception:
        meeting.wait(60)
        return losses(source, split, draw)

    pool, record = told_pool(together, workers=4)
    taken: list[Evaluation] = []
    with pool:
        take(Desk(ledger, pool, QuietProgress()), programs_in(ledger, 8), taken)
    assert record.most == 4
    assert len(taken) == 8


def test_one_worker_reserves_the_next_call_only_when_the_one_before_was_taken(ledger: Ledger) -> None:
    pool, record = told_pool(losses)
    desk = Desk(ledger, pool, QuietProgress())
    calls = desk.evaluate_all(Call(program=program, kind="candidate") for program in programs_in(ledger, 3))
    next(calls)
    assert len(record.starts) == 1
    assert (ledger.budget().used, ledger.budget().reserved) == (1, 0)
    next(calls)
    assert len(record.starts) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_of_the_host_loses_nothing_that_ran_beside_it(ledger: Ledger, workers: int) -> None:
    broken = [True]

    def failing(source: str, split: Split, draw: int) -> tuple[float, ...] | Exception:
        return HostError("the disk is full") if broken[0] and number_of(source) == 1 else losses(source, split, draw)

    programs = programs_in(ledger, 6)
    pool, record = told_pool(failing, workers=workers, seconds=lambda source: 0.05 * number_of(source) % 0.2)
    taken: list[Evaluation] = []
    with pool, pytest.raises(HostError, match="disk is full"):
        take(Desk(ledger, pool, QuietProgress()), programs, taken)
    started = {number_of(source) for source, _, _ in record.starts}
    settled = {number for number, program in enumerate(programs) if _is_settled(ledger, program)}
    assert settled == started - {1}
    assert {evaluation.program_id for evaluation in taken} == {programs[number].id for number in settled}
    assert ledger.budget().reserved == 1
    assert len(started) <= 1 + workers

    path = ledger.path
    ledger.close()
    broken[0] = False
    with Ledger.open(path) as again:
        pool, second = told_pool(failing, workers=workers)
        taken = []
        with pool:
            take(Desk(again, pool, QuietProgress()), programs, taken)
        assert sorted(number_of(source) for source, _, _ in second.starts) == sorted(set(range(6)) - settled)
        assert [evaluation.program_id for evaluation in taken] == [program.id for program in programs]
        assert (again.budget().used, again.budget().reserved) == (6, 0)


def _is_settled(ledger: Ledger, program: Program) -> bool:
    return any(evaluation.is_settled for evaluation in ledger.evaluations(program_id=program.id))


def test_what_the_ledger_holds_is_not_run_again(ledger: Ledger) -> None:
    programs = programs_in(ledger, 5)
    first: list[Evaluation] = []
    pool, _ = told_pool(losses, workers=2)
    with pool:
        take(Desk(ledger, pool, QuietProgress()), programs[:3], first)
    again: list[Evaluation] = []
    pool, record = told_pool(losses, workers=8)
    with pool:
        take(Desk(ledger, pool, QuietProgress()), programs, again)
    assert again[:3] == first
    assert sorted(number_of(source) for source, _, _ in record.starts) == [3, 4]


def test_an_interruption_ends_the_programs_that_run(ledger: Ledger) -> None:
    pool, record = told_pool(losses, workers=3, seconds=lambda source: 0.3)
    desk = Desk(ledger, pool, QuietProgress())

    def interrupted() -> Iterator[Call]:
        for number, program in enumerate(programs_in(ledger, 3)):
            if number == 2:
                raise KeyboardInterrupt
            yield Call(program=program, kind="candidate")

    with pytest.raises(KeyboardInterrupt), pool:
        list(desk.evaluate_all(interrupted()))
    assert record.aborted >= 2
    assert record.running == 0
    assert ledger.budget().reserved == 2


def test_a_pool_needs_an_evaluator() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        told_pool(losses, workers=0)


def test_evaluators_are_made_when_they_are_needed(ledger: Ledger) -> None:
    made: list[Record] = []
    pool, record = told_pool(losses, workers=8)
    make = pool._make
    pool._make = lambda: (made.append(record), make())[1]
    with pool:
        list(Desk(ledger, pool, QuietProgress()).evaluate_all(
            Call(program=program, kind="candidate") for program in programs_in(ledger, 3)
        ))  # fmt: skip
    assert 0 <= len(made) <= 2
