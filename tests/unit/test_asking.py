"""A reply is asked for once, stored before it is read, and nothing in it can end the campaign."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forge.asking import MAX_REPLY_BYTES, Asker, TokenBudgetSpent
from forge.errors import ProposerError
from forge.progress import QuietProgress
from forge.proposers.base import ExplanationRequest, MeasuredEffect, ProposalRequest, Proposer, Reply
from hypotheses.ledger import Ledger
from hypotheses.ledger.errors import LedgerConflict
from tests.ledger_builders import new_campaign


@dataclass
class Told:
    """Answers with what it is given, and counts how often it is asked."""

    replies: list[Reply | ProposerError]
    name: str = "told"
    label: str = "told what to say"
    asked: list[str] = field(default_factory=list)

    def propose(self, request: ProposalRequest) -> Reply:
        return self._answer(request.prompt)

    def explain(self, request: ExplanationRequest) -> Reply:
        return self._answer(request.prompt)

    def _answer(self, prompt: str) -> Reply:
        self.asked.append(prompt)
        answer = self.replies.pop(0)
        if isinstance(answer, ProposerError):
            raise answer
        return answer


def reply(text: str = "an edit", **fields: object) -> Reply:
    facts: dict[str, object] = {"text": text, "model": "m-1", "prompt_tokens": 60, "completion_tokens": 40, "cost": 0.5}
    return Reply(**(facts | fields))  # type: ignore[arg-type]


def proposal(prompt: str = "improve this") -> ProposalRequest:
    return ProposalRequest(prompt=prompt, turn=1, incumbent_source="", mechanisms=())


def explanation(prompt: str = "explain this") -> ExplanationRequest:
    return ExplanationRequest(
        prompt=prompt,
        observation="obs-1",
        turn=1,
        parent_source="",
        child_source="",
        mechanisms_added=(),
        effect=MeasuredEffect(name="child", effect=0.1, standard_error=0.01),
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        yield ledger


def asker(ledger: Ledger, proposer: Proposer, **caps: float) -> Asker:
    return Asker(proposer, ledger, QuietProgress(), **caps)  # type: ignore[arg-type]


def test_a_stored_reply_is_not_asked_for_again(ledger: Ledger) -> None:
    proposer = Told([reply("first", finish_reason="length"), reply("second")])
    first = asker(ledger, proposer)
    given = first.propose("turn-1/propose/0", proposal())
    again = asker(ledger, proposer)
    found = again.propose("turn-1/propose/0", proposal())
    assert proposer.asked == ["improve this"]
    assert (found.text, found.model, found.cost, found.finish_reason) == ("first", "m-1", 0.5, "length")
    assert (found.prompt_tokens, found.completion_tokens) == (given.prompt_tokens, given.completion_tokens)
    assert again.last_call_id == first.last_call_id != ""
    assert again.explain("turn-1/explain/0", explanation()).text == "second"
    assert [call.purpose for call in ledger.llm_calls()] == ["turn-1/propose/0", "turn-1/explain/0"]


def test_a_replay_that_asks_something_else_is_noticed(ledger: Ledger) -> None:
    asking = asker(ledger, Told([reply(), reply()]))
    asking.propose("turn-1/propose/0", proposal())
    with pytest.raises(LedgerConflict, match="another prompt"):
        asking.propose("turn-1/propose/0", proposal("something else"))


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a\x00b", "ab"), ("a\ud800b\udfff", "a?b?"), ("\x1b[31mred", "\x1b[31mred"), ("ä漢\u2028", "ä漢\u2028")],
)
def test_what_cannot_be_stored_is_cleaned_and_the_same_when_replayed(ledger: Ledger, text: str, kept: str) -> None:
    proposer = Told([reply(text, model=f"m{text}", finish_reason=f"stop{text}")])
    given = asker(ledger, proposer).propose("turn-1/propose/0", proposal())
    assert given.text == kept
    found = asker(ledger, proposer).propose("turn-1/propose/0", proposal())
    assert (found.text, found.model, found.finish_reason) == (kept, f"m{kept}", f"stop{kept}")


def test_a_runaway_reply_is_cut_and_counts_as_cut_off(ledger: Ledger) -> None:
    given = asker(ledger, Told([reply("漢" * MAX_REPLY_BYTES)])).propose("turn-1/propose/0", proposal())
    assert len(given.text.encode()) <= MAX_REPLY_BYTES
    assert given.finish_reason == "length"
    assert ledger.llm_calls()[0].reply == given.text


def test_failed_requests_are_recorded_and_asked_again(ledger: Ledger) -> None:
    proposer = Told([ProposerError("the server said \x00\ud800 no"), reply()])
    with pytest.raises(ProposerError):
        asker(ledger, proposer).propose("turn-1/propose/0", proposal())
    assert ledger.llm_calls() == ()
    assert ledger.llm_spend().num_failures == 1
    assert asker(ledger, proposer).propose("turn-1/propose/0", proposal()).text == "an edit"


@pytest.mark.parametrize(
    ("caps", "key"), [({"max_tokens_total": 200}, "max_tokens_total"), ({"max_cost": 1.0}, "max_cost")]
)
def test_a_cap_that_is_reached_stops_asking_and_never_what_is_stored(
    ledger: Ledger, caps: dict[str, float], key: str
) -> None:
    asking = asker(ledger, Told([reply(), reply(), reply()]), **caps)
    asking.propose("turn-1/propose/0", proposal())
    asking.propose("turn-2/propose/0", proposal())
    with pytest.raises(TokenBudgetSpent, match=f"raise llm.{key} to go on"):
        asking.propose("turn-3/propose/0", proposal())
    assert asking.propose("turn-2/propose/0", proposal()).text == "an edit"


def test_an_unknown_cost_never_reaches_a_cap(ledger: Ledger) -> None:
    asking = asker(ledger, Told([reply(cost=None), reply()]), max_cost=0.1)
    asking.propose("turn-1/propose/0", proposal())
    assert asking.propose("turn-2/propose/0", proposal()).text == "an edit"
