"""Which program a campaign stands for: the latest incumbent that held when it was measured again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators.results import Split
from forge.confirming import CONFIRMATION_DRAW, Confirmer, Declaration
from forge.desk import Call, Desk
from forge.noise import NoiseModel
from forge.progress import QuietProgress
from forge.recipe import Statistics
from forge.summary import summarize
from hypotheses.ledger import Ledger, NewIncumbent, NewNoise, NewNote, Program
from tests.ledger_builders import new_campaign, new_program
from tests.told_evaluators import Record, told_pool

NOISE = NoiseModel(draw_variance=1e-4, num_draws=5, floor=0.02, full_precision=2.0, reference_damage=0.0)
CHUNKS = (0.0, 0.2, -0.1, 0.1)
"""What makes chunks differ; the same for all programs, so that effects are exact."""


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(budget=6)) as ledger:
        yield ledger


class Told:
    """A ledger with a line of incumbents whose losses are told, by number of the program: on search and on confirm."""

    def __init__(self, ledger: Ledger, search: list[float], confirm: list[float | None]) -> None:
        self.ledger = ledger
        self.search, self.confirm = search, confirm
        pool, self.record = told_pool(self._losses)
        self.desk = Desk(ledger, pool, QuietProgress())
        self.confirmer = Confirmer(ledger, NOISE, Statistics(), 7)
        self.programs: list[Program] = []
        for number in range(len(search)):
            self._promote(number)

    def _losses(self, source: str, split: Split, draw: int) -> tuple[float, ...]:
        number = int(source.split("return ")[1])
        loss = (self.search if split == "search" else self.confirm)[number]
        return () if loss is None else tuple(loss + chunk for chunk in CHUNKS)

    def _promote(self, number: int) -> None:
        parent = self.programs[-1].id if self.programs else None
        program = self.ledger.add_program(new_program(number, parent_id=parent))
        kind = "candidate" if number else "setup"
        evaluation = self.desk.evaluate(Call(program=program, kind=kind, seed=7, turn=number))
        self.ledger.set_incumbent(
            NewIncumbent(turn=number, program_id=program.id, evaluation_id=evaluation.id, reason="of the test")
        )
        self.programs.append(program)

    def declare(self, *, measures: bool = True) -> Declaration:
        declaration = self.confirmer.declare(self.desk if measures else None)
        assert declaration is not None
        return declaration


def confirmations(record: Record) -> list[int]:
    return [int(source.split("return ")[1]) for source, split, draw in record.starts if split == "confirm"]


def test_the_seed_needs_no_measurement(ledger: Ledger) -> None:
    told = Told(ledger, [3.0], [3.0])
    declaration = told.declare()
    assert declaration.best.program == told.programs[0]
    assert declaration.confirmation is None
    assert confirmations(told.record) == []


def test_the_best_is_measured_again_on_other_text_with_another_draw_beside_its_parent(ledger: Ledger) -> None:
    told = Told(ledger, [3.0, 2.5], [3.1, 2.7])
    assert told.confirmer.spendable() == ledger.budget().free - 1
    declaration = told.declare()
    assert declaration.best.program == told.programs[1]
    assert declaration.confirmation is not None
    evaluation, effect = declaration.confirmation.evaluation, declaration.confirmation.effect
    assert (evaluation.kind, evaluation.split, evaluation.draw, evaluation.turn) == (
        "confirmation", "confirm", CONFIRMATION_DRAW, 1,
    )  # fmt: skip
    assert effect is not None
    assert effect.mean == pytest.approx(0.4)
    assert told.confirmer.spendable() == ledger.budget().free
    assert told.declare() == declaration
    assert confirmations(told.record) == [1]


def test_a_lucky_program_is_passed_over(ledger: Ledger) -> None:
    told = Told(ledger, [3.0, 2.5, 2.4], [3.1, 2.6, 2.61])
    declaration = told.declare()
    assert declaration.best.program == told.programs[1]
    ((title, reason),) = declaration.passed_over
    assert title == "program 2"
    assert "did not hold" in reason
    assert "confirm -0.0100" in reason
    assert confirmations(told.record) == [2, 1]


def test_one_that_fails_when_it_is_measured_again_is_passed_over(ledger: Ledger) -> None:
    told = Told(ledger, [3.0, 2.5], [3.1, None])
    declaration = told.declare()
    assert declaration.best.program == told.programs[0]
    assert declaration.passed_over == (("program 1", "measured again, it was not scored: crashed: of its own"),)


@pytest.mark.parametrize(("confirmed", "declared"), [(2.995, True), (3.2, False)])
def test_a_simpler_program_has_only_not_to_be_worse(ledger: Ledger, confirmed: float, declared: bool) -> None:
    told = Told(ledger, [3.0, 3.005], [3.0, confirmed])
    assert (told.declare().best.program == told.programs[1]) is declared


def test_without_a_free_call_nothing_unmeasured_is_declared(ledger: Ledger) -> None:
    told = Told(ledger, [3.0, 2.8, 2.7, 2.6, 2.5], [3.0, 2.8, 2.7, 2.6, 2.5])
    for number in (7, 8):
        program = ledger.add_program(new_program(number))
        told.search += [9.0] * (number + 1 - len(told.search))
        told.desk.evaluate(Call(program=program, kind="candidate", turn=number))
    assert ledger.budget().free == 0
    declaration = told.declare()
    assert declaration.best.program == told.programs[0]
    assert [reason for _, reason in declaration.passed_over] == ["it was not measured again"] * 4


def test_reading_buys_nothing(ledger: Ledger) -> None:
    told = Told(ledger, [3.0, 2.5], [3.1, 2.7])
    assert told.declare(measures=False).best.program == told.programs[0]
    assert confirmations(told.record) == []


def test_the_summary_names_the_declared_program(ledger: Ledger) -> None:
    told = Told(ledger, [3.0, 2.5, 2.4], [3.1, 2.6, 2.61])
    noise = ledger.record_noise(
        NewNoise(
            program_id=told.programs[0].id, split="search", floor=0.02, chunk_variance=1e-4, draw_variance=1e-4,
            num_chunks=4, evaluation_ids=tuple(e.id for e in ledger.evaluations())[:1] * 5,
        )
    )  # fmt: skip
    assert noise.floor == 0.02
    running = summarize(ledger)
    assert running.best.name == "best so far: program 2"
    assert running.declared is not None
    assert not running.declared.is_final
    told.declare()
    ledger.add_note(NewNote(turn=2, topic="declared", text="program 1"))
    summary = summarize(ledger)
    assert [figure.name for figure in summary.figures] == [
        "program 0 (seed)", "program 2 (not declared)", "best: program 1",
    ]  # fmt: skip
    declared = summary.declared
    assert declared is not None
    assert (declared.program, declared.is_final) == ("program 1", True)
    assert declared.nll == pytest.approx(2.65)
    assert declared.parent_nll == pytest.approx(3.15)
    assert declared.effect == pytest.approx(0.5)
    assert declared.passed_over[0][0] == "program 2"


def test_before_the_seed_is_scored_there_is_nothing(ledger: Ledger) -> None:
    assert Confirmer(ledger, NOISE, Statistics(), 7).declare() is None
