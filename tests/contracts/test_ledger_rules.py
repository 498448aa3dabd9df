"""Rules of the ledger: the budget is exact, and predictions come before what they predict."""

from __future__ import annotations

import math
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypotheses.ledger import (
    BudgetExhausted,
    EvaluationInProgress,
    Ledger,
    LedgerConflict,
    LedgerError,
    LedgerRefused,
    NewControl,
    NewDesign,
    NewHypothesis,
    NewPrediction,
    Settlement,
)
from tests.ledger_builders import (
    RIVALS,
    candidate,
    control_evaluation,
    evaluate,
    new_campaign,
    new_program,
    observe,
    predictions,
    register,
    scored,
)


class TestBudget:
    def test_reserved_then_used(self, ledger: Ledger) -> None:
        program = ledger.add_program(new_program())
        evaluation = ledger.reserve_evaluation(candidate(program))
        budget = ledger.budget()
        assert (budget.total, budget.used, budget.reserved, budget.free) == (10, 0, 1, 9)
        ledger.settle_evaluation(evaluation.id, scored())
        budget = ledger.budget()
        assert (budget.total, budget.used, budget.reserved, budget.free) == (10, 1, 0, 9)

    def test_a_failed_program_costs_a_call_and_has_no_score(self, ledger: Ledger) -> None:
        failed = evaluate(
            ledger, candidate(ledger.add_program(new_program())), Settlement(outcome="timed_out", reason="60 s")
        )
        assert failed.nll is None
        assert ledger.budget().used == 1
        assert _select(ledger.path, "SELECT nll, outcome FROM evaluations") == [(None, "timed_out")]

    def test_setup_is_counted_apart(self, path: Path) -> None:
        with Ledger.create(path, new_campaign(budget=0)) as ledger:
            program = ledger.add_program(new_program())
            for draw in range(5):
                evaluate(ledger, candidate(program, kind="setup", draw=draw), scored())
            assert (ledger.budget().free, ledger.budget().num_setup) == (0, 5)
            with pytest.raises(BudgetExhausted, match="budget 0, used 0, reserved 0"):
                ledger.reserve_evaluation(candidate(program))

    def test_nothing_is_settled_twice(self, ledger: Ledger) -> None:
        evaluation = evaluate(ledger, candidate(ledger.add_program(new_program())), scored(3.0, 3.5))
        again = ledger.settle_evaluation(evaluation.id, scored(3.0, 3.5, wall_s=9.0, log_tail="x", device="cuda"))
        assert again == evaluation
        with pytest.raises(LedgerConflict, match="chunk_nll"):
            ledger.settle_evaluation(evaluation.id, scored(3.0, math.nextafter(3.5, 4)))

    def test_an_evaluation_is_not_started_twice_by_one_process(self, ledger: Ledger) -> None:
        new = candidate(ledger.add_program(new_program()))
        evaluation = ledger.reserve_evaluation(new)
        with pytest.raises(EvaluationInProgress, match=evaluation.id):
            ledger.reserve_evaluation(new)
        released = ledger.release_evaluation(evaluation.id, reason="the disk was full")
        assert (released.state, ledger.budget().reserved) == ("reserved", 1)
        with pytest.raises(LedgerRefused, match="reserve it again"):
            ledger.settle_evaluation(evaluation.id, scored())
        assert ledger.reserve_evaluation(new).attempt == 2
        assert ledger.budget().reserved == 1

    def test_eight_threads_get_exactly_the_ten_calls_there_are(self, ledger: Ledger) -> None:
        programs = [ledger.add_program(new_program(number)) for number in range(24)]
        barrier = threading.Barrier(8)

        def work(worker: int) -> list[str]:
            barrier.wait()
            settled = []
            for program in programs[worker::8]:
                try:
                    evaluation = ledger.reserve_evaluation(candidate(program))
                except BudgetExhausted:
                    continue
                budget = ledger.budget()
                assert budget.used + budget.reserved + budget.free == budget.total
                assert budget.free >= 0
                settled.append(ledger.settle_evaluation(evaluation.id, scored(float(worker))).id)
            return settled

        with ThreadPoolExecutor(8) as pool:
            settled = [name for names in pool.map(work, range(8)) for name in names]
        assert len(settled) == len(set(settled)) == 10
        assert {e.id for e in ledger.evaluations() if e.is_settled} == set(settled)
        assert ledger.budget().free == 0
        assert ledger.check_invariants() == []

    def test_one_key_raced_by_eight_threads_starts_once(self, ledger: Ledger) -> None:
        new = candidate(ledger.add_program(new_program()))
        barrier = threading.Barrier(8)

        def start(_: int) -> bool:
            barrier.wait()
            try:
                ledger.reserve_evaluation(new)
            except EvaluationInProgress:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(start, range(8))) == 1
        assert ledger.budget().reserved == 1


