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
from tests.fake_campaigns import (
    BOOST,
    FakeProposer,
    Played,
    add,
    blocks_of,
    explain_boost,
    keep_one_role,
    play,
    proposal,
    wish,
)

FAILS = (-0.9, -0.4)
"""A prediction of the control that it does not keep."""
BESIDE = (0.2, 0.6)
"""A prediction that it keeps as well as that of `small`: then neither is supported, and nothing blocks."""
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
    rivals: dict[str, tuple[float, float]] | None = None,
    **options: Any,
) -> Played:
    """Play BOOST in turn 1 and what `then` answers up to turn `last`; by default `small` is supported, `big` refuted."""

    def proposals(request: ProposalRequest) -> str | None:
        if request.turn == 1:
            return BOOST
        return then(request) if request.turn <= last else None

    explain = explain_boost(*wishes, **(rivals or {}))
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
@pytest.mark.parametrize(
    ("edits", "claims", "stage", "words"),
    [
        (
            add("other", "    return 0.01", present=("boost",)),
            [("other", "else")],
            "probe",
            "'boost' has the code that it has in the incumbent",
        ),
        (
            [("    total = 0.0", "    total = 0.0001")],
            [],
            "neutral",
            "does not install what its parent without 'boost' installs",
        ),
        (
            [("    total = 0.0", "    total = 0.0001"), ("    return 0.2", "    return 0.2 + 0")],
            [("boost", "small")],
            "neutral",
            "does not install what its parent without 'boost' installs",
        ),
    ],
    ids=["another mechanism", "outside mechanisms", "outside it, and the same in other words"],
)
def test_an_unrelated_change_does_not_build_on_a_mechanism(
    tmp_path: Path, kind: str, edits: list[tuple[str, str]], claims: list[tuple[str, str]], stage: str, words: str
) -> None:
    """A knockout of what is there holds for any program that merely keeps it."""

    def unrelated(request: ProposalRequest) -> str:
        return proposal(edits, claims=claims, discharges=keys(request))

    def bigger(request: ProposalRequest) -> str:
        claims = [("boost", "small")]
        return proposal([("    return 0.2", "    return 0.25")], claims=claims, discharges=keys(request))

    played = walk(
        tmp_path,
        lambda request: unrelated(request) if request.attempt == 0 else bigger(request),
        wish(kind, probe=KnockoutProbe(mechanism="boost")),
    )
    (refusal,) = played.refusals()
    assert refusal[:2] == (2, stage)
    assert words in refusal[2]
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
    """Return a proposal with `boost` as `push`, and a mechanism beside it, so that it is no duplicate."""
    nudge = "def nudge(session, layer):\n    return 0.001 * (layer.block + 1)"
    neutral = "def without_nudge(session, layer):\n    return 0.0"
    edits = [
        ('MECHANISMS = ("boost",)', f'MECHANISMS = ("push", "nudge")\n\n\n{nudge}\n\n\n{neutral}'),
        ("def boost(session, layer):\n    return 0.2", f"def push(session, layer):\n{body}"),
        ("def without_boost(session, layer):", "def without_push(session, layer):"),
        ("    total += boost(session, layer)", "    total += push(session, layer) + nudge(session, layer)"),
    ]
    claims = [("push", cause)] if cause else []
    return proposal(edits, claims=[*claims, ("nudge", "tiny")], discharges=discharges)


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
    played = walk(tmp_path, lambda request: renamed_boost(body, cause, []), rivals={"beside": BESIDE})
    refusals = played.refusals()
    assert [turn for turn, _, _ in refusals] == [2, 2]
    assert all(got == stage and words in reason for _, got, reason in refusals), refusals
    assert played.candidates() == ["boost"]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("    return 0.2", "other"),
        ("    return 0.23", "big"),
        # On the truncated subject alone it installs what the refuted one installs.
        ("    return 0.2 if layer.block < 2 else 0.3", "big"),
    ],
)
def test_another_cause_or_what_installs_something_else_is_no_refuted_claim(
    tmp_path: Path, body: str, cause: str
) -> None:
    played = walk(tmp_path, lambda request: renamed_boost(body, cause, []), rivals={"beside": BESIDE})
    assert played.refusals() == []
    assert played.candidates() == ["boost", "push + nudge"]


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
        if request.turn == 1:
            return explain_boost(retest)
        # Against 0.2 everywhere the control loses, which small foretells now. The first answer leaves out the control that was
        # brought, the second lists it beside its own.
        text = explain_boost(retest, small=(-0.9, -0.1)).replace("    return 0.2\n", "    return 0.4\n", 1)
        text = text.replace("return 0.2 if", "return 0.4 if")
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


def test_a_brought_control_that_cannot_be_used_is_not_asked_for_again(tmp_path: Path) -> None:
    """No explanation could hold it: listed it is refused, left out it is missing."""
    retest = wish("retest", "refuted", "big", probe=KnockoutProbe(mechanism="boost"))

    def again(request: ProposalRequest) -> str:
        crashes = Control(
            key="crashes",
            kind="substitute",
            removes=("boost",),
            edits=blocks_of(("    return 0.4", "    return 0.4 / 0")),
        )
        edits = [("    return 0.2", "    return 0.4")]
        return proposal(edits, claims=[("boost", "big")], discharges=keys(request)[:1], controls=[crashes])

    def explain(request: ExplanationRequest) -> str:
        if request.turn == 1:
            return explain_boost(retest)
        return explain_boost(retest, small=(-0.9, -0.1)).replace("    return 0.2", "    return 0.4")

    proposer = FakeProposer(
        lambda request: BOOST if request.turn == 1 else again(request) if request.turn == 2 else None, explain
    )
    played = play(tmp_path, proposer, budget=14)
    assert played.refusals("explanation") == []
    (asked,) = [request for request in proposer.asked_why if request.turn == 2]
    assert (asked.retested, asked.brought_controls) == ((("boost", "big"),), ())
    assert any(
        "'crashes', which the proposal brought for a retest, cannot be used" in n.text for n in played.ledger.notes()
    )
    assert played.edits()[0].note == "judged again: refuted"


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


@pytest.mark.parametrize(
    ("ranges", "statuses"),
    [
        ({"small": FAILS, "big": (0.0, 0.4)}, ["supported", "refuted"]),
        ({"small": FAILS, "big": (0.8, 1.2)}, ["inconclusive", "inconclusive"]),
    ],
    ids=["the claimed cause is refuted", "every prediction fails"],
)
def test_the_incumbent_stays_the_base_whatever_becomes_of_its_explanation(
    tmp_path: Path, ranges: dict[str, tuple[float, float]], statuses: list[str]
) -> None:
    """Where every prediction fails, none of these causes is the one; nothing is barred and nothing blocks."""
    proposer = FakeProposer(
        lambda request: BOOST if request.turn == 1 else None,
        lambda request: explain_boost(**ranges),
    )
    played = play(tmp_path, proposer)
    hypotheses = {row.id: row.cause for row in played.ledger.hypotheses()}
    found = {hypotheses[verdict.hypothesis_id]: verdict.status for verdict in played.ledger.verdicts()}
    assert [found["big"], found["small"]] == statuses
    second = proposer.asked[-1]
    assert second.turn == 2
    assert "def boost(session, layer):" in second.incumbent_source
    best = played.ledger.incumbent()
    assert best is not None
    assert played.ledger.program(best.program_id).source == second.incumbent_source
    decided = "supported" in statuses
    assert [claim.cause for claim in second.barred_claims] == (["small"] if decided else [])
    assert any(record.blocks for record in second.open_edits) is decided


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
