"""The second budget: tokens and cost of the proposer, failed calls included."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import select

from hypotheses.ledger import models
from hypotheses.ledger.canonical import canonical_json
from hypotheses.ledger.evidence import clean_text
from hypotheses.ledger.records import LlmSpend
from hypotheses.ledger.transaction import Transaction

MAX_ERROR_CHARACTERS = 4_096
"""A server may answer a failed call with a whole page."""


def add_failure(
    tx: Transaction,
    *,
    purpose: str,
    model: str,
    error: str,
    tokens_in: int | None,
    tokens_out: int | None,
    cost: float | None,
) -> None:
    """Append a call that gave no reply."""
    canonical_json(cost, name="llm_failure.cost")
    tx.session.add(
        models.LlmFailure(
            purpose=purpose,
            model=model,
            error=clean_text(error)[:MAX_ERROR_CHARACTERS],
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            cost=cost,
            at=datetime.now(UTC),
        )
    )


def total(tx: Transaction) -> LlmSpend:
    """Sum replies and failures. Tokens that were not reported count as 0; a cost that was not reported is unknown."""
    calls = [
        (row.tokens_in, row.tokens_out, row.cost)
        for row in tx.session.execute(
            select(models.LlmCall.tokens_in, models.LlmCall.tokens_out, models.LlmCall.cost).order_by(
                models.LlmCall.seq
            )
        )
    ]
    failures = [
        (row.tokens_in, row.tokens_out, row.cost)
        for row in tx.session.execute(
            select(models.LlmFailure.tokens_in, models.LlmFailure.tokens_out, models.LlmFailure.cost).order_by(
                models.LlmFailure.number
            )
        )
    ]
    costs = [cost for _, _, cost in calls + failures]
    known = [cost for cost in costs if cost is not None]
    return LlmSpend(
        num_calls=len(calls),
        num_failures=len(failures),
        tokens_in=sum(tokens or 0 for tokens, _, _ in calls + failures),
        tokens_out=sum(tokens or 0 for _, tokens, _ in calls + failures),
        cost=sum(known) if len(known) == len(costs) else None,
        num_unknown_costs=len(costs) - len(known),
    )
