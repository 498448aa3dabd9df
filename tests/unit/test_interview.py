"""What a proposer may not say of an observation: told once with its exact reason, before anything is spent or registered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forge.asking import Asker
from forge.controls import ControlProblem, build_control
from forge.interview import Finding, Interview
from forge.program_identity import ast_hash, mechanism_fingerprint, normalized_ast_hash
from forge.program_source import mechanisms
from forge.progress import QuietProgress
from forge.proposers.base import ExplanationRequest, ProposalRequest, Reply
from forge.replies import ExplanationReply
from forge.scored import Scored
from hypotheses.effects import PairedEffect
from hypotheses.ledger import (
    Ledger,
    NewDesign,
    NewHypothesis,
    NewObservation,
    NewProgram,
    NewVerdict,
    Observation,
    Program,
)
from hypotheses.predictions import Control
from hypotheses.required_edits import BarredClaim
from tests.campaign_builders import tiny_recipe
from tests.ledger_builders import candidate, evaluate, new_campaign, register, scored
from tests.program_builders import CHILD, PARENT, blocks

EFFECT = PairedEffect(mean=0.2, standard_error=0.01, num_chunks=8, chunk_variance=8e-4, program_variance=0.0)
LAYERS = {
    f"blocks.{block}.{role}": {"digest": f"{block}{role}", "rank": 0} for block in range(2) for role in ("q", "down")
}
GOOD = f"""## Hypotheses
- halving: shrink | the weights become smaller
- sign: flip | the signs are turned

## Controls
- without: knockout shrink | the child with the weights as they are
- milder: substitute shrink in child | three quarters

## Predictions
- halving @ without: -0.1 .. 0.1
- sign @ without: 0.8 .. 1.1
- halving @ milder: 0.3 .. 0.6
- sign @ milder: 0.8 .. 1.1

## Edits milder
{blocks("    return weight * 0.5", "    return weight * 0.75")}

## Required edits
- if halving supported: refine shrink with finer at everywhere | by layer | probe {{"kind": "knockout", "mechanism": "finer"}}
"""
WISH = GOOD[GOOD.index("- if halving") :].strip()


@dataclass
class Scripted:
    """Answers every question about an observation with the next text."""

    texts: list[str]
    name: str = "scripted"
    label: str = "scripted replies"
    asked: list[ExplanationRequest] = field(default_factory=list)

    def propose(self, request: ProposalRequest) -> Reply:
        raise AssertionError("nothing is proposed here")

    def explain(self, request: ExplanationRequest) -> Reply:
        self.asked.append(request)
        return Reply(text=self.texts.pop(0), model="script")


def trial(controls: Sequence[Control]) -> dict[str, str]:
    """Return why controls cannot be made; nothing of this subject can be run."""
    problems = {}
    for control in controls:
        try:
            build_control(control, parent=PARENT, child=CHILD)
        except ControlProblem as problem:
            problems[control.key] = str(problem)
    return problems


class Table:
    """A ledger with a parent, a child, and the observation of their difference."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.ledger = ledger
        self.folder = folder
        self.parent = self._scored(PARENT, 3.0, turn=0)
        self.child = self._scored(CHILD, 2.8, turn=1)
        self.observation = self.observe(self.child.program)

    def interview(self, proposer: Scripted) -> Interview:
        return Interview(self.ledger, Asker(proposer, self.ledger, QuietProgress()), tiny_recipe(self.folder), 0.01)

    def explain(self, proposer: Scripted) -> ExplanationReply | None:
        return self.interview(proposer).explanation(
            Finding(
                turn=1,
                observation=self.observation,
                parent=self.parent,
                child=self.child,
                claims=(("shrink", "halving"),),
                search=EFFECT,
                confirmed=EFFECT,
                width=0.2,
                idle={},
                trial=trial,
            )
        )

    def program(self, source: str, *, parent: Program | None = None) -> Program:
        return self.ledger.add_program(
            NewProgram(
                source=source,
                origin="candidate",
                ast_hash=ast_hash(source),
                normalized_ast_hash=normalized_ast_hash(source),
                parent_id=parent.id if parent else None,
                mechanisms=mechanisms(source),
            )
        )

    def observe(self, program: Program, turn: int = 1) -> Observation:
        confirmation = evaluate(
            self.ledger,
            candidate(program, kind="confirmation", split="confirm", draw=1, turn=turn),
            scored(2.8, 2.8),
        )
        return self.ledger.add_observation(
            NewObservation(
                turn=turn,
                program_id=program.id,
                parent_id=self.parent.program.id,
                search_effect=0.2,
                search_se=0.01,
                confirmed_effect=0.2,
                confirmed_se=0.01,
                confirmation_id=confirmation.id,
            )
        )

    def judge(self, observation: Observation, *claims: tuple[str, str, str]) -> None:
        """Register rivals (mechanism, cause, verdict) on an observation and record the verdicts."""
        names = tuple(f"h{number}" for number in range(len(claims)))
        registration = register(
            self.ledger,
            observation,
            hypotheses=tuple(
                NewHypothesis(name=name, mechanism=mechanism, cause=cause)
                for name, (mechanism, cause, _) in zip(names, claims, strict=True)
            ),
            controls=(),
            predictions=(),
            design=NewDesign(chosen=()),
        )
        self.ledger.record_verdicts(
            [
                NewVerdict(hypothesis_id=hypothesis.id, status=status, rule="r", reason="")
                for hypothesis, (_, _, status) in zip(registration.hypotheses, claims, strict=True)
            ]
        )

    def _scored(self, source: str, loss: float, *, turn: int) -> Scored:
        program = self.program(source)
        result = scored(loss, loss, evidence={"events": [], "layers": LAYERS})
        return Scored(program=program, evaluation=evaluate(self.ledger, candidate(program, turn=turn), result))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(budget=20)) as ledger:
        yield Table(ledger, tmp_path)


