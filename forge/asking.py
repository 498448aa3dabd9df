"""Asking the proposer, once per purpose: a reply that the ledger holds is never asked for again.

Every reply is stored with its prompt before it is read, so that a resumed campaign walks the same way and nothing that was
paid for is lost. Failed requests are recorded too: they cost money as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forge.errors import ProposerError
from forge.plain_text import storable
from forge.progress import Progress
from forge.proposers.base import ExplanationRequest, ProposalRequest, Proposer, Reply
from hypotheses.ledger import Ledger, NewLlmCall

MAX_REPLY_BYTES = 1_000_000
"""A longer reply is runaway; it is cut to this, which the ledger can keep, and counts as cut off."""


class TokenBudgetSpent(ProposerError):
    """The recipe's cap on tokens or cost is reached."""


class Asker:
    """One proposer and the ledger that remembers what it said."""

    def __init__(
        self,
        proposer: Proposer,
        ledger: Ledger,
        progress: Progress,
        *,
        max_tokens_total: int | None = None,
        max_cost: float | None = None,
    ) -> None:
        self._proposer = proposer
        self._ledger = ledger
        self._progress = progress
        self._max_tokens_total = max_tokens_total
        self._max_cost = max_cost
        self.last_call_id = ""

    def propose(self, purpose: str, request: ProposalRequest) -> Reply:
        """Return the answer to a proposal prompt."""
        return self._ask(purpose, request.prompt, lambda: self._proposer.propose(request))

    def explain(self, purpose: str, request: ExplanationRequest) -> Reply:
        """Return the answer to an explanation prompt."""
        return self._ask(purpose, request.prompt, lambda: self._proposer.explain(request))

    def _ask(self, purpose: str, prompt: str, ask: Callable[[], Reply]) -> Reply:
        stored = self._ledger.find_llm_call(purpose, prompt=prompt)
        if stored is not None:
            self.last_call_id = stored.id
            return Reply(
                text=stored.reply,
                model=stored.model,
                prompt_tokens=stored.tokens_in,
                completion_tokens=stored.tokens_out,
                cost=stored.cost,
                finish_reason=str(stored.body.get("finish_reason", "stop")),
            )
        self._check_caps()
        self._progress.say(f"asking the proposer ({purpose})")
        try:
            reply = ask()
        except ProposerError as err:
            self._ledger.record_llm_failure(purpose, model=self._proposer.name, error=storable(str(err)))
            raise
        reply = _storable_reply(reply)
        call = self._ledger.record_llm_call(
            NewLlmCall(
                purpose=purpose,
                prompt=prompt,
                reply=reply.text,
                model=reply.model,
                tokens_in=reply.prompt_tokens,
                tokens_out=reply.completion_tokens,
                cost=reply.cost,
                body={"finish_reason": reply.finish_reason, "requests": reply.calls},
            )
        )
        self.last_call_id = call.id
        return reply

    def _check_caps(self) -> None:
        spend = self._ledger.llm_spend()
        tokens = spend.tokens_in + spend.tokens_out
        if self._max_tokens_total is not None and tokens >= self._max_tokens_total:
            raise TokenBudgetSpent(
                f"the proposer used {tokens} tokens of at most {self._max_tokens_total}; raise llm.max_tokens_total to go on"
            )
        if self._max_cost is not None and spend.cost is not None and spend.cost >= self._max_cost:
            raise TokenBudgetSpent(
                f"the proposer cost {spend.cost:.2f} of at most {self._max_cost:.2f}; raise llm.max_cost to go on"
            )


def _storable_reply(reply: Reply) -> Reply:
    """Return the reply as the ledger can keep it: a server's odd bytes or its length must not end the campaign."""
    text, finish_reason = storable(reply.text), storable(reply.finish_reason)
    if len(text.encode()) > MAX_REPLY_BYTES:
        text, finish_reason = text.encode()[:MAX_REPLY_BYTES].decode("utf-8", "ignore"), "length"
    return replace(reply, text=text, model=storable(reply.model), finish_reason=finish_reason)
