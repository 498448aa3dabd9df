"""What a ledger promises to the campaign that writes it: idempotent steps, replay, honest values, a stable hash."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from hypotheses.ledger import (
    Ledger,
    LedgerConflict,
    LedgerNotFound,
    LedgerRefused,
    LedgerValueError,
    NewErrorMap,
    NewIncumbent,
    NewLlmCall,
    NewNote,
    NewProposal,
    NewRequiredEdit,
    Settlement,
)
from tests.ledger_builders import (
    candidate,
    evaluate,
    new_campaign,
    new_program,
    observe,
    play,
    predictions,
    register,
    scored,
)


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

    def test_any_writer_may_be_the_first_of_an_opening(self, path: Path) -> None:
        Ledger.create(path, new_campaign()).close()
        with Ledger.open(path) as ledger:
            ledger.record_environment(device="cpu", versions={})
        with Ledger.open(path) as ledger:
            ledger.record_llm_failure("a", model="m", error="503")
        with Ledger.open(path, read_only=True) as reader:
            assert (len(reader.environments()), reader.llm_spend().num_failures) == (1, 1)


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
