"""Required edits and barred claims in whole campaigns: they bite, and they never leave a campaign without a way on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.proposers.base import ExplanationRequest, ProposalRequest
from forge.replies import ConditionalEdit
from hypotheses.predictions import Control
from hypotheses.probe_kinds import AbsentProbe, ArtifactProbe, KnockoutProbe, Place
from hypotheses.required_edits import EditState
from tests.fake_campaigns import BOOST, FakeProposer, Played, add, explain_boost, keep_one_role, play, proposal, wish

REFUTED = (-0.9, -0.4)
"""A prediction of the control that it does not keep: all rivals are refuted then, and nothing blocks."""
BLOCK_5 = Place(blocks=(5,))
GOES_ON = ("over", "all evaluator calls are spent", "the last evaluator call is kept to measure the best program again")


def keys(request: ProposalRequest) -> list[str]:
    return [record.key for record in request.open_edits]


def finer(request: ProposalRequest, body: str, *, discharges: bool = True) -> str:
    edits = add("finer", body, present=("boost",))
    return proposal(edits, claims=[("finer", "fine")], discharges=keys(request) if discharges else ())


def walk(
    folder: Path,
    then: Callable[[ProposalRequest], str | None],
    *wishes: ConditionalEdit,
    last: int = 2,
    small: tuple[float, float] = (0.0, 0.4),
    **options: Any,
) -> Played:
    """Play BOOST in turn 1 and what `then` answers up to turn `last`; by default `small` is supported, `big` refuted."""

    def proposals(request: ProposalRequest) -> str | None:
        if request.turn == 1:
            return BOOST
        return then(request) if request.turn <= last else None

    explain = explain_boost(*wishes, small=small)
    proposer = FakeProposer(proposals, lambda request: explain if request.turn == 1 else "no idea")
    played = play(folder, proposer, **options)
    assert played.ledger.check_invariants() == []
    return played


# What does not discharge


def test_three_paid_crashes_let_an_edit_expire(tmp_path: Path) -> None:
    def late_crash(request: ProposalRequest) -> str:
        return finer(request, f"    return 0.0{request.turn} / (session.num_blocks <= 2)")

    played = walk(tmp_path, late_crash, wish(), last=5)
    (record,) = played.edits()
    assert (record.state, record.paid_attempts) == (EditState.EXPIRED, 3)
    assert "crashed" in record.note
    assert played.candidates().count("finer") == 4, "three pay for the expiry, and then it binds no more"
    kinds = [(probe.status, probe.provisional) for probe in played.ledger.probe_results(target_id=record.key)]
    assert kinds.count(("undetermined", False)) == 3


@pytest.mark.parametrize("kind", ["refine", "extend"])
def test_an_unrelated_change_does_not_build_on_a_mechanism(tmp_path: Path, kind: str) -> None:
    """A knockout of what is there holds for any program that merely keeps it."""

    def unrelated(request: ProposalRequest) -> str:
        return proposal([("    total = 0.0", "    total = 0.0001")], discharges=keys(request))

    def bigger(request: ProposalRequest) -> str:
        claims = [("boost", "small")]
        return proposal([("    return 0.2", "    return 0.25")], claims=claims, discharges=keys(request))

    played = walk(
        tmp_path,
        lambda request: unrelated(request) if request.attempt == 0 else bigger(request),
        wish(kind, probe=KnockoutProbe(mechanism="boost")),
    )
    (refusal,) = played.refusals()
    assert refusal[:2] == (2, "probe")
    assert "'boost' has the code that it has in the incumbent" in refusal[2]
    assert [(record.edit.kind, record.state) for record in played.edits()] == [("refine", EditState.DISCHARGED)]
    notes = [note.text for note in played.ledger.notes() if note.topic == "required edit"]
    assert any("its probe holds for the incumbent already" in note for note in notes) == (kind == "extend")


def test_what_shows_on_the_truncated_subject_alone_does_not_discharge(tmp_path: Path) -> None:
    def shy(request: ProposalRequest) -> str:
        return finer(request, "    return 0.1 if session.num_blocks <= 2 else 0.0")

    played = walk(tmp_path, shy, wish())
    (record,) = played.edits()
    assert (record.state, record.paid_attempts) == (EditState.OPEN, 1)
    statuses = [(p.provisional, p.status) for p in played.ledger.probe_results(target_id=record.key)]
    assert statuses == [(True, "executed"), (False, "not_executed")]


def renamed_boost(body: str, cause: str | None, discharges: list[str]) -> str:
    edits = [
        ('MECHANISMS = ("boost",)', 'MECHANISMS = ("push",)'),
        ("def boost(session, layer):\n    return 0.2", f"def push(session, layer):\n{body}"),
        ("def without_boost(session, layer):", "def without_push(session, layer):"),
        ("    total += boost(session, layer)", "    total += push(session, layer)"),
        ("    total = 0.0", "    total = 0.001"),
    ]
    return proposal(edits, claims=[("push", cause)] if cause else [], discharges=discharges)


def test_another_name_does_not_remove_a_mechanism(tmp_path: Path) -> None:
    played = walk(
        tmp_path,
        lambda request: renamed_boost("    return 0.2", "other", keys(request)),
        wish("remove", "refuted", "big", probe=AbsentProbe(mechanism="boost")),
    )
    stages = {(stage, reason) for _, stage, reason in played.refusals()}
    assert {stage for stage, _ in stages} == {"probe"}
    assert all("'push' is the same mechanism under another name" in reason for _, reason in stages)
    assert played.edits()[0].is_open


@pytest.mark.parametrize(
    ("body", "cause", "stage", "words"),
    [
        ("    return 0.2", "big", "barred claim", "'push' acts through 'big' stands refuted (as 'boost')"),
        ("    return 0.2 + 0", "big", "barred claim", "'push' acts through 'big' stands refuted (as 'boost')"),
        ("    gain = 0.2\n    return gain", "big", "barred claim", "stands refuted (as 'boost')"),
        ("    return 0.2 + 0", None, "mechanisms", "Mechanism 'push' is added or altered without a claim"),
    ],
)
def test_a_refuted_claim_is_refused_before_any_call_whatever_its_name_and_code(
    tmp_path: Path, body: str, cause: str | None, stage: str, words: str
) -> None:
    played = walk(tmp_path, lambda request: renamed_boost(body, cause, []), small=REFUTED)
    refusals = played.refusals()
    assert [turn for turn, _, _ in refusals] == [2, 2]
    assert all(got == stage and words in reason for _, got, reason in refusals), refusals
    assert played.candidates() == ["boost"]


@pytest.mark.parametrize(("body", "cause"), [("    return 0.2", "other"), ("    return 0.23", "big")])
def test_another_cause_or_what_installs_something_else_is_no_refuted_claim(
    tmp_path: Path, body: str, cause: str
) -> None:
    played = walk(tmp_path, lambda request: renamed_boost(body, cause, []), small=REFUTED)
    assert played.refusals() == []
    assert played.candidates() == ["boost", "push"]


# What closes an edit


def test_an_executed_edit_that_loses_beyond_the_noise_is_costly_and_the_incumbent_stays(tmp_path: Path) -> None:
    played = walk(tmp_path, lambda request: finer(request, "    return -0.1"), wish())
    assert played.edits()[0].state is EditState.COSTLY
    titles = [played.ledger.program(row.program_id).title for row in played.ledger.incumbents()]
    assert titles == ["rtn", "boost"]


def test_a_sharp_loss_inside_the_noise_floor_is_no_cost(tmp_path: Path) -> None:
    played = walk(tmp_path, lambda request: finer(request, "    return -0.01"), wish(), luck=0.0004, floor=0.02)
    assert played.edits()[0].state is EditState.DISCHARGED


def test_a_retest_is_settled_by_a_verdict_and_by_no_run(tmp_path: Path) -> None:
    """Turn 2 changes the mechanism too little to be explained; turn 3 enough, and its verdict settles the retest."""
    retest = wish("retest", "refuted", "big", probe=KnockoutProbe(mechanism="boost"))

    def proposals(request: ProposalRequest) -> str | None:
        if request.turn == 1:
            return BOOST
        if request.turn > 3:
            return None
        to = "0.2001" if request.turn == 2 else "0.4"
        edits = [("    return 0.2", f"    return {to}")]
        control = keep_one_role(to, "up", "sharper")
        return proposal(edits, claims=[("boost", "big")], discharges=keys(request)[:1], controls=[control])

    def explain(request: ExplanationRequest) -> str:
        text = explain_boost(retest)
        if request.turn == 1:
            return text
        # The first answer leaves out the control that was brought, the second lists it beside its own.
        text = text.replace("    return 0.2\n", "    return 0.4\n", 1).replace("return 0.2 if", "return 0.4 if")
        return text.replace('layer.role == "q"', 'layer.role == "up"') if request.attempt else text

    proposer = FakeProposer(proposals, explain)
    played = play(tmp_path, proposer, budget=14)
    first = played.edits()[0]
    history = played.ledger.required_edits()
    states = [entry.state for edit in history if edit.id == first.key for entry in edit.history]
    assert states == ["open", "attempted", "discharged"]
    assert first.note == "judged again: refuted"
    assert played.ledger.check_invariants() == []
    explained = [request for request in proposer.asked_why if request.turn == 3]
    assert explained[0].retested == (("boost", "big"),)
    assert [control.key for control in explained[0].brought_controls] == ["sharper"]
    assert 'layer.role == "up"' in explained[0].prompt
    assert explained[1].problems == (
        "Control 'sharper', which the proposal brought for the retest, is missing; list it with its edits.",
    )


@pytest.mark.parametrize(
    ("claim", "controls", "words"),
    [
        ("big", (), "bring a sharper control of it, under '## Controls'"),
        ("other", (keep_one_role("0.4", "up"),), "claim it under Mechanisms, '- boost: big | ...'"),
        ("big", (keep_one_role("0.2"),), "bring a sharper control of it ("),
        (
            "big",
            (keep_one_role("0.4").model_copy(update={"removes": ("gone",)}),),
            "bring a sharper control of it, under",
        ),
    ],
)
def test_a_retest_takes_a_claim_and_a_control(
    tmp_path: Path, claim: str, controls: tuple[Control, ...], words: str
) -> None:
    def again(request: ProposalRequest) -> str:
        edits = [("    return 0.2", "    return 0.4")]
        return proposal(edits, claims=[("boost", claim)], discharges=keys(request)[:1], controls=controls)

    retest = wish("retest", "refuted", "big", probe=KnockoutProbe(mechanism="boost"))
    played = walk(tmp_path, again, retest)
    assert {stage for _, stage, _ in played.refusals()} == {"required edit"}
    assert all(words in reason for _, _, reason in played.refusals()), played.refusals()
    assert played.candidates() == ["boost"]


# What is required where nobody words it


def test_verdicts_require_something_where_the_proposer_words_nothing(tmp_path: Path) -> None:
    played = walk(tmp_path, lambda request: None)
    (record,) = played.edits()
    assert (record.edit.kind, record.edit.mechanism, record.blocks) == ("refine", "boost", True)
    assert "acts at everywhere already" in record.edit.wording


# No deadlock


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        pytest.param(
            wish(), lambda request: finer(request, f"    return 0.0{request.turn}", discharges=False), id="lazy"
        ),
        pytest.param(
            wish(probe=ArtifactProbe(property="bits", comparison="<", value=1.0)),
            lambda request: proposal(
                [("    return 0.2", f"    return 0.2{request.turn}")],
                claims=[("boost", "small")],
                discharges=[record.key for record in request.open_edits if record.blocks],
            ),
            id="impossible",
        ),
        pytest.param(
            wish("remove", "refuted", "big", probe=AbsentProbe(mechanism="boost")),
            lambda request: finer(request, f"    return 0.0{request.turn}", discharges=False),
            id="contradictory",
        ),
    ],
)
def test_an_edit_that_is_not_carried_out_gives_way(
    tmp_path: Path, wanted: ConditionalEdit, answer: Callable[[ProposalRequest], str]
) -> None:
    played = walk(tmp_path, answer, wanted, last=5, max_consecutive_refusals=1)
    assert not played.ending.failed
    assert played.ending.reason in GOES_ON
    (record,) = played.edits()
    assert record.is_open
    assert not record.blocks
    assert record.refused_turns == 3
    assert len(played.candidates()) == 2, "turns 2 to 4 were refused, turn 5 was paid for"
    assert any("blocks no more and stays open" in note.text for note in played.ledger.notes())


def test_an_edit_beyond_the_truncated_subject_is_left_to_the_paid_run(tmp_path: Path) -> None:
    wanted = wish("extend", part="finer", place=BLOCK_5, probe=KnockoutProbe(mechanism="finer", place=BLOCK_5))
    played = walk(tmp_path, lambda request: finer(request, "    return 0.1 if layer.block >= 2 else 0.0"), wanted)
    assert played.refusals() == []
    assert played.edits()[0].state is EditState.DISCHARGED


def test_a_proposer_without_a_program_still_ends_the_campaign(tmp_path: Path) -> None:
    played = walk(tmp_path, lambda request: "I have no idea.", wish(), last=99, max_consecutive_refusals=2)
    assert played.ending.failed
    assert played.ending.reason == "2 turns in a row ended without a program to evaluate"


def test_a_repair_may_keep_the_code_and_drop_the_discharge(tmp_path: Path) -> None:
    """What was refused for a claim or a discharge alone has not been tried."""
    replaced = wish("replace", "refuted", "big", part="other", probe=KnockoutProbe(mechanism="other"))

    def answer(request: ProposalRequest) -> str:
        wanted = [record.key for record in request.open_edits if request.attempt == 0 or record.blocks]
        edits = add("finer", "    return 0.1", present=("boost",))
        return proposal(edits, claims=[("finer", "fine")], discharges=wanted)

    played = walk(tmp_path, answer, wish(), replaced)
    assert [(turn, stage) for turn, stage, _ in played.refusals()] == [(2, "probe")]
    assert played.candidates() == ["boost", "finer"]
    assert [record.state for record in played.edits()] == [EditState.DISCHARGED, EditState.OPEN]


# The incumbent and its branches


def test_the_incumbent_stays_the_base_when_every_explanation_of_it_is_refuted(tmp_path: Path) -> None:
    proposer = FakeProposer(
        lambda request: BOOST if request.turn == 1 else None,
        lambda request: explain_boost(small=REFUTED),
    )
    played = play(tmp_path, proposer)
    assert [verdict.status for verdict in played.ledger.verdicts()] == ["refuted", "refuted"]
    second = proposer.asked[-1]
    assert second.turn == 2
    assert "def boost(session, layer):" in second.incumbent_source
    best = played.ledger.incumbent()
    assert best is not None
    assert played.ledger.program(best.program_id).source == second.incumbent_source
    assert not any(record.blocks for record in second.open_edits)


def test_a_claim_refuted_on_one_branch_binds_the_other(tmp_path: Path) -> None:
    """Two drafts of the seed run side by side; the second is promoted over the first, whose claim was refuted."""

    def proposals(request: ProposalRequest) -> str | None:
        if request.turn == 1:
            return BOOST
        if request.turn == 2:
            return proposal(add("other", "    return 0.5"), claims=[("other", "third")])
        if request.turn > 3:
            return None
        edits = add("push", "    return 0.2 + 0", present=("other",))
        return proposal(edits, claims=[("push", "big")])

    proposer = FakeProposer(proposals, lambda request: explain_boost(wish()) if request.turn == 1 else "no idea")
    played = play(tmp_path, proposer, workers=2, max_turns=4)
    last = proposer.asked[-1]
    third = next(request for request in proposer.asked if request.turn == 3)
    assert "def boost" not in third.incumbent_source
    assert "def other" in third.incumbent_source
    assert [stage for turn, stage, _ in played.refusals() if turn == 3] == ["barred claim", "barred claim"]
    (record,) = third.open_edits
    assert record.edit.blocking
    assert not record.blocks, "the incumbent of this branch has no boost to refine"
    assert last.turn == 4
    assert played.candidates() == ["boost", "other"]
