"""Rivals that nothing separates: one more control may be asked for, before any has run, and nothing registered changes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from forge.cli.campaigns import print_summary
from forge.extending import extend
from forge.proposers.base import ExplanationRequest
from forge.recomputing import recompute
from forge.replies import ExplanationReply, parse_explanation
from forge.reply_writing import write_explanation
from forge.report import render_report
from forge.summary import summarize
from hypotheses.ledger import Ledger
from hypotheses.predictions import Explanation, ExplanationProblem, Hypothesis, Prediction
from tests.played_campaigns import (
    HALF,
    QUARTER,
    PlayedProposer,
    Rows,
    adding,
    explaining,
    play_campaign,
    substituting,
)

FIRST: Rows = {
    "evenly": {"half": (0.4, 0.6)},
    "twin": {"half": (0.42, 0.62)},
    "attention": {"half": (0.85, 1.15)},
}
"""Nothing parts evenly from twin. Such an answer is sent back once, and taken when it comes again."""
FIRST_TEXT = explaining("boost", (HALF,), FIRST)


def second(request: ExplanationRequest) -> str:
    """A control on which the two part, and twin said again, otherwise."""
    rows: Rows = {
        "evenly": {"half": (0.4, 0.6), "quarter": (0.2, 0.3)},
        "twins": {"half": (0.45, 0.65), "quarter": (0.5, 0.75)},
        "attention": {"half": (0.85, 1.15), "quarter": (0.4, 0.45)},
    }
    reply = parse_explanation(explaining("boost", (HALF, QUARTER), rows))
    hypotheses = tuple(
        h.model_copy(update={"predecessor": dict(request.registered)["twin"]}) if h.key == "twins" else h
        for h in reply.explanation.hypotheses
    )
    return write_explanation(
        replace(reply, explanation=reply.explanation.model_copy(update={"hypotheses": hypotheses}))
    )


def played(folder: Path, *answers: object) -> tuple[Path, PlayedProposer]:
    proposer = PlayedProposer(
        proposals=(adding("boost", "attention", "0.2"),),
        explanations=(FIRST_TEXT, FIRST_TEXT, *answers),  # type: ignore[arg-type]
    )
    return play_campaign(folder, proposer), proposer


def test_a_control_is_added_once_and_a_revision_names_its_predecessor(tmp_path: Path) -> None:
    path, proposer = played(tmp_path, second)
    asked = proposer.asked_why[2]
    assert asked.inseparable == (("evenly", "twin"),)
    assert [cause for cause, _ in asked.registered] == ["evenly", "twin", "attention"]
    assert "No control of your last answer separates: evenly and twin." in asked.prompt
    assert f"- twin is {dict(asked.registered)['twin']}" in asked.prompt
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.check_invariants() == []
        assert recompute(ledger).holds
        assert recompute(ledger).verdicts == 3
        names = {hypothesis.name: hypothesis for hypothesis in ledger.hypotheses()}
        assert names["twins"].predecessor_id == names["twin"].id
        assert (names["twins"].round, names["twin"].round) == (1, 0)
        assert [control.round for control in ledger.controls()] == [0, 1]
        first, later = ledger.designs()
        assert first.unseparated == ((names["evenly"].id, names["twin"].id),)
        assert later.unseparated == ()
        runs = ledger.evaluations(kind="control")
        assert min(run.seq for run in runs) > max(prediction.seq for prediction in ledger.predictions())
        verdicts = {v.hypothesis_id: (v.status, v.round) for v in ledger.verdicts()}
        summary = summarize(ledger)
    assert verdicts == {
        names["evenly"].id: ("supported", 1),
        names["twins"].id: ("refuted", 1),
        names["attention"].id: ("refuted", 1),
    }
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, console)
    assert isinstance(console.file, io.StringIO)
    assert "revised      twin (boost)" in console.file.getvalue()
    assert "twins (boost, revises twin)" in console.file.getvalue()
    assert "plan, round 1" in console.file.getvalue()
    assert "twins (boost), revises twin |" in render_report(summary)


ZERO = substituting("boost", "    return 0.2", "    return 0.2 / (layer.block - layer.block)", "quarter")
ELSEWHERE: Rows = {
    "evenly": {"half": (0.4, 0.6), "quarter": (0.2, 0.3)},
    "twin": {"half": (0.42, 0.62), "quarter": (0.5, 0.75)},
    "attention": {"half": (0.85, 1.15), "quarter": (0.4, 0.45)},
}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FIRST_TEXT, "the answer adds no control"),
        (explaining("boost", (HALF, ZERO), ELSEWHERE), "control 'quarter' cannot be used: its smoke run ended so"),
        (
            explaining("boost", (HALF, HALF.model_copy(update={"key": "quarter"})), ELSEWHERE),
            "control 'quarter' cannot be used: it is the same program as control 'half'",
        ),
        ("I cannot say.", "has no section of the format"),
    ],
)
def test_without_a_usable_answer_what_is_registered_goes_on(tmp_path: Path, answer: str, reason: str) -> None:
    path, proposer = played(tmp_path, answer)
    assert len(proposer.asked_why) == 3
    with Ledger.open(path, read_only=True) as ledger:
        refused = [p for p in ledger.proposals(status="refused") if p.kind == "explanation"]
        assert [control.name for control in ledger.controls()] == ["half"]
        assert {design.round for design in ledger.designs()} == {0}
        assert len(ledger.verdicts()) == 3
        assert recompute(ledger).holds
    assert [p.attempt for p in refused] == [0, 2]
    assert reason in refused[1].reason


def test_a_first_answer_revises_nothing(tmp_path: Path) -> None:
    reply = parse_explanation(FIRST_TEXT)
    one, *others = reply.explanation.hypotheses
    revising = reply.explanation.model_copy(
        update={"hypotheses": (one.model_copy(update={"predecessor": "hyp-1a2b3c4d"}), *others)}
    )
    text = write_explanation(replace(reply, explanation=revising))
    proposer = PlayedProposer(proposals=(adding("boost", "attention", "0.2"),), explanations=(text,))
    with Ledger.open(play_campaign(tmp_path, proposer), read_only=True) as ledger:
        assert ledger.hypotheses() == ()
        reason = next(p.reason for p in ledger.proposals(status="refused") if p.kind == "explanation")
    assert reason.splitlines()[0] == (
        "Hypothesis 'evenly' revises hyp-1a2b3c4d, but nothing is registered for this observation yet."
    )


def test_a_revision_reads_back_as_it_was_written() -> None:
    hypothesis = Hypothesis(key="new", cause="new", mechanism="m", statement="s", predecessor="hyp-0a1b2c3d4e")
    other = Hypothesis(key="old", cause="old", mechanism="m", statement="s")
    predictions = tuple(
        Prediction(hypothesis=name, control="half", low=low, high=low + 0.2)
        for name, low in (("new", 0.0), ("old", 0.8))
    )
    written = ExplanationReply(
        analysis="a",
        explanation=Explanation(hypotheses=(hypothesis, other), controls=(HALF,), predictions=predictions),
    )
    assert parse_explanation(write_explanation(written)).explanation.hypotheses == (hypothesis, other)


REGISTERED = parse_explanation(FIRST_TEXT).explanation
IDS = {"evenly": "hyp-1", "twin": "hyp-2", "attention": "hyp-3"}


def answer(rows: Rows, *controls: object) -> Explanation:
    return parse_explanation(explaining("boost", controls or (HALF, QUARTER), rows)).explanation  # type: ignore[arg-type]


def test_what_is_added_is_what_is_new() -> None:
    found = extend(REGISTERED, IDS, answer(ELSEWHERE))
    assert found.hypotheses == ()
    assert [control.key for control in found.controls] == ["quarter"]
    assert {(row.hypothesis, row.control) for row in found.predictions} == {(name, "quarter") for name in ELSEWHERE}
    assert len(found.explanation.predictions) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (answer({n: {"half": c["half"]} for n, c in ELSEWHERE.items()}, HALF), "the answer adds no control"),
        (
            answer(ELSEWHERE | {"twin": ELSEWHERE["twin"] | {"half": (0.3, 0.5)}}),
            "registered as [0.42, 0.62] and never changes",
        ),
        (
            answer({name: ELSEWHERE[name] for name in ("evenly", "attention")}),
            "hypothesis 'twin' is to be written again or",
        ),
        (
            answer({name if name != "twin" else "luck": cells for name, cells in ELSEWHERE.items()}),
            "hypothesis 'luck' is new, so it revises one of the registered ones and names it: evenly is hyp-1",
        ),
        (
            answer(ELSEWHERE, substituting("boost", "    return 0.2", "    return 0.1"), QUARTER),
            "control 'half' is registered as something else",
        ),
    ],
)
def test_what_is_registered_does_not_change(given: Explanation, message: str) -> None:
    with pytest.raises(ExplanationProblem) as caught:
        extend(REGISTERED, IDS, given)
    assert any(message in problem for problem in caught.value.problems)
