"""What a ledger promises to the campaign that writes it: idempotent steps, exact budget, order, rules, stable hash."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from hypotheses.ledger import (
    BudgetExhausted,
    EvaluationInProgress,
    Ledger,
    LedgerBusy,
    LedgerConflict,
    LedgerError,
    LedgerNotFound,
    LedgerRefused,
    LedgerSchemaError,
    LedgerValueError,
    NewControl,
    NewDesign,
    NewErrorMap,
    NewHypothesis,
    NewIncumbent,
    NewLlmCall,
    NewNote,
    NewPrediction,
    NewProposal,
    NewRequiredEdit,
    Settlement,
)
from hypotheses.ledger.columns import Base
from tests.ledger_builders import (
    RIVALS,
    candidate,
    control_evaluation,
    evaluate,
    new_campaign,
    new_program,
    observe,
    play,
    predictions,
    register,
    scored,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.create(path, new_campaign()) as opened:
        yield opened


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished ledger with rows in every table; tests must not change it."""
    path = tmp_path_factory.mktemp("played") / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        play(ledger)
        ledger.record_environment(device="cpu", versions={})
        ledger.record_llm_failure("turn-1/propose/0", model="m", error="503")
        assert ledger.budget().free == 0
    return path


class TestRecords:
    def test_what_is_written_is_read_back_by_another_opening(self, path: Path) -> None:
        with Ledger.create(path, new_campaign()) as writer:
            program = writer.add_program(new_program(3, mechanisms=("rotation",)))
            evaluation = evaluate(writer, candidate(program), scored(2.25, 1e-300))
            registration = register(writer, observe(writer))
            writer.record_environment(device="cpu", versions={"torch": "2.13"})
        with Ledger.open(path, read_only=True) as reader:
            assert reader.campaign().recipe == new_campaign().recipe
            assert reader.program(program.id) == program
            assert reader.evaluation(evaluation.id) == evaluation
            assert reader.evaluation(evaluation.id).result == scored(2.25, 1e-300)
            assert reader.hypotheses(registration.observation_id) == registration.hypotheses
            assert reader.predictions() == registration.predictions
            assert reader.designs() == (registration.design,)
            assert [e.versions for e in reader.environments()] == [{"torch": "2.13"}]

    def test_records_are_frozen(self, ledger: Ledger) -> None:
        program = ledger.add_program(new_program())
        with pytest.raises(FrozenInstanceError):
            program.title = "other"  # type: ignore[misc]

    def test_ids_come_from_content_and_times_are_utc(self, ledger: Ledger, tmp_path: Path) -> None:
        program = ledger.add_program(new_program())
        with Ledger.create(tmp_path / "other.sqlite", new_campaign(seed=99)) as other:
            other.add_note(NewNote(turn=0, topic="x", text="shifts the order"))
            assert other.add_program(new_program()).id == program.id
        assert program.id.startswith("prog-")
        offset = program.at.utcoffset()
        assert offset is not None
        assert offset.total_seconds() == 0

    def test_queries_answer_in_the_order_of_events(self, ledger: Ledger) -> None:
        programs = [ledger.add_program(new_program(number)) for number in (5, 3, 4, 1, 2)]
        assert list(ledger.programs()) == programs
        assert [p.seq for p in programs] == sorted(p.seq for p in programs)

    def test_unknown_ids_are_named(self, ledger: Ledger) -> None:
        with pytest.raises(LedgerNotFound, match="prog-nothing"):
            ledger.program("prog-nothing")
        with pytest.raises(LedgerNotFound, match=r"programs has no such record"):
            ledger.add_program(new_program(1, parent_id="prog-nothing"))

    def test_spend_counts_failures_and_keeps_an_unknown_price_unknown(self, ledger: Ledger) -> None:
        ledger.record_llm_call(
            NewLlmCall(purpose="a", prompt="p", reply="r", model="m", tokens_in=10, tokens_out=5, cost=0.5)
        )
        ledger.record_llm_failure("b", model="m", error="503", tokens_in=7, cost=0.25)
        assert ledger.llm_spend().cost == 0.75
        assert ledger.llm_spend().tokens_in == 17
        ledger.record_llm_failure("b", model="m", error="503")
        spend = ledger.llm_spend()
        assert (spend.num_calls, spend.num_failures, spend.cost, spend.num_unknown_costs) == (1, 2, None, 1)


