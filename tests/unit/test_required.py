"""The board of required edits over a real ledger: blocking, superseding, attempts, expiry, costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.required import EditBoard
from hypotheses.ledger import Ledger, Observation, Registration
from hypotheses.probe_kinds import AbsentProbe, KnockoutProbe, Place
from hypotheses.probes import ProbeEvidence, ProbeResult, ProbeStatus
from hypotheses.required_edits import MAX_REFUSED_TURNS, EditRecord, EditState, RequiredEdit
from hypotheses.verdicts import Verdict, VerdictStatus
from tests.ledger_builders import new_campaign, new_program, observe, register

EXECUTED = ProbeResult(status=ProbeStatus.EXECUTED, detail="14 of 14 layers changed")
IDLE = ProbeResult(status=ProbeStatus.NOT_EXECUTED, detail="0 of 14 layers changed")
UNDETERMINED = ProbeResult(status=ProbeStatus.UNDETERMINED, detail="the twin crashed")
DOWN = Place(roles=("down",))


def edit(kind: str = "extend", mechanism: str = "rotation", **changes: Any) -> RequiredEdit:
    probe = AbsentProbe(mechanism=mechanism) if kind == "remove" else KnockoutProbe(mechanism=mechanism)
    fields = {"kind": kind, "mechanism": mechanism, "cause": "error_averaging", "wording": "do it", "probe": probe}
    return RequiredEdit(**(fields | changes))


class Table:
    """A board with what its edits refer to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.board = EditBoard(ledger)
        self.observations: dict[int, tuple[Observation, Registration]] = {}

    def require(self, *edits: RequiredEdit, number: int = 1) -> tuple[EditRecord, ...]:
        if number not in self.observations:
            observation = observe(self.ledger, number=number)
            self.observations[number] = (observation, register(self.ledger, observation))
        observation, registration = self.observations[number]
        wanted = [(item, registration.hypotheses[1].id) for item in edits]
        return self.board.require(wanted, observation_id=observation.id, turn=number)

    def attempt(self, record: EditRecord, result: ProbeResult, *, number: int, worse: bool = False) -> EditRecord:
        program = self.ledger.add_program(new_program(number))
        return self.board.attempted(record, result, worse=worse, turn=number, program_id=program.id)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(budget=20)) as ledger:
        yield Table(ledger)


def test_an_edit_comes_back_as_it_was_required(table: Table) -> None:
    wanted = edit(place=DOWN, wording="carry it to the down projections")
    (record,) = table.require(wanted)
    assert record.edit == wanted
    assert record.blocks
    assert table.board.records() == table.board.open() == (record,)
    assert table.ledger.required_edits()[0].probe == wanted.probe.model_dump(mode="json")


def test_of_one_observation_only_the_first_edit_blocks_and_contradictions_are_left_out(table: Table) -> None:
    records = table.require(edit("extend"), edit("remove"), edit("refine", "branch", blocking=True))
    assert [(r.edit.kind, r.edit.mechanism, r.blocks) for r in records] == [
        ("extend", "rotation", True),
        ("refine", "branch", False),
    ]


def test_a_replay_requires_the_same_edits_and_changes_nothing(table: Table) -> None:
    first = table.require(edit(), edit("refine", "branch"))
    done = table.attempt(first[0], EXECUTED, number=5)
    path = table.ledger.path
    table.ledger.close()
    with Ledger.open(path) as ledger:
        again = Table(ledger)
        assert again.require(edit(), edit("refine", "branch")) == first
        assert again.board.open() == first, "what came later is not seen yet"
        assert again.attempt(first[0], EXECUTED, number=5) == done
        assert again.board.open() == first[1:]
        assert len(ledger.required_edits()) == 2


def test_one_claim_asked_for_twice_by_one_reply_is_taken_once(table: Table) -> None:
    records = table.require(edit(place=DOWN), edit(place=Place(roles=("o",)), wording="there as well"))
    assert [record.edit.place for record in records] == [DOWN]


def test_a_newer_blocking_edit_supersedes_the_older_one(table: Table) -> None:
    (older,) = table.require(edit("extend"))
    (other,) = table.require(edit("refine", "branch", blocking=False), number=2)
    (newer,) = table.require(edit("remove"), number=3)
    states = {record.key: record.state for record in table.board.records()}
    assert states == {older.key: EditState.SUPERSEDED, other.key: EditState.OPEN, newer.key: EditState.OPEN}
    assert [record.key for record in table.board.open()] == [newer.key, other.key], "the blocking one comes first"
    assert table.ledger.check_invariants() == []


