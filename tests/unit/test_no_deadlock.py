"""No campaign ends for want of an accepted proposal while calls are left, whatever verdicts fall and whoever proposes."""

from __future__ import annotations

import re
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.proposers.base import ExplanationRequest, ProposalRequest
from forge.replies import ConditionalEdit, ExplanationReply
from forge.reply_writing import write_explanation
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.probe_kinds import AbsentProbe, ArtifactProbe, KnockoutProbe, Place
from hypotheses.required_edits import RequiredEdit
from tests.fake_campaigns import FakeProposer, add, blocks_of, play, proposal

SPENT = ("all evaluator calls are spent", "the last evaluator call is kept to measure the best program again")
WAYS = ("lazy", "contradictory", "crashing", "honest", "stubborn", "talking")
INTERVALS = {"fits": (0.0, 0.45), "off": (0.8, 1.2), "far": (-0.9, -0.4)}
LAST = Place(blocks=(7,))
IMPOSSIBLE = ArtifactProbe(property="bits", comparison="<", value=1.0)


class Proposer(FakeProposer):
    """Proposes in the ways given, turn by turn; its repair is always a new program that ignores every required edit."""

    def __init__(self, ways: list[str], gains: list[int], falls: list[tuple[str, str]], wishes: list[str]) -> None:
        super().__init__(self._candidate, self._why)
        self._ways, self._gains, self._falls, self._wishes = ways, gains, falls, wishes
        self._numbers = count(1)
        self._explained = count()

    def _candidate(self, request: ProposalRequest) -> str:
        way = self._ways[request.turn % len(self._ways)] if request.attempt == 0 else "lazy"
        keys = [record.key for record in request.open_edits]
        if way == "talking":
            return "I would rather talk."
        if way == "contradictory":
            return self._fresh(request, discharges=keys)
        if way == "crashing":
            return self._fresh(request, discharges=keys, tail=" / (session.num_blocks <= 2)")
        if way in ("honest", "stubborn") and request.mechanisms:
            return self._tuned(request, keys[:1] if way == "honest" else [], stubborn=way == "stubborn")
        return self._fresh(request)

    def _fresh(self, request: ProposalRequest, *, discharges: list[str] | None = None, tail: str = "") -> str:
        number = next(self._numbers)
        gain = self._gains[number % len(self._gains)] / 10 + number / 10000
        name = f"part{number}"
        edits = add(name, f"    return {gain:.4f}{tail}", present=request.mechanisms)
        return proposal(edits, claims=[(name, f"cause{number}")], discharges=discharges or [])

    def _tuned(self, request: ProposalRequest, discharges: list[str], *, stubborn: bool) -> str:
        """Enlarge the mechanism that the first edit is about; stubborn: under a claim that stands refuted."""
        wanted = [record.edit.mechanism for record in request.open_edits]
        name = next((name for name in wanted if name in request.mechanisms), request.mechanisms[-1])
        line = re.search(rf"def {name}\(session, layer\):\n(    return [-0-9.]+)\n", request.incumbent_source)
        if line is None:
            return self._fresh(request)
        number = next(self._numbers)
        barred = [claim.cause for claim in request.barred_claims if claim.mechanism == name]
        cause = barred[0] if stubborn and barred else f"cause{number}"
        return proposal([(line[1], f"{line[1]}{number}")], claims=[(name, cause)], discharges=discharges)

    def _why(self, request: ExplanationRequest) -> str:
        name = request.mechanisms_added[0]
        line = re.search(rf"def {name}\(session, layer\):\n(    return [-0-9.]+)\n", request.child_source)
        if line is None:
            return "I cannot say."
        turn = next(self._explained)
        fall = dict(zip(("one", "two"), self._falls[turn % len(self._falls)], strict=True))
        edit = blocks_of((line[1], f'{line[1]} if layer.role == "q" else 0.0'))
        explanation = Explanation(
            hypotheses=tuple(Hypothesis(key=key, cause=key, mechanism=name, statement="s") for key in fall),
            controls=(Control(key="quarter", kind="substitute", removes=(name,), edits=edit),),
            predictions=tuple(
                Prediction(hypothesis=key, control="quarter", low=INTERVALS[how][0], high=INTERVALS[how][1])
                for key, how in fall.items()
            ),
        )
        wanted = self._wishes[turn % len(self._wishes)]
        wishes = tuple(wish for key in fall for wish in WISHES[wanted](key, name))
        return write_explanation(ExplanationReply(analysis="a", explanation=explanation, required_edits=wishes))


def _wish(cause: str, verdict: str, **fields: object) -> ConditionalEdit:
    edit = RequiredEdit.model_validate({"cause": cause, "wording": "do it"} | fields)
    return ConditionalEdit(hypothesis=cause, verdict=verdict, edit=edit)  # type: ignore[arg-type]


WISHES = {
    "none": lambda cause, name: (),
    "refine": lambda cause, name: (
        _wish(cause, "supported", kind="refine", mechanism=name, probe=KnockoutProbe(mechanism=name)),
        _wish(cause, "refuted", kind="remove", mechanism=name, probe=AbsentProbe(mechanism=name)),
    ),
    "impossible": lambda cause, name: (
        _wish(cause, "supported", kind="refine", mechanism=name, probe=IMPOSSIBLE),
        _wish(cause, "refuted", kind="replace", mechanism=name, probe=IMPOSSIBLE),
    ),
    "far": lambda cause, name: (
        _wish(
            cause,
            "supported",
            kind="extend",
            mechanism=name,
            part="more",
            place=LAST,
            probe=KnockoutProbe(mechanism="more", place=LAST),
        ),
        _wish(cause, "refuted", kind="retest", mechanism=name, probe=KnockoutProbe(mechanism=name)),
    ),
}


def walk(
    ways: list[str], gains: list[int], falls: list[tuple[str, str]], wishes: list[str], *, budget: int = 9
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        proposer = Proposer(ways, gains, falls, wishes)
        played = play(Path(folder), proposer, budget=budget, max_turns=80, max_consecutive_refusals=1)
        try:
            refusals = played.refusals()
            assert not played.ending.failed, (played.ending, refusals)
            assert played.ending.reason in SPENT, (played.ending, refusals)
            assert played.ledger.check_invariants() == []
            for record in played.edits():
                assert record.refused_turns <= 3, record
                assert record.paid_attempts <= 3, record
        finally:
            played.ledger.close()


@pytest.mark.parametrize(
    ("ways", "wishes"),
    [
        (["lazy"], ["refine"]),
        (["contradictory", "crashing"], ["impossible"]),
        (["stubborn", "honest"], ["far"]),
    ],
)
def test_one_kind_of_proposer_never_deadlocks(ways: list[str], wishes: list[str]) -> None:
    walk(ways, [2, 3], [("fits", "off"), ("off", "far")], wishes, budget=5)


falls = st.tuples(*[st.sampled_from(sorted(INTERVALS))] * 2).filter(lambda pair: pair[0] != pair[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=6),
    st.lists(st.sampled_from([-3, -1, 1, 2, 4]), min_size=1, max_size=5),
    st.lists(falls, min_size=1, max_size=4),
    st.lists(st.sampled_from(sorted(WISHES)), min_size=1, max_size=4),
)
def test_no_campaign_deadlocks(
    ways: list[str], gains: list[int], verdicts: list[tuple[str, str]], wishes: list[str]
) -> None:
    walk(ways, gains, verdicts, wishes)