class TestIdempotence:
    def test_the_same_steps_again_write_nothing(self, path: Path) -> None:
        with Ledger.create(path, new_campaign()) as first:
            play(first)
            events = first.events()
        with Ledger.open(path) as second:
            play(second, wall_s=99.0)
            assert second.events() == events
            assert second.num_unreplayed() == 0

    def test_other_content_under_the_same_key_is_a_conflict_that_names_the_field(self, ledger: Ledger) -> None:
        ledger.add_program(new_program())
        with pytest.raises(LedgerConflict, match='title: stored "program 0", given "other"'):
            ledger.add_program(new_program(title="other"))
        assert [p.title for p in ledger.programs()] == ["program 0"]

    def test_an_integer_given_for_a_float_is_the_same_content(self, ledger: Ledger) -> None:
        evaluation = evaluate(ledger, candidate(ledger.add_program(new_program())), scored(2, 3, effective_bits=5))
        again = ledger.settle_evaluation(evaluation.id, scored(2.0, 3.0, effective_bits=5.0))
        assert again == evaluation

    def test_a_changed_reply_or_prompt_is_a_conflict(self, ledger: Ledger) -> None:
        ledger.record_llm_call(NewLlmCall(purpose="a", prompt="p", reply="r", model="m"))
        with pytest.raises(LedgerConflict, match="reply_hash"):
            ledger.record_llm_call(NewLlmCall(purpose="a", prompt="p", reply="other", model="m"))
        with pytest.raises(LedgerConflict, match="another prompt"):
            ledger.find_llm_call("a", prompt="other")
        assert ledger.find_llm_call("b", prompt="p") is None

    def test_a_failed_step_stores_nothing(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        before = ledger.events()
        with pytest.raises(LedgerRefused):
            register(ledger, observation, predictions=predictions("without-rotation")[:1])
        assert ledger.events() == before
        assert ledger.hypotheses() == ()


class TestReplay:
    def test_reads_of_a_reopened_writer_end_where_its_replay_stands(self, path: Path) -> None:
        with Ledger.create(path, new_campaign()) as first:
            program = first.add_program(new_program())
            evaluation = evaluate(first, candidate(program), scored())
            first.set_incumbent(
                NewIncumbent(turn=0, program_id=program.id, evaluation_id=evaluation.id, reason="the seed")
            )
        with Ledger.open(path) as second:
            assert second.programs() == ()
            assert (second.budget().used, second.budget().free) == (0, 10)
            assert second.add_program(new_program()) == program
            assert second.budget().used == 0
            assert second.reserve_evaluation(candidate(program)) == evaluation
            assert (second.budget().used, second.budget().free) == (1, 9)
            assert second.incumbent() is None
            assert second.num_unreplayed() == 1
        with Ledger.open(path, read_only=True) as reader:
            assert reader.incumbent() is not None
            assert reader.num_unreplayed() == 0

    def test_work_is_found_ahead_of_the_position(self, path: Path) -> None:
        with Ledger.create(path, new_campaign()) as first:
            first.record_llm_call(NewLlmCall(purpose="a", prompt="p", reply="r", model="m"))
            first.record_error_map(NewErrorMap(artifact_hash="f" * 64, rows=({"layer": "x"},)))
        with Ledger.open(path) as second:
            error_map = second.find_error_map("f" * 64)
            assert error_map is not None
            assert second.position == error_map.seq
            call = second.find_llm_call("a", prompt="p")
            assert call is not None
            assert call.reply == "r"

    def test_a_required_edit_met_again_has_only_the_history_of_that_step(self, path: Path) -> None:
        with Ledger.create(path, new_campaign()) as first:
            play(first)
        with Ledger.open(path) as second, Ledger.open(path, read_only=True) as reader:
            (edit,) = reader.required_edits()
            assert [entry.state for entry in edit.history] == ["open", "discharged"]
            observe(second)
            register(second, reader.observations()[0])
            names = NewRequiredEdit.__dataclass_fields__
            again = second.add_required_edit(NewRequiredEdit(**{name: getattr(edit, name) for name in names}))
            assert again.state == "open"

    def test_a_campaign_stopped_after_every_single_step_ends_like_one_that_never_stopped(self, tmp_path: Path) -> None:
        whole, pieces = tmp_path / "whole.sqlite", tmp_path / "pieces.sqlite"
        with Ledger.create(whole, new_campaign(budget=6)) as ledger:
            play(ledger)
            expected = (ledger.content_hash(), len(ledger.events()))
        Ledger.create(pieces, new_campaign(budget=6)).close()
        num_stops = 0
        while True:
            with Ledger.open(pieces) as ledger:
                try:
                    play(_StopsAfterOneStep(ledger), wall_s=float(num_stops))  # type: ignore[arg-type]
                    break
                except _Stopped:
                    num_stops += 1
        assert num_stops > 35
        with Ledger.open(pieces, read_only=True) as reader:
            assert (reader.content_hash(), len(reader.events())) == expected
            assert reader.check_invariants() == []
            assert (reader.budget().used, reader.budget().reserved, reader.budget().free) == (6, 0, 0)
            assert {e.attempt for e in reader.evaluations()} == {2}


class _Stopped(Exception):
    pass


class _StopsAfterOneStep:
    """A ledger whose process ends after the first step that writes something new."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._end = ledger.position + ledger.num_unreplayed()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if self._ledger.position > self._end:
                raise _Stopped
            return result

        return step


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

    def test_what_is_known_is_never_predicted(self, ledger: Ledger) -> None:
        observation = observe(ledger)
        first = register(ledger, observation)
        without = ledger.add_program(new_program(9, origin="control"))
        evaluate(ledger, control_evaluation(first, without), scored())
        with pytest.raises(LedgerRefused, match="what is known is never predicted"):
            register(
                ledger,
                observation,
                hypotheses=(NewHypothesis(name="late", mechanism="rotation", cause="luck"),),
                controls=(),
                predictions=predictions("without-rotation", "late"),
                design=NewDesign(chosen=()),
                round=1,
            )
        assert len(ledger.hypotheses()) == 2

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


class TestValues:
    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_none_are_refused_everywhere(self, ledger: Ledger, number: float) -> None:
        program = ledger.add_program(new_program())
        evaluation = ledger.reserve_evaluation(candidate(program))
        for result in (
            scored(3.0, number),
            scored(effective_bits=number),
            scored(wall_s=number),
            scored(reference_chunk_nll=(1.0, number)),
        ):
            with pytest.raises(LedgerValueError, match="nan|inf"):
                ledger.settle_evaluation(evaluation.id, result)
        with pytest.raises(LedgerValueError, match=r"error_map.rows\[0\].joint is"):
            ledger.record_error_map(NewErrorMap(artifact_hash="f", rows=({"joint": number},)))
        with pytest.raises(LedgerValueError, match=r"llm_failure.cost"):
            ledger.record_llm_failure("a", model="m", error="e", cost=number)
        assert ledger.evaluation(evaluation.id).state == "reserved"

    def test_a_score_is_there_exactly_when_it_was_scored(self, ledger: Ledger) -> None:
        evaluation = ledger.reserve_evaluation(candidate(ledger.add_program(new_program())))
        for result in (
            Settlement(outcome="scored"),
            Settlement(outcome="crashed", chunk_nll=(0.0,)),
            scored(3.0, 3.5, reference_chunk_nll=(3.0,)),
        ):
            with pytest.raises(LedgerValueError):
                ledger.settle_evaluation(evaluation.id, result)

    def test_long_texts_are_refused_and_what_a_program_makes_long_is_cut(self, ledger: Ledger) -> None:
        with pytest.raises(LedgerValueError, match="1048576 bytes"):
            ledger.add_program(new_program(source="#" * (1 << 20) + "\n"))
        events = [{"index": index, "op": "weight", "layer": "blocks.0.q"} for index in range(40_000)]
        result = scored(log_tail="x" * 10**6 + "end", evidence={"events": events, "layers": {"a": {"bits": 4.25}}})
        evaluation = evaluate(ledger, candidate(ledger.add_program(new_program())), result)
        assert evaluation.result is not None
        stored = evaluation.result.evidence
        assert stored["layers"] == {"a": {"bits": 4.25}}
        assert stored["events"] == events[: len(stored["events"])]
        assert stored["events_left_out"] == 40_000 - len(stored["events"]) > 0
        assert evaluation.result.log_tail.endswith("xend")
        assert len(evaluation.result.log_tail) == 16_384
        assert ledger.settle_evaluation(evaluation.id, result) == evaluation

    def test_what_a_program_says_and_leaves_behind_never_stops_the_campaign(self, ledger: Ledger) -> None:
        odd = "bad \ud800 and \x00 " + "x" * 10_000
        evidence = {"events": [{"op": "log", "text": odd}], "layers": {"a": {"weight_error": math.nan, "bits": 4.25}}}
        result = Settlement(outcome="crashed", reason=odd, log_tail=odd, evidence=evidence)
        evaluation = evaluate(ledger, candidate(ledger.add_program(new_program())), result)
        assert evaluation.result is not None
        assert evaluation.result.reason.startswith("bad ? and \ufffd xxx")
        assert len(evaluation.result.reason) == 4_096
        assert evaluation.result.evidence["layers"] == {"a": {"weight_error": None, "bits": 4.25}}
        assert ledger.settle_evaluation(evaluation.id, result) == evaluation

    def test_other_text_that_is_no_unicode_is_refused(self, ledger: Ledger) -> None:
        with pytest.raises(LedgerValueError, match=r"program\.title is no valid Unicode text"):
            ledger.add_program(new_program(title="\ud800"))
        with pytest.raises(LedgerValueError, match=r"program\.source is no valid Unicode text"):
            ledger.add_program(new_program(source="\ud800"))

    def test_a_refusal_has_a_reason(self, ledger: Ledger) -> None:
        with pytest.raises(LedgerRefused, match="refusal_has_a_reason"):
            ledger.record_proposal(NewProposal(turn=1, attempt=0, status="refused"))


class TestTriggers:
    """Rules hold for any connection, also one that knows nothing of this code and checks no foreign keys."""

    def test_no_row_of_any_table_is_changed_deleted_or_replaced(self, played: Path) -> None:
        connection = sqlite3.connect(played)
        before = list(connection.iterdump())
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        checked = 0
        for name in names:
            if name.startswith("sqlite_") or connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] == 0:
                continue
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            last = columns[-1]
            for statement in (
                f"UPDATE {name} SET {last} = {last}",
                f"UPDATE OR REPLACE {name} SET {last} = NULL",
                f"DELETE FROM {name}",
                f"INSERT OR REPLACE INTO {name} SELECT * FROM {name}",
                f"REPLACE INTO {name} ({', '.join(columns)}) SELECT {', '.join(columns[:-1])}, 0 FROM {name}",
            ):
                with pytest.raises(sqlite3.IntegrityError, match="ledger: "):
                    connection.execute(statement)
                checked += 1
        assert checked == 5 * len(Base.metadata.tables)
        assert list(connection.iterdump()) == before
        connection.close()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kind": "control", "control_id": "ctl-x"}, "after its predictions are registered"),
            ({"kind": "control"}, "after its predictions are registered"),
            ({"state": "settled"}, "reserved before it is settled"),
            ({"kind": "free"}, "CHECK constraint failed"),
            ({"program_id": None}, "CHECK constraint failed"),
            ({"control_id": "ctl-x"}, "CHECK constraint failed"),
            ({"outcome": "scored", "nll": 1.0}, "CHECK constraint failed"),
        ],
    )
    def test_evaluations_that_break_a_rule_are_not_inserted(
        self, ledger: Ledger, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(sqlite3.IntegrityError, match=message):
            _insert_evaluation(ledger.path, **changes)
        assert ledger.budget().free == 10

    def test_nothing_is_inserted_beyond_the_budget(self, played: Path) -> None:
        for kind in ("candidate", "confirmation", "final"):
            with pytest.raises(sqlite3.IntegrityError, match="no evaluator call is free"):
                _insert_evaluation(played, kind=kind)

    def test_a_prediction_after_the_fact_and_a_second_campaign_are_not_inserted(self, played: Path) -> None:
        connection = sqlite3.connect(played)
        with pytest.raises(sqlite3.IntegrityError, match="what is known is never predicted"):
            connection.execute(
                "INSERT INTO predictions"
                " (id, registered_seq, observation_id, hypothesis_id, control_id, low, high, body)"
                " SELECT 'pred-x', 1000000, observation_id, hypothesis_id, control_id, low, high, body FROM predictions"
            )
        columns = [row[1] for row in connection.execute("PRAGMA table_info(campaign)")][2:]
        with pytest.raises(sqlite3.IntegrityError, match="one campaign"):
            connection.execute(
                f"INSERT INTO campaign (id, seq, {', '.join(columns)}) "
                f"SELECT 'camp-x', 1000000, {', '.join(columns)} FROM campaign"
            )
        connection.close()

    def test_a_reserved_evaluation_can_only_be_settled_as_what_it_is(self, ledger: Ledger) -> None:
        program = ledger.add_program(new_program())
        ledger.add_program(new_program(1))
        ledger.reserve_evaluation(candidate(program))
        connection = sqlite3.connect(ledger.path)
        for change in ("draw = 1", "turn = 5", "kind = 'setup'", "state = 'settled', program_id = 'x'", "nll = 1.0"):
            with pytest.raises(sqlite3.IntegrityError, match="can only be settled"):
                connection.execute(f"UPDATE evaluations SET {change}")
        connection.close()


class TestReaders:
    def test_a_reader_that_holds_a_snapshot_blocks_no_writer(self, ledger: Ledger) -> None:
        program = ledger.add_program(new_program())
        connection = sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True, isolation_level=None)
        connection.execute("BEGIN")
        assert connection.execute("SELECT count(*) FROM evaluations").fetchone() == (0,)
        with Ledger.open(ledger.path, read_only=True) as reader:
            for number in range(5):
                evaluate(ledger, candidate(program, draw=number), scored())
                assert len(reader.evaluations()) == number + 1
                assert reader.budget().used == number + 1
        assert connection.execute("SELECT count(*) FROM evaluations").fetchone() == (0,)
        connection.close()

    def test_readers_in_a_loop_beside_eight_writing_threads(self, ledger: Ledger) -> None:
        programs = [ledger.add_program(new_program(number)) for number in range(8)]
        stop = threading.Event()

        def watch() -> int:
            rounds = 0
            with Ledger.open(ledger.path, read_only=True) as reader:
                while not stop.is_set():
                    budget = reader.budget()
                    assert budget.used + budget.reserved + budget.free == budget.total
                    assert all(e.is_settled == (e.result is not None) for e in reader.evaluations())
                    rounds += 1
            return rounds

        def work(number: int) -> None:
            evaluate(ledger, candidate(programs[number]), scored())
            ledger.add_note(NewNote(turn=number, topic="x", text="y"))

        with ThreadPoolExecutor(10) as pool:
            watchers = [pool.submit(watch) for _ in range(2)]
            try:
                list(pool.map(work, range(8)))
            finally:
                stop.set()
            assert all(watcher.result() > 0 for watcher in watchers)
        assert ledger.budget().used == 8

    def test_a_reader_cannot_write(self, ledger: Ledger) -> None:
        with Ledger.open(ledger.path, read_only=True) as reader:
            assert reader.is_read_only
            with pytest.raises(LedgerRefused, match="read-only"):
                reader.add_program(new_program())


class TestFiles:
    def test_a_second_writer_is_refused_with_the_pid_of_the_first(self, ledger: Ledger) -> None:
        for attempt in (lambda: Ledger.open(ledger.path), lambda: Ledger.create(ledger.path, new_campaign())):
            with pytest.raises(LedgerBusy, match=f"process {os.getpid()}"):
                attempt()
        ledger.close()
        Ledger.open(ledger.path).close()

    def test_an_existing_ledger_is_never_overwritten(self, path: Path) -> None:
        Ledger.create(path, new_campaign()).close()
        with pytest.raises(LedgerConflict, match="resume it"):
            Ledger.create(path, new_campaign())
        Ledger.open(path).close()

    def test_a_failed_creation_leaves_no_ledger(self, path: Path) -> None:
        with pytest.raises(LedgerValueError, match="campaign.recipe.x is nan"):
            Ledger.create(path, new_campaign(recipe={"x": math.nan}))
        assert not path.exists()
        Ledger.create(path, new_campaign()).close()

    def test_an_interrupted_creation_is_said_to_be_one_and_can_be_repeated(self, path: Path) -> None:
        path.touch()
        with pytest.raises(LedgerSchemaError, match="start the run again"):
            Ledger.open(path)
        Ledger.create(path, new_campaign()).close()

    def test_a_newer_schema_is_refused_untouched(self, path: Path) -> None:
        Ledger.create(path, new_campaign()).close()
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version=3")
        connection.close()
        before = path.read_bytes()
        for read_only in (False, True):
            with pytest.raises(LedgerSchemaError, match="schema version 3; this QuantForge reads up to 2"):
                Ledger.open(path, read_only=read_only)
        assert path.read_bytes() == before

    def test_other_files_are_refused_untouched(self, tmp_path: Path) -> None:
        text, database = tmp_path / "text", tmp_path / "database"
        text.write_text("no database at all, but longer than one hundred bytes of header: " + "x" * 100)
        connection = sqlite3.connect(database)
        connection.execute("CREATE TABLE other (x)")
        connection.close()
        for path in (text, database):
            before = path.read_bytes()
            for attempt in (Ledger.open, lambda path: Ledger.create(path, new_campaign())):
                with pytest.raises(LedgerSchemaError, match="no ledger"):
                    attempt(path)
            assert path.read_bytes() == before
        with pytest.raises(LedgerNotFound, match="no ledger at"):
            Ledger.open(tmp_path / "missing")
        with pytest.raises(LedgerError, match="does not exist"):
            Ledger.create(tmp_path / "missing" / "ledger.sqlite", new_campaign())

    def test_odd_characters_in_the_path(self, tmp_path: Path) -> None:
        folder = tmp_path / "a b?c#d%41&mode=memory"
        folder.mkdir()
        with Ledger.create(folder / "ledger.sqlite", new_campaign()) as ledger:
            ledger.add_program(new_program())
            assert len(ledger.programs()) == 1
        assert (folder / "ledger.sqlite").stat().st_size > 0

    def test_durability_settings(self, ledger: Ledger) -> None:
        ledger.add_program(new_program())
        connection = sqlite3.connect(ledger.path)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT version FROM schema_versions").fetchall() == [(2,)]
        assert connection.execute("SELECT * FROM budget").fetchall() == [(10, 0, 0, 10, 0)]
        connection.close()


class TestContentHash:
    def test_two_runs_that_differ_in_host_and_clock_only_have_one_hash(self, tmp_path: Path) -> None:
        hashes = []
        for number in range(2):
            with Ledger.create(tmp_path / f"{number}.sqlite", new_campaign()) as ledger:
                if number:
                    ledger.record_environment(device="cuda", versions={"torch": "9"})
                    ledger.record_llm_failure("turn-1/propose/0", model="m", error="503")
                play(ledger, wall_s=1.0 + number)
                hashes.append(ledger.content_hash())
        assert hashes[0] == hashes[1]

    def test_the_order_of_arrival_does_not_matter(self, tmp_path: Path) -> None:
        hashes = []
        for numbers in ((1, 2, 3), (3, 1, 2)):
            with Ledger.create(tmp_path / f"{numbers[0]}.sqlite", new_campaign()) as ledger:
                for number in numbers:
                    evaluate(ledger, candidate(ledger.add_program(new_program(number))), scored(float(number)))
                hashes.append(ledger.content_hash())
        assert hashes[0] == hashes[1]

    def test_one_bit_of_one_loss_changes_it(self, tmp_path: Path) -> None:
        hashes = set()
        for number, loss in enumerate((2.5, math.nextafter(2.5, 3.0))):
            with Ledger.create(tmp_path / f"{number}.sqlite", new_campaign()) as ledger:
                play(ledger, loss=loss)
                hashes.add(ledger.content_hash())
        assert len(hashes) == 2


def _insert_evaluation(path: Path, **changes: Any) -> None:
    row = {"id": "eval-x", "reserved_seq": 10**6, "kind": "candidate", "state": "reserved", "program_id": "prog-x"}
    row |= {"split": "search", "draw": 0, "seed": 0} | changes
    connection = sqlite3.connect(path)
    try:
        places = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO evaluations ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
    finally:
        connection.close()


def _select(path: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