def test_a_paid_run_that_executes_discharges(table: Table) -> None:
    (record,) = table.require(edit())
    after = table.attempt(record, EXECUTED, number=5)
    assert after.state is EditState.DISCHARGED
    assert table.board.open() == ()
    (stored,) = table.ledger.required_edits()
    assert (stored.state, stored.history[-1].turn) == ("discharged", 5)
    assert table.board.records() == (after,)


def test_an_executed_edit_that_costs_quality_is_closed_as_costly(table: Table) -> None:
    (record,) = table.require(edit())
    after = table.attempt(record, EXECUTED, number=5, worse=True)
    assert after.state is EditState.COSTLY
    assert table.board.records() == (after,)
    assert "14 of 14" in after.note


def test_three_paid_attempts_in_vain_let_it_expire(table: Table) -> None:
    (record,) = table.require(edit())
    for number, result in ((5, IDLE), (6, UNDETERMINED)):
        record = table.attempt(record, result, number=number)
        assert record.is_open
        (read,) = table.board.records()
        assert read == record, "what is read back is what was stored"
        assert read.paid_attempts == number - 4
        assert read.blocks
    record = table.attempt(record, IDLE, number=7)
    assert record.state is EditState.EXPIRED
    assert table.board.records() == (record,)
    assert [entry.state for entry in table.ledger.required_edits()[0].history] == [
        "open",
        "attempted",
        "attempted",
        "expired",
    ]


def test_an_attempt_after_others_in_vain_can_still_discharge(table: Table) -> None:
    (record,) = table.require(edit())
    record = table.attempt(record, IDLE, number=5)
    (read,) = table.board.open()
    after = table.attempt(read, EXECUTED, number=6)
    assert (after.state, after.paid_attempts) == (EditState.DISCHARGED, 2)
    assert table.board.records() == (after,)


def test_turns_refused_while_it_blocks_are_counted_noted_and_read_back(table: Table) -> None:
    (record,) = table.require(edit())
    for turn in range(5, 5 + MAX_REFUSED_TURNS):
        assert record.blocks
        after = table.board.refused(record, turn=turn)
        (record,) = table.board.records()
        assert record == after
    assert not record.blocks
    assert table.board.open() == (record,)
    notes = [note.text for note in table.ledger.notes()]
    assert notes == [f"{record.key} blocks no more and stays open: 3 turns ended without a program while it blocked"]
    assert table.ledger.check_invariants() == []
    assert table.attempt(record, IDLE, number=9).is_open


def test_a_probe_of_absence_is_told_by_code_what_must_be_gone(table: Table) -> None:
    forged = edit("remove", probe=AbsentProbe(mechanism="rotation", fingerprint="forged"))
    observation = observe(table.ledger, number=1)
    registration = register(table.ledger, observation)
    (record,) = table.board.require(
        [(forged, registration.hypotheses[1].id)],
        observation_id=observation.id,
        turn=1,
        incumbent=ProbeEvidence(
            fingerprints={"rotation": "f00d", "quantize": "beef"}, shapes={"rotation": "5ha9e", "quantize": "cafe"}
        ),
    )
    assert record.edit.probe == AbsentProbe(mechanism="rotation", fingerprint="f00d", shape="5ha9e", others=("beef",))


def test_what_the_incumbent_lacks_is_set_aside(table: Table) -> None:
    table.require(edit("extend"), edit("retest", "branch", cause="other"))
    assert [record.set_aside for record in table.board.open(["rotation"])] == [False, False]
    aside = {record.edit.kind: record.set_aside for record in table.board.open([])}
    assert aside == {"extend": True, "retest": False}
    assert not any(record.blocks for record in table.board.open([]))


def test_a_newer_verdict_closes_what_rests_on_the_opposite(table: Table) -> None:
    (record,) = table.require(edit("extend"))
    refuted = Verdict(
        rule="",
        hypothesis="h",
        mechanism="rotation",
        cause="Error-averaging",
        status=VerdictStatus.REFUTED,
        reason="",
        alpha=0.0,
        checks=(),
        survivors=(),
    )
    ((before, after),) = table.board.settled(refuted)
    assert before == record
    assert after.state is EditState.SUPERSEDED
    table.board.store(after, before=before, turn=7)
    assert table.board.open() == ()
    assert table.ledger.check_invariants() == []