class TestRegistration:
    def test_predictions_are_older_than_the_evaluation_of_their_control(self, ledger: Ledger) -> None:
        registration = register(ledger, observe(ledger))
        without = ledger.add_program(new_program(9, origin="control"))
        evaluation = evaluate(ledger, control_evaluation(registration, without), scored())
        rows = _select(
            ledger.path,
            "SELECT p.registered_seq < e.reserved_seq FROM predictions p JOIN evaluations e USING (control_id)",
        )
        assert rows == [(1,), (1,)]
        assert evaluation.control_id == registration.controls[0].id

    def test_names_become_ids(self, ledger: Ledger) -> None:
        registration = register(
            ledger, observe(ledger), design=NewDesign(chosen=(), unseparated=(("spreading", "averaging"),))
        )
        hypotheses = {h.name: h.id for h in registration.hypotheses}
        assert registration.design.unseparated == ((hypotheses["spreading"], hypotheses["averaging"]),)
        assert [p.hypothesis_id for p in registration.predictions] == [hypotheses["spreading"], hypotheses["averaging"]]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hypotheses": RIVALS[:1], "predictions": predictions("without-rotation", "spreading")}, "two|2 rivals"),
            ({"predictions": predictions("without-rotation")[:1]}, "'averaging' has no prediction"),
            ({"hypotheses": (*RIVALS, RIVALS[0])}, "two hypotheses are called 'spreading'"),
            ({"predictions": predictions("without-rotation") * 2}, "two predictions of 'spreading'"),
            ({"predictions": predictions("other")}, "has no prediction for control 'without-rotation'"),
            ({"design": NewDesign(chosen=("other",))}, "no control 'other'"),
            (
                {
                    "predictions": (
                        predictions("without-rotation")[0],
                        NewPrediction(hypothesis="averaging", control="without-rotation", low=1.0, high=0.5),
                    )
                },
                "lower end comes first",
            ),
            (
                {
                    "predictions": (
                        predictions("without-rotation")[0],
                        NewPrediction(hypothesis="averaging", control="without-rotation", low=1.0, high=math.inf),
                    )
                },
                "prediction.high is inf",
            ),
        ],
    )
    def test_an_explanation_is_whole_or_nothing(self, ledger: Ledger, changes: dict[str, Any], message: str) -> None:
        observation = observe(ledger)
        before = ledger.events()
        with pytest.raises(LedgerError, match=message):
            register(ledger, observation, **changes)
        assert ledger.events() == before

    def test_a_registered_prediction_cannot_be_registered_otherwise(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        register(ledger, observation)
        moved = tuple(replace(p, high=p.high + 0.1) for p in predictions("without-rotation"))
        with pytest.raises(LedgerConflict, match="high: stored 0.2"):
            register(ledger, observation, predictions=moved)

    def test_a_later_round_adds_a_control_for_all_rivals(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        first = register(ledger, observation)
        without = ledger.add_program(new_program(9, origin="control"))
        evaluate(ledger, control_evaluation(first, without), scored())
        changes: dict[str, Any] = {
            "hypotheses": (),
            "controls": (NewControl(name="permuted", kind="substitute"),),
            "design": NewDesign(chosen=("permuted",), cost=1),
            "round": 1,
        }
        with pytest.raises(LedgerRefused, match="'averaging' has no prediction for control 'permuted'"):
            register(ledger, observation, predictions=predictions("permuted", "spreading"), **changes)
        second = register(ledger, observation, predictions=predictions("permuted"), **changes)
        assert [p.hypothesis_id for p in second.predictions] == [h.id for h in first.hypotheses]
        assert [d.round for d in ledger.designs(observation.id)] == [0, 1]

    def test_a_revision_names_its_predecessor_which_stands_no_longer(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        first = register(ledger, observation)
        revised = NewHypothesis(
            name="sharper", mechanism="rotation", cause="spreading_late", predecessor_id=first.hypotheses[0].id
        )
        changes: dict[str, Any] = {
            "hypotheses": (revised,),
            "controls": (NewControl(name="permuted", kind="substitute"),),
            "design": NewDesign(chosen=("permuted",), cost=1),
            "round": 1,
        }
        both = predictions("permuted", "averaging", "sharper")
        with pytest.raises(LedgerRefused, match="'sharper' has no prediction for control 'permuted'"):
            register(ledger, observation, predictions=predictions("permuted", "averaging"), **changes)
        second = register(ledger, observation, predictions=both + predictions("without-rotation", "sharper"), **changes)
        assert second.hypotheses[0].predecessor_id == first.hypotheses[0].id
        assert ledger.hypotheses(observation.id)[-1] == second.hypotheses[0]
        assert register(ledger, observation).hypotheses == first.hypotheses, (
            "a replay of the first round changes nothing"
        )
        without, permuted = (ledger.add_program(new_program(n, origin="control")) for n in (9, 8))
        evaluate(ledger, control_evaluation(first, without), scored())
        evaluate(ledger, control_evaluation(second, permuted), scored())
        assert ledger.check_invariants() == []

    @pytest.mark.parametrize(
        ("round", "predecessor", "message"),
        [
            (1, None, "hypothesis 'late' of round 1 names no predecessor"),
            (1, "hyp-nobody", "is 'hyp-nobody'; hypotheses has no such record"),
            (1, "of another observation", "a predecessor is an earlier hypothesis of the same observation"),
            (0, "its own", "a predecessor is an earlier hypothesis of the same observation"),
        ],
    )
    def test_a_revision_revises_an_earlier_hypothesis_of_its_observation(
        self, ledger: Ledger, round: int, predecessor: str | None, message: str
    ) -> None:
        observation = observe(ledger)
        first = register(ledger, observation)
        other = register(ledger, observe(ledger, number=2))
        known = {"of another observation": other.hypotheses[0].id, "its own": first.hypotheses[0].id}
        late = NewHypothesis(
            name="late", mechanism="rotation", cause="luck", predecessor_id=known.get(str(predecessor), predecessor)
        )
        before = ledger.events()
        with pytest.raises(LedgerError, match=message):
            register(
                ledger,
                observation,
                hypotheses=(*RIVALS, late) if round == 0 else (late,),
                controls=(),
                predictions=(),
                design=NewDesign(chosen=()),
                round=round,
            )
        assert ledger.events() == before

    def test_two_revisions_of_one_hypothesis_are_refused(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        first = register(ledger, observation)
        late = tuple(
            NewHypothesis(name=name, mechanism="rotation", cause=name, predecessor_id=first.hypotheses[0].id)
            for name in ("one", "other")
        )
        with pytest.raises(LedgerRefused, match="'one' and 'other' both revise"):
            register(
                ledger, observation, hypotheses=late, controls=(), predictions=(), design=NewDesign(chosen=()), round=1
            )

    def test_what_is_known_is_never_predicted(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        first = register(ledger, observation)
        without = ledger.add_program(new_program(9, origin="control"))
        evaluate(ledger, control_evaluation(first, without), scored())
        with pytest.raises(LedgerRefused, match="what is known is never predicted"):
            register(
                ledger,
                observation,
                hypotheses=(
                    NewHypothesis(
                        name="late", mechanism="rotation", cause="luck", predecessor_id=first.hypotheses[0].id
                    ),
                ),
                controls=(),
                predictions=predictions("without-rotation", "late"),
                design=NewDesign(chosen=()),
                round=1,
            )
        assert len(ledger.hypotheses()) == 2

    @pytest.mark.parametrize("twin", ["the same", "renamed"])
    def test_a_program_that_was_measured_before_its_prediction_is_no_evidence(self, ledger: Ledger, twin: str) -> None:
        """Two observations, one program: the second one's predictions come after the result."""
        first = register(ledger, observe(ledger))
        program = ledger.add_program(new_program(9, origin="control"))
        evaluate(ledger, control_evaluation(first, program), scored())
        hashes = {"ast_hash": "a9"} if twin == "the same" else {"ast_hash": "a10", "normalized_ast_hash": "n9"}
        again = ledger.add_program(new_program(10, origin="control", **hashes))
        second = register(ledger, observe(ledger, number=2))
        new = control_evaluation(second, again)
        before = ledger.events()
        with pytest.raises(LedgerRefused, match="before the predictions for it were registered; what is known"):
            ledger.reserve_evaluation(new)
        assert ledger.events() == before
        assert ledger.check_invariants() == []
        # Other text, or another draw, tells something new at this level; the campaign is stricter.
        assert ledger.reserve_evaluation(replace(new, draw=1)).attempt == 1

    def test_a_control_serves_two_observations_whose_predictions_are_older_than_its_result(
        self, ledger: Ledger
    ) -> None:
        program = ledger.add_program(new_program(9, origin="control"))
        registrations = [register(ledger, observe(ledger, number=number)) for number in (1, 2)]
        for registration in registrations:
            assert evaluate(ledger, control_evaluation(registration, program), scored()).is_settled
        assert ledger.check_invariants() == []

    def test_an_earlier_result_that_got_in_otherwise_violates_an_invariant(self, ledger: Ledger) -> None:
        first = register(ledger, observe(ledger))
        program = ledger.add_program(new_program(9, origin="control"))
        known = evaluate(ledger, control_evaluation(first, program), scored())
        again = ledger.add_program(new_program(10, origin="control"))
        second = register(ledger, observe(ledger, number=2))
        evaluate(ledger, control_evaluation(second, again), scored())
        connection = sqlite3.connect(ledger.path)
        connection.execute("DROP TRIGGER programs_no_update")
        connection.execute("UPDATE programs SET ast_hash = 'a9' WHERE id = ?", (again.id,))
        connection.commit()
        connection.close()
        found = ledger.check_invariants()
        assert len(found) == 2
        assert all(f"when {known.id} had measured the same program" in sentence for sentence in found)

    def test_a_control_is_measured_with_the_program_it_was_registered_with(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        registered = ledger.add_program(new_program(9, origin="control"))
        other = ledger.add_program(new_program(8, origin="control"))
        registration = register(
            ledger,
            observation,
            controls=(NewControl(name="without-rotation", kind="knockout", program_id=registered.id),),
        )
        with pytest.raises(LedgerRefused, match=f"registered with {registered.id}"):
            ledger.reserve_evaluation(control_evaluation(registration, other))
        assert ledger.reserve_evaluation(control_evaluation(registration, registered)).attempt == 1

    def test_only_controls_name_a_control_and_only_setup_the_bare_subject(self, ledger: Ledger) -> None:
        registration = register(ledger, observe(ledger))
        program = ledger.add_program(new_program())
        for new in (
            candidate(program, kind="control"),
            candidate(program, draw=3, control_id=registration.controls[0].id),
            candidate(program, draw=3, program_id=None),
        ):
            with pytest.raises(LedgerRefused):
                ledger.reserve_evaluation(new)


def _select(path: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
