"""Explanations that the noise leaves nothing of are sent back with the reason, once, before any call."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypotheses.ledger import Ledger
from tests.played_campaigns import HALF, PlayedProposer, Rows, adding, explaining, play_campaign, substituting

GOOD: Rows = {"evenly": {"half": (0.4, 0.6)}, "attention": {"half": (0.85, 1.15)}}
TWINS: Rows = GOOD | {"twin": {"half": (0.42, 0.62)}}
BLURRED: Rows = {"evenly": {"half": (0.4, 0.6)}, "attention": {"half": (0.61, 0.9)}}
VACUOUS: Rows = GOOD | {"whatever": {"half": (-0.24, 1.24)}}


def played(folder: Path, *rows: Rows) -> tuple[Ledger, PlayedProposer]:
    proposer = PlayedProposer(
        proposals=(adding("boost", "attention", "0.2"),),
        explanations=tuple(explaining("boost", (HALF,), row) for row in rows),
    )
    return Ledger.open(play_campaign(folder, proposer), read_only=True), proposer


def refusals(ledger: Ledger) -> list[str]:
    return [proposal.reason for proposal in ledger.proposals(status="refused") if proposal.kind == "explanation"]


def test_a_prediction_that_the_noise_makes_vacuous_is_sent_back(tmp_path: Path) -> None:
    ledger, proposer = played(tmp_path, VACUOUS, GOOD)
    with ledger:
        (reason,) = refusals(ledger)
        assert reason.startswith(
            "Prediction of 'whatever' for 'half': [-0.24, 1.24] is vacuous: a measurement will be about"
        )
        assert proposer.asked_why[1].problems == tuple(reason.split("\n"))
        assert sorted(hypothesis.name for hypothesis in ledger.hypotheses()) == ["attention", "evenly"]
        assert len(ledger.evaluations(kind="control")) == 1


def test_rivals_that_are_the_same_within_the_noise_are_sent_back(tmp_path: Path) -> None:
    ledger, _ = played(tmp_path, TWINS, GOOD)
    with ledger:
        (reason,) = refusals(ledger)
        assert reason.startswith("Rivals 'evenly' and 'twin' predict the same within the noise: for no control")
        assert len(ledger.verdicts()) == 2


def test_a_repair_with_such_a_pair_is_taken_while_another_pair_parts(tmp_path: Path) -> None:
    ledger, _ = played(tmp_path, TWINS, TWINS)
    with ledger:
        repaired, extension = refusals(ledger)  # asked once more for a control that parts them, there was no answer
        assert repaired.startswith("Rivals 'evenly' and 'twin' predict the same")
        assert "so it is prose" in extension
        names = {hypothesis.id: hypothesis.name for hypothesis in ledger.hypotheses()}
        design = ledger.designs()[-1]
        assert [tuple(names[key] for key in pair) for pair in design.unseparated] == [("evenly", "twin")]
        assert {v.status for v in ledger.verdicts() if names[v.hypothesis_id] == "attention"} == {"refuted"}


def test_without_any_pair_that_parts_nothing_is_registered_and_no_call_spent(tmp_path: Path) -> None:
    ledger, _ = played(tmp_path, BLURRED, BLURRED)
    with ledger:
        assert len(refusals(ledger)) == 2
        assert ledger.hypotheses() == ledger.predictions() == ledger.controls() == ()
        assert ledger.evaluations(kind="control") == ()
        assert any(note.topic == "explanation" and "stays unexplained" in note.text for note in ledger.notes())


@pytest.mark.parametrize(
    ("one", "other", "refusal"),
    [
        ('0.2 if layer.role == "q" else 0.0', '0.0 if layer.role != "q" else 0.2', "it installs exactly what control 'one'"),
        ("0.2 if layer.block < 2 else 0.0", "0.2 if layer.block < 4 else 0.0", ""),
    ],
    ids=["the same everywhere", "the same in the first blocks"],
)  # fmt: skip
def test_controls_are_told_apart_by_what_they_install_on_the_whole_subject(
    tmp_path: Path, one: str, other: str, refusal: str
) -> None:
    controls = tuple(
        substituting("boost", "    return 0.2", f"    return {text}", key)
        for key, text in (("one", one), ("other", other))
    )
    rows: Rows = {
        "evenly": {"one": (0.2, 0.3), "other": (0.4, 0.6)},
        "attention": {"one": (0.8, 0.9), "other": (0.9, 1.1)},
    }
    proposer = PlayedProposer(
        proposals=(adding("boost", "attention", "0.2"),), explanations=(explaining("boost", controls, rows),)
    )
    with Ledger.open(play_campaign(tmp_path, proposer), read_only=True) as ledger:
        refused = [p.reason for p in ledger.proposals(status="refused") if p.kind == "explanation" and p.attempt == 0]
        registered = [control.name for control in ledger.controls()]
    assert ([refusal in reason for reason in refused], registered) == (
        ([True], []) if refusal else ([], ["one", "other"])
    ), refused
