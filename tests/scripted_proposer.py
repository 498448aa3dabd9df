"""A proposer that answers with what a test wrote down."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.proposers.base import ExplanationRequest, ProposalRequest, ProposerExhausted, Reply


@dataclass
class ScriptedProposer:
    """Answers with the given replies in order, then has nothing left."""

    replies: list[str]
    name: str = "scripted"
    label: str = "scripted replies"
    requests: list[ProposalRequest] = field(default_factory=list)

    def propose(self, request: ProposalRequest) -> Reply:
        self.requests.append(request)
        if not self.replies:
            raise ProposerExhausted("the script is over")
        return Reply(text=self.replies.pop(0), model="script")

    def explain(self, request: ExplanationRequest) -> Reply:
        return Reply(text="I cannot say.", model="script")