def wished(text: str) -> str:
    return GOOD.replace(WISH, text)


BAD = [
    pytest.param(
        "\n".join(line for line in GOOD.splitlines() if not line.startswith("- sign")),
        "rival",
        id="no rival",
    ),
    pytest.param(
        GOOD.replace("- sign @ milder", "- sign @ unheard_of"),
        "unheard_of",
        id="prediction for an unknown control",
    ),
    pytest.param(GOOD.replace("0.3 .. 0.6", "0.6 .. 0.3"), "0.6", id="interval turned round"),
    pytest.param(
        wished(WISH.replace('"mechanism": "finer"', '"mechanism": "ghost"')),
        "the probe is about 'ghost', the edit about 'shrink' with 'finer'",
        id="probe of a function that is not there",
    ),
    pytest.param(
        wished(WISH.replace(" with finer", "")),
        "a part that is to come is declared, as in 'refine shrink with finer at ...'",
        id="part not declared",
    ),
    pytest.param(
        wished(
            '- if halving refuted: retest shrink at everywhere | w | probe {"kind": "knockout", "mechanism": "ghost"}'
        ),
        "the probe is about 'ghost', the edit about 'shrink'",
        id="retest of a function that is not there",
    ),
    pytest.param(
        GOOD.replace("- halving: shrink", "- halving: ghost").replace(
            WISH,
            '- if halving refuted: retest ghost at everywhere | w | probe {"kind": "knockout", "mechanism": "ghost"}',
        ),
        "probe names mechanism 'ghost', which the program does not declare; declared: 'shrink', 'flip'",
        id="retest of a mechanism that is not there",
    ),
    pytest.param(
        wished(
            '- if halving supported: extend shrink at everywhere | w | probe {"kind": "knockout", "mechanism": "ghost"}'
        ),
        "a part that is to come is declared, as in 'extend shrink with ghost at ...'",
        id="extend by a function that is not there",
    ),
    pytest.param(
        wished(WISH.replace("with finer", "with flip").replace('"finer"', '"flip"')),
        "part 'flip' is in the incumbent already; name the part that is to come",
        id="part that is there",
    ),
    pytest.param(
        GOOD.replace("- halving: shrink", "- halving: quantize").replace(
            WISH,
            '- if halving refuted: remove quantize at everywhere | w | probe {"kind": "absent", "mechanism": "quantize"}',
        ),
        "'quantize' is the program itself; the incumbent stays whatever becomes of its explanation",
        id="edit that would remove the incumbent",
    ),
    pytest.param(
        wished(
            "- if halving refuted: replace shrink at everywhere | w | "
            'probe {"kind": "artifact", "property": "rank", "value": 0}'
        ),
        "its probe holds for the incumbent already (rank == 0 holds for 4 of 4 layers",
        id="probe that holds already",
    ),
    pytest.param(
        wished(
            "- if halving supported: extend shrink with finer at blocks 7 | w | "
            'probe {"kind": "knockout", "mechanism": "finer", "place": {"blocks": [7]}}'
        ),
        "the subject has no layer at all roles of blocks 7",
        id="place that is not there",
    ),
    pytest.param(
        GOOD.replace("knockout shrink |", "knockout gone |").replace("return weight * 0.75", "return weight * 0.5"),
        "'gone' is no mechanism of the program",
        id="no control that can be made",
    ),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_bad_input_is_told_once_and_nothing_is_registered(table: Table, bad: str, reason: str) -> None:
    before = table.ledger.budget()
    proposer = Scripted([bad, bad])
    assert table.explain(proposer) is None
    first, second = proposer.asked
    assert first.problems == ()
    assert any(reason in problem for problem in second.problems), second.problems
    assert second.previous_reply == bad
    assert table.ledger.budget() == before
    for rows in (
        table.ledger.hypotheses(),
        table.ledger.controls(),
        table.ledger.predictions(),
        table.ledger.designs(),
    ):
        assert rows == ()
    refused = table.ledger.proposals(status="refused")
    assert [row.kind for row in refused] == ["explanation", "explanation"]
    assert all(reason in row.reason for row in refused)
    (note,) = table.ledger.notes()
    assert "stays unexplained" in note.text


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_mended_answer_is_taken(table: Table, bad: str, reason: str) -> None:
    reply = table.explain(Scripted([bad, GOOD]))
    assert reply is not None
    assert [hypothesis.cause for hypothesis in reply.explanation.hypotheses] == ["halving", "sign"]
    assert len(reply.required_edits) == 1


# Bars over the whole ledger


def test_support_elsewhere_lifts_a_bar_and_each_verdict_has_its_own_fingerprint(table: Table) -> None:
    table.judge(table.observation, ("shrink", "halving", "refuted"), ("flip", "sign", "refuted"))
    interview = table.interview(Scripted([]))
    first = {claim.mechanism: claim for claim in interview.barred()}
    assert first["shrink"] == BarredClaim(
        mechanism="shrink",
        cause="halving",
        fingerprint=mechanism_fingerprint(CHILD, "shrink"),
        program=table.child.program.id,
    )
    tuned = table.program(CHILD.replace("weight * 0.5", "weight * 0.25"), parent=table.child.program)
    evaluate(table.ledger, candidate(tuned, turn=2), scored(2.5, 2.5))
    again = table.observe(tuned, turn=2)
    table.judge(again, ("shrink", "Halving", "supported"), ("flip", "sign", "refuted"))
    (left,) = interview.barred()
    assert (left.mechanism, left.program) == ("flip", tuned.id), "the newest refutation is the one that stands"
    third = table.program(CHILD.replace("weight * 0.5", "weight * 0.1"), parent=tuned)
    evaluate(table.ledger, candidate(third, turn=3), scored(2.4, 2.4))
    table.judge(table.observe(third, turn=3), ("shrink", "halving", "refuted"), ("flip", "sign", "inconclusive"))
    barred = {claim.mechanism: claim for claim in interview.barred()}
    assert barred["shrink"].fingerprint == mechanism_fingerprint(third.source, "shrink")
    assert barred["flip"].program == tuned.id
