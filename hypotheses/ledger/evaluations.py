"""Evaluator calls as money: reserve, settle, release, count.

An evaluation is reserved in the transaction that creates its row and settled with its result in one more. In between it
carries leases: which process started it, and when that process gave it back. A lease of another opening of the ledger
belongs to a process that is gone (the run lock is ours), so its evaluation is taken over: one more attempt, no more
charge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import case, func, or_, select
from sqlalchemy.orm import aliased

from hypotheses.ledger import models
from hypotheses.ledger.canonical import make_id
from hypotheses.ledger.errors import (
    BudgetExhausted,
    EvaluationInProgress,
    LedgerNotFound,
    LedgerRefused,
    LedgerValueError,
)
from hypotheses.ledger.evidence import clean_text, fit_evidence
from hypotheses.ledger.records import Budget, Evaluation, NewEvaluation, Settlement
from hypotheses.ledger.tables import CONTROLS, EVALUATIONS, fields_of, without
from hypotheses.ledger.transaction import END, Transaction

MAX_LOG_CHARACTERS = 16_384
MAX_REASON_CHARACTERS = 4_096
_HOST_FIELDS = ("log_tail", "wall_s", "device", "versions")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """One opening of a ledger for writing."""

    token: str
    pid: int
    boot_id: str


def budget(tx: Transaction, *, as_of: int = END) -> Budget:
    """Count evaluator calls as of a position."""
    total = tx.session.scalar(select(models.Campaign.budget))
    model = models.Evaluation
    settled = case((model.settled_seq <= as_of, 1), else_=0)
    paid = case((model.kind != "setup", 1), else_=0)
    num_all, num_paid, num_used = tx.session.execute(
        select(func.count(), func.coalesce(func.sum(paid), 0), func.coalesce(func.sum(paid * settled), 0)).where(
            model.seq <= as_of
        )
    ).one()
    return Budget(total=total or 0, used=num_used, reserved=num_paid - num_used, num_setup=num_all - num_paid)


def reserve(tx: Transaction, new: NewEvaluation, owner: Owner) -> Evaluation:
    """Reserve an evaluation, take over one that a dead process left, or return the settled one."""
    content = fields_of(new)
    eval_id = make_id(EVALUATIONS.tag, *(content[name] for name in EVALUATIONS.key))
    row = tx.session.get(models.Evaluation, eval_id)
    if row is None:
        _check_links(tx, new)
        calls = budget(tx)
        if new.kind != "setup" and calls.free <= 0:
            raise BudgetExhausted(total=calls.total, used=calls.used, reserved=calls.reserved)
        row = tx.insert_row(EVALUATIONS, content | {"state": "reserved"})
        _add_lease(tx, row.id, owner, action="taken", attempt=1)
        return load(tx, row)
    tx.compare(EVALUATIONS, row, content)
    tx.touch(row.seq)
    if row.settled_seq is not None:
        tx.touch(row.settled_seq)
        return load(tx, row)
    last = _last_lease(tx, eval_id)
    if last.owner == owner.token and last.action == "taken":
        raise EvaluationInProgress(f"{eval_id} is being run by this process; settle or release it first")
    _add_lease(tx, eval_id, owner, action="taken", attempt=last.attempt + 1)
    return load(tx, row)


def fit_result(evaluation_id: str, result: Settlement) -> dict[str, Any]:
    """Return the fields of a result as they are stored: checked, and what a program can make long or odd cut and cleaned.

    Raises:
        LedgerValueError: scored without losses, or failed with losses.
    """
    _check_result(evaluation_id, result)
    return _capped(fields_of(result))


def settle(
    tx: Transaction, evaluation_id: str, content: Mapping[str, Any], owner: Owner, *, nll: float | None
) -> Evaluation:
    """Store the fields of a result (see `fit_result`); the same result once more changes nothing."""
    row = _stored(tx, evaluation_id)
    if row.settled_seq is not None:
        tx.compare(EVALUATIONS, row, tx.columns(EVALUATIONS, without(content, *_HOST_FIELDS), store=False))
        tx.touch(row.settled_seq)
        return load(tx, row)
    last = _last_lease(tx, evaluation_id)
    if last.owner != owner.token or last.action != "taken":
        raise LedgerRefused(f"{evaluation_id} is not reserved by this process; reserve it again before settling it")
    values = tx.columns(EVALUATIONS, content, store=True)
    values |= {"state": "settled", "nll": nll, "settled_seq": tx.event("evaluation_settled", evaluation_id)}
    for name, value in values.items():
        setattr(row, name, value)
    tx.session.flush()
    tx.session.refresh(row)
    return load(tx, row)


def release(tx: Transaction, evaluation_id: str, owner: Owner, reason: str) -> Evaluation:
    """Give an evaluation back after a failure of the host: it stays reserved, the next attempt is not charged."""
    row = _stored(tx, evaluation_id)
    last = _last_lease(tx, evaluation_id)
    if row.settled_seq is not None or last.owner != owner.token or last.action != "taken":
        raise LedgerRefused(f"{evaluation_id} is not being run by this process")
    _add_lease(tx, evaluation_id, owner, action="released", attempt=last.attempt, reason=reason)
    return load(tx, row)


def load_all(tx: Transaction, rows: Sequence[models.Evaluation]) -> tuple[Evaluation, ...]:
    """Return the records of evaluations as of the position of the transaction."""
    attempts: dict[str, int] = {}
    ids = [row.id for row in rows]
    for start in range(0, len(ids), 500):
        lease = models.Lease
        statement = select(lease).where(lease.evaluation_id.in_(ids[start : start + 500])).order_by(lease.number)
        attempts |= {found.evaluation_id: found.attempt for found in tx.session.scalars(statement)}
    return tuple(load(tx, row, attempt=attempts[row.id]) for row in rows)


def load(tx: Transaction, row: models.Evaluation, *, attempt: int | None = None) -> Evaluation:
    """Return the record of an evaluation as of the position of the transaction; `attempt` where the last one is known."""
    settled = row.settled_seq is not None and row.settled_seq <= tx.horizon
    result: Settlement | None = None
    if settled:
        hashed = {"evidence": json.loads(tx.text(row.evidence_hash)), "log_tail": tx.text(row.log_tail_hash)}
        names = [name for name in fields_of(Settlement(outcome="")) if name not in hashed]
        result = Settlement(**hashed, **{name: getattr(row, name) for name in names})
    return tx.load(
        EVALUATIONS,
        row,
        state="settled" if settled else "reserved",
        settled_seq=row.settled_seq if settled else None,
        result=result,
        attempt=_last_lease(tx, row.id).attempt if attempt is None else attempt,
    )


def _check_links(tx: Transaction, new: NewEvaluation) -> None:
    if (new.kind == "control") != (new.control_id is not None):
        raise LedgerRefused(
            f"an evaluation of kind {new.kind!r} with control_id={new.control_id!r}; controls, and only they, have one"
        )
    if new.program_id is None and new.kind != "setup":
        raise LedgerRefused(
            f"an evaluation of kind {new.kind!r} needs a program; only 'setup' may measure the bare subject"
        )
    if new.control_id is not None:
        control = tx.get(CONTROLS, new.control_id)
        if control.program_id is not None and control.program_id != new.program_id:
            raise LedgerRefused(f"{control.id} was registered with {control.program_id}, not with {new.program_id}")
        if new.observation_id not in (None, control.observation_id):
            raise LedgerRefused(f"{control.id} belongs to {control.observation_id}, not to {new.observation_id}")
        _check_unknown(tx, new, control.id)


def _check_unknown(tx: Transaction, new: NewEvaluation, control_id: str) -> None:
    """Refuse a control whose program was measured, on this split and draw, before the control's predictions were registered.

    One control may serve several observations, but only where all their predictions for it are older than its first result.
    """
    run, measured, own = models.Evaluation, aliased(models.Program), aliased(models.Program)
    earlier = tx.session.execute(
        select(run.id, run.settled_seq)
        .join(measured, measured.id == run.program_id)
        .join(own, own.id == new.program_id)
        .where(or_(measured.ast_hash == own.ast_hash, measured.normalized_ast_hash == own.normalized_ast_hash))
        .where(run.split == new.split, run.draw == new.draw, run.settled_seq.is_not(None))
        .order_by(run.settled_seq)
    ).first()
    if earlier is None:
        return
    last = tx.session.scalar(select(func.max(models.Prediction.seq)).where(models.Prediction.control_id == control_id))
    if last is not None and earlier.settled_seq < last:
        raise LedgerRefused(
            f"{earlier.id} had measured the program of {control_id} on the {new.split} split, draw {new.draw}, before the "
            "predictions for it were registered; what is known is never evidence"
        )


def _check_result(evaluation_id: str, result: Settlement) -> None:
    if result.is_scored != bool(result.chunk_nll):
        raise LedgerValueError(
            f"{evaluation_id}: outcome {result.outcome!r} with {len(result.chunk_nll)} chunk losses; "
            "a scored evaluation has some, a failed one has none"
        )
    if result.reference_chunk_nll and len(result.reference_chunk_nll) != len(result.chunk_nll):
        raise LedgerValueError(
            f"{evaluation_id}: {len(result.chunk_nll)} chunk losses beside {len(result.reference_chunk_nll)} "
            "of the reference"
        )


def _capped(content: dict[str, Any]) -> dict[str, Any]:
    """Make fit for storage what a program can make long or odd: its own words and its log of calls."""
    content["reason"] = clean_text(content["reason"])[:MAX_REASON_CHARACTERS]
    content["log_tail"] = clean_text(content["log_tail"])[-MAX_LOG_CHARACTERS:]
    content["chunk_nll"] = tuple(float(value) for value in content["chunk_nll"])
    content["reference_chunk_nll"] = tuple(float(value) for value in content["reference_chunk_nll"])
    content["evidence"] = fit_evidence(content["evidence"])
    return content


def _stored(tx: Transaction, evaluation_id: str) -> models.Evaluation:
    """Return a row wherever the position is: what a call is about does not depend on how far a replay has come."""
    row = tx.session.get(models.Evaluation, evaluation_id)
    if row is None:
        raise LedgerNotFound(f"evaluations has no record {evaluation_id!r}")
    return row


def _last_lease(tx: Transaction, evaluation_id: str) -> models.Lease:
    statement = select(models.Lease).where(models.Lease.evaluation_id == evaluation_id)
    row = tx.session.scalars(statement.order_by(models.Lease.number.desc()).limit(1)).first()
    assert row is not None, f"{evaluation_id} has no lease"
    return row


def _add_lease(
    tx: Transaction, evaluation_id: str, owner: Owner, *, action: str, attempt: int, reason: str = ""
) -> None:
    tx.session.add(
        models.Lease(
            evaluation_id=evaluation_id,
            attempt=attempt,
            action=action,
            owner=owner.token,
            pid=owner.pid,
            boot_id=owner.boot_id,
            reason=clean_text(reason)[:MAX_REASON_CHARACTERS],
            at=datetime.now(UTC),
        )
    )
    tx.session.flush()
