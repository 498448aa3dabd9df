"""What the paid run and the trial of controls decide, in whole campaigns over a toy subject."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forge.proposers.base import ProposalRequest
from forge.replies import ConditionalEdit
from forge.required import EditBoard
from hypotheses.ledger import Ledger
from hypotheses.predictions import Control
from hypotheses.probe_kinds import AbsentProbe, KnockoutProbe
from hypotheses.required_edits import RequiredEdit
from tests.toy_campaign import ToyProposer, add, explanation, proposal, run_toy, substitute

BOOST = proposal(*add("boost", "    return 0.2"), claims=(("boost", "small"),))
HALF = substitute("half", "boost", "    return 0.2", '    return 0.2 if layer.role == "q" else 0.0')
ON_WHOLE = "session.num_blocks > 2"
TRUNCATED = "session.num_blocks <= 2"
FINER = KnockoutProbe(mechanism="finer")


def first_turn(text: str) -> Callable[[ProposalRequest], str | None]:
    return lambda request: text if request.turn == 1 and request.attempt == 0 else None


def refusals(ledger: Ledger, kind: str = "candidate") -> list[tuple[str, str]]:
    return [(row.stage, row.reason) for row in ledger.proposals(status="refused") if row.kind == kind]


def calls(ledger: Ledger, kind: str) -> int:
    return sum(evaluation.kind == kind for evaluation in ledger.evaluations())


def notes(ledger: Ledger, topic: str) -> list[str]:
    return [note.text for note in ledger.notes() if note.topic == topic]


def test_a_sound_mechanism_is_explained(tmp_path: Path) -> None:
    ledger = run_toy(tmp_path, ToyProposer(first_turn(BOOST), lambda request: explanation(HALF)))
    assert refusals(ledger) == refusals(ledger, "explanation") == []
    assert {row.status for row in ledger.verdicts()} == {"supported", "refuted"}
    assert calls(ledger, "control") == 1


def test_one_that_acts_beyond_the_truncated_subject_only_is_evaluated_and_explained(tmp_path: Path) -> None:
    late = proposal(*add("boost", "    return 0.2 if layer.block >= 2 else 0.0"), claims=(("boost", "small"),))
    # The control keeps the later blocks, so on the truncated subject it is what parent and child are there.
    half = substitute("half", "boost", "    return 0.2 if layer.block >= 2 else 0.0",
                      "    return 0.2 if layer.block >= 6 else 0.0")  # fmt: skip
    ledger = run_toy(tmp_path, ToyProposer(first_turn(late), lambda request: explanation(half)))
    assert refusals(ledger) == refusals(ledger, "explanation") == []
    assert {row.status for row in ledger.verdicts()} == {"supported", "refuted"}


@pytest.mark.parametrize(
    ("edits", "stage", "words"),
    [
        (
            add("boost", "    return 0.0", neutral="    return -0.5"),
            "neutral",
            "does not install what its parent installs",
        ),
        (
            add("boost", "    if False:\n        return 0.3\n    return 0.0"),
            "execution",
            "the run on the whole subject",
        ),
        (add("boost", "    return 0.2", call="boost(session, layer) * 0"), "execution", "'boost' does not execute"),
        (add("boost", "    return 0.2", call="0.1 + boost(session, layer)"), "neutral", "8 of 8 layers differ"),
        (
            add("boost", "    return 0.0", neutral=f"    return -0.5 if {ON_WHOLE} else 0.0"),
            "neutral",
            "the run on the whole subject does not install what its parent installs: 32 of 32",
        ),
    ],
    ids=["a harmful neutral", "if False", "thrown away", "something beside it", "harmful on the whole subject"],
)
def test_what_does_nothing_is_refused_before_any_call(
    tmp_path: Path, edits: tuple[tuple[str, str], ...], stage: str, words: str
) -> None:
    ledger = run_toy(tmp_path, ToyProposer(first_turn(proposal(*edits, claims=(("boost", "small"),)))))
    ((refused_at, reason),) = refusals(ledger)
    assert (refused_at, words in reason) == (stage, True), reason
    assert calls(ledger, "candidate") == calls(ledger, "confirmation") == 0


def test_one_idle_on_the_whole_subject_is_named_and_not_explained(tmp_path: Path) -> None:
    """It acts in the smoke run; the gain comes from elsewhere, in later blocks, and is kept as a gain."""
    edits = add("boost", f"    return 0.2 if {TRUNCATED} else 0.0",
                call="boost(session, layer) + (0.2 if layer.block >= 2 else 0.0)")  # fmt: skip
    proposer = ToyProposer(
        first_turn(proposal(*edits, claims=(("boost", "small"),))), lambda request: explanation(HALF)
    )
    ledger = run_toy(tmp_path, proposer)
    assert calls(ledger, "candidate") == 1
    assert proposer.asked_why == []
    assert ledger.observations() == ledger.hypotheses() == ()
    (note,) = notes(ledger, "execution")
    assert note.startswith(
        "the effect cannot be laid to 'boost': with 'boost' at the neutral the run on the whole subject"
    )


def test_of_two_mechanisms_the_idle_one_is_not_explained(tmp_path: Path) -> None:
    both = (
        *add("boost", "    return 0.2"),
        *add("idle", f"    return 0.2 if {TRUNCATED} else 0.0", before=("boost",)),
    )
    proposer = ToyProposer(
        first_turn(proposal(*both, claims=(("boost", "small"), ("idle", "magic")))),
        lambda request: explanation(
            HALF_ALONE, mechanisms=("boost", "idle") if request.attempt == 0 else ("boost", "boost")
        ),
    )
    ledger = run_toy(tmp_path, proposer)
    (note,) = notes(ledger, "execution")
    assert (
        note == "'idle' is not executed: with its neutral in its place the run on the whole subject installs the same"
    )
    assert [(request.mechanisms_added, request.claims) for request in proposer.asked_why] == [
        (("boost",), (("boost", "small"),))
    ] * 2
    ((_, reason),) = refusals(ledger, "explanation")
    assert reason.startswith("Hypothesis 'big' is about mechanism 'idle', which does not execute: with its neutral")
    assert {row.mechanism for row in ledger.hypotheses()} == {"boost"}


HALF_ALONE = substitute(
    "half",
    "boost",
    "def boost(session, layer):\n    return 0.2\n",
    'def boost(session, layer):\n    return 0.2 if layer.role == "q" else 0.0\n',
)


def test_a_neutral_that_harms_beside_another_mechanism_shows(tmp_path: Path) -> None:
    both = (
        *add("boost", "    return 0.2"),
        (
            'MECHANISMS = ("boost",)',
            'MECHANISMS = ("boost", "twist")\n\n\ndef twist(total):\n    return total\n\n\n'
            "def without_twist(total):\n    return total - 1 if total else total",
        ),  # fmt: skip
        (
            "    total += boost(session, layer)\n    return total",
            "    total += boost(session, layer)\n    return twist(total)",
        ),
    )
    ledger = run_toy(
        tmp_path, ToyProposer(first_turn(proposal(*both, claims=(("boost", "small"), ("twist", "magic")))))
    )
    ((stage, reason),) = refusals(ledger)
    assert stage == "execution"
    assert reason.startswith("Mechanism 'twist' does not execute: without 'boost', which the edit brings too")


def test_a_required_edit_is_not_discharged_through_a_neutral_that_harms_on_the_whole_subject(tmp_path: Path) -> None:
    """The second mechanism acts on the truncated subject; on the whole one only its neutral does anything."""
    wish = ConditionalEdit(
        hypothesis="small",
        verdict="supported",
        edit=RequiredEdit(kind="refine", mechanism="boost", cause="small", part="finer", wording="finer", probe=FINER),
    )

    def propose(request: ProposalRequest) -> str | None:
        if request.turn == 1:
            return BOOST
        if request.turn > 2 or request.attempt:
            return None
        edits = add("finer", f"    return 0.1 if {TRUNCATED} else 0.0",
                    neutral=f"    return -0.1 if {ON_WHOLE} else 0.0", before=("boost",))  # fmt: skip
        return proposal(*edits, claims=(("finer", "fine"),), discharges=tuple(r.key for r in request.open_edits))

    ledger = run_toy(tmp_path, ToyProposer(propose, lambda request: explanation(HALF, wishes=(wish,))))
    assert calls(ledger, "candidate") == 2
    (record,) = EditBoard(ledger).records()
    assert (record.state.value, record.paid_attempts) == ("open", 1)
    paid = [row for row in ledger.probe_results() if row.target_id == record.key and not row.provisional]
    assert [row.status for row in paid] == ["not_executed"]
    assert "at the neutral the run on the whole subject does not install what its parent installs" in paid[0].detail


def explained_badly(tmp_path: Path, bad: str, good: str) -> tuple[Ledger, ToyProposer]:
    proposer = ToyProposer(first_turn(BOOST), lambda request: good if request.attempt else bad)
    return run_toy(tmp_path, proposer), proposer


EVERYTHING = Control(key="nothing_left", kind="knockout", removes=("boost",))
SAME = substitute("same", "boost", "    return 0.2", "    value = 0.2\n    return value")
OTHER = substitute("other", "boost", "    total = 0.0", "    total = 0.1")
CRASHES = substitute("crashes", "boost", "    return 0.2", "    return 0.2 / 0")
UNKNOWN = Control(key="unknown", kind="knockout", removes=("swirl",))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            EVERYTHING,
            "control 'nothing_left' cannot be used: it installs exactly what the parent installs, on the whole subject",
        ),
        (SAME, "control 'same' cannot be used: it installs exactly what the child installs, on the whole subject"),
        (OTHER, "control 'other' does not do what it says: 'boost' is still there as it was"),
        (CRASHES, "control 'crashes' cannot be used: its smoke run ended so: crashed"),
        (UNKNOWN, "'swirl' is no mechanism of the program"),
    ],
    ids=lambda value: value.key if isinstance(value, Control) else "",
)
def test_any_bad_control_is_refused_once_with_its_reason(tmp_path: Path, bad: Control, words: str) -> None:
    """Beside a good one, which alone would do."""
    ledger, proposer = explained_badly(tmp_path, explanation(HALF, bad), explanation(HALF))
    ((stage, reason),) = refusals(ledger, "explanation")
    assert stage == "explanation"
    assert words in reason
    assert [request.problems for request in proposer.asked_why] == [(), tuple(reason.split("\n"))]
    assert [control.name for control in ledger.controls()] == ["half"]
    assert calls(ledger, "control") == 1


def test_a_bad_control_twice_leaves_the_observation_unexplained_and_nothing_half_registered(tmp_path: Path) -> None:
    renamed = SAME.model_copy(update={"key": "same_again"})
    ledger, _ = explained_badly(tmp_path, explanation(HALF, SAME), explanation(HALF, renamed))
    assert len(refusals(ledger, "explanation")) == 2
    assert ledger.hypotheses() == ledger.controls() == ledger.verdicts() == ()
    assert calls(ledger, "control") == 0
    assert len(ledger.observations()) == 1
    assert "'same_again' cannot be used" in notes(ledger, "explanation")[0]


def test_a_hypothesis_about_a_mechanism_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ledger, _ = explained_badly(tmp_path, explanation(HALF, mechanisms=("boost", "ghost")), explanation(HALF))
    ((_, reason),) = refusals(ledger, "explanation")
    assert reason == "Hypothesis 'big' is about mechanism 'ghost', which neither program has; they have: 'boost'."
    assert {row.mechanism for row in ledger.hypotheses()} == {"boost"}


def test_a_probe_of_what_is_to_go_names_what_is_there(tmp_path: Path) -> None:
    wish = ConditionalEdit(
        hypothesis="small",
        verdict="refuted",
        edit=RequiredEdit(
            kind="replace", mechanism="boost", cause="small", wording="w", probe=AbsentProbe(mechanism="ghost")
        ),
    )
    ledger, _ = explained_badly(tmp_path, explanation(HALF, wishes=(wish,)), explanation(HALF))
    ((_, reason),) = refusals(ledger, "explanation")
    assert reason.endswith(", required edit: the probe is about 'ghost', the edit about 'boost'.")
