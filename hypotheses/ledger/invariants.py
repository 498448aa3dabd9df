"""What must hold in every ledger at every moment, as SQL that anyone can run: each query selects what breaks it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from hypotheses.ledger.blob_files import BlobFiles
from hypotheses.ledger.canonical import make_id, text_hash
from hypotheses.ledger.columns import Base
from hypotheses.ledger.errors import LedgerStorageError
from hypotheses.ledger.models import Blob, Evaluation, Event
from hypotheses.ledger.tables import ALL, EVALUATIONS, Table


class Invariant(NamedTuple):
    """A sentence with what the query selects filled in, and the query."""

    sentence: str
    query: str


INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "budget: {0} used + {1} reserved exceed the budget of {2}",
        "SELECT used, reserved, total FROM budget WHERE free < 0 OR used + reserved + free <> total",
    ),
    Invariant(
        "prediction {0} was registered at {1}, not before its control's evaluation {2} was reserved at {3}",
        "SELECT p.id, p.registered_seq, e.id, e.reserved_seq FROM predictions p JOIN evaluations e "
        "ON e.control_id = p.control_id WHERE p.registered_seq >= e.reserved_seq ORDER BY p.registered_seq",
    ),
    Invariant(
        "prediction {0} for control {1} was registered at {2}, when {3} had measured the same program on the same split "
        "and draw",
        "SELECT p.id, p.control_id, p.registered_seq, k.id FROM predictions p JOIN evaluations e "
        "ON e.control_id = p.control_id JOIN programs a ON a.id = e.program_id JOIN programs b "
        "ON b.ast_hash = a.ast_hash OR b.normalized_ast_hash = a.normalized_ast_hash JOIN evaluations k "
        "ON k.program_id = b.id AND k.split = e.split AND k.draw = e.draw AND k.id <> e.id "
        "WHERE k.settled_seq < p.registered_seq ORDER BY p.registered_seq",
    ),
    Invariant(
        "evaluation {0} of control {1} has no prediction of hypothesis {2}, registered before it in the same round",
        "SELECT e.id, c.id, h.id FROM evaluations e JOIN controls c ON c.id = e.control_id JOIN hypotheses h "
        "ON h.observation_id = c.observation_id AND h.round <= c.round LEFT JOIN predictions p "
        "ON p.control_id = c.id AND p.hypothesis_id = h.id WHERE p.id IS NULL AND NOT EXISTS (SELECT 1 FROM hypotheses n "
        "WHERE n.predecessor_id = h.id AND n.round <= c.round) "
        "ORDER BY e.reserved_seq, h.registered_seq",
    ),
    Invariant(
        "evaluation {0} measures {1}, its control {2} was registered with {3}",
        "SELECT e.id, e.program_id, c.id, c.program_id FROM evaluations e JOIN controls c ON c.id = e.control_id "
        "WHERE c.program_id IS NOT NULL AND c.program_id <> e.program_id ORDER BY e.reserved_seq",
    ),
    Invariant(
        "evaluation {0} names observation {1}, its control belongs to {2}",
        "SELECT e.id, e.observation_id, c.observation_id FROM evaluations e JOIN controls c ON c.id = e.control_id "
        "WHERE e.observation_id IS NOT NULL AND e.observation_id <> c.observation_id ORDER BY e.reserved_seq",
    ),
    Invariant(
        "hypothesis {0} of round {1} names {2} as its predecessor, no earlier hypothesis of its observation",
        "SELECT h.id, h.round, h.predecessor_id FROM hypotheses h LEFT JOIN hypotheses p ON p.id = h.predecessor_id "
        "AND p.observation_id = h.observation_id AND p.round < h.round WHERE p.id IS NULL "
        "AND (h.round > 0 OR h.predecessor_id IS NOT NULL) ORDER BY h.registered_seq",
    ),
    Invariant(
        "prediction {0} joins a hypothesis and a control of two observations",
        "SELECT p.id FROM predictions p JOIN hypotheses h ON h.id = p.hypothesis_id "
        "JOIN controls c ON c.id = p.control_id "
        "WHERE h.observation_id <> c.observation_id OR p.observation_id <> c.observation_id ORDER BY p.registered_seq",
    ),
    Invariant(
        "observation {0} rests on {1}, which is no scored confirmation of its program",
        "SELECT o.id, e.id FROM observations o JOIN evaluations e ON e.id = o.confirmation_id "
        "WHERE e.kind <> 'confirmation' OR e.outcome IS NOT 'scored' "
        "OR e.program_id <> o.program_id OR e.settled_seq > o.seq ORDER BY o.seq",
    ),
    Invariant(
        "incumbent {0} was promoted on {1}, which is no scored evaluation of its program",
        "SELECT i.program_id, e.id FROM incumbents i JOIN evaluations e ON e.id = i.evaluation_id "
        "WHERE e.outcome IS NOT 'scored' OR e.program_id <> i.program_id OR e.settled_seq > i.seq ORDER BY i.seq",
    ),
    Invariant(
        "verdict {0} says {1}, but no control of its observation was settled before it",
        "SELECT v.id, v.status FROM verdicts v WHERE v.status IN ('supported', 'refuted') AND NOT EXISTS (SELECT 1 "
        "FROM evaluations e JOIN controls c ON c.id = e.control_id WHERE c.observation_id = v.observation_id "
        "AND e.outcome = 'scored' AND e.settled_seq < v.seq) ORDER BY v.seq",
    ),
    Invariant(
        "lineage {0} has {1} open blocking required edits",
        "SELECT r.lineage, count(*) FROM required_edits r JOIN required_edit_states s ON s.seq = (SELECT max(seq) "
        "FROM required_edit_states WHERE edit_id = r.id) WHERE r.blocking "
        "AND s.state IN ('open', 'attempted', 'refused') GROUP BY r.lineage HAVING count(*) > 1 ORDER BY r.lineage",
    ),
    Invariant(
        "required edit {0} is discharged without evidence of a probe from a paid evaluation",
        "SELECT s.edit_id FROM required_edit_states s WHERE s.state = 'discharged' AND NOT EXISTS (SELECT 1 "
        "FROM probe_results p JOIN evaluations e ON e.id = p.evaluation_id WHERE p.target_id = s.edit_id "
        "AND NOT p.provisional AND e.kind <> 'setup' AND e.settled_seq < s.seq) ORDER BY s.seq",
    ),
    Invariant(
        "evaluation {0} has no lease", "SELECT id FROM evaluations WHERE id NOT IN (SELECT evaluation_id FROM leases)"
    ),
    Invariant("row {1} of table {0} names a record of {2} that does not exist", "PRAGMA foreign_key_check"),
    Invariant("the file is damaged: {0}", "SELECT * FROM pragma_quick_check WHERE quick_check <> 'ok'"),
)


def violations(session: Session, files: BlobFiles) -> list[str]:
    """Return one sentence for each violation, in the order of `INVARIANTS`; then those of events, texts and keys."""
    found = [
        invariant.sentence.format(*row) for invariant in INVARIANTS for row in session.execute(text(invariant.query))
    ]
    found += [
        f"{table.name} has {count} rows whose event is missing or tells of another record"
        for table in sorted(Base.metadata.tables.values(), key=lambda table: table.name)
        if "id" in table.c
        for column in table.columns
        if column.name in ("seq", "registered_seq", "reserved_seq", "settled_seq")
        for count in session.execute(
            text(
                f"SELECT count(*) FROM {table.name} t LEFT JOIN events e ON e.seq = t.{column.name} "
                f"WHERE t.{column.name} IS NOT NULL AND (e.seq IS NULL OR e.ref <> t.id)"
            )
        ).scalars()
        if count
    ]
    found += list(_missing_rows(session))
    for blob in session.scalars(select(Blob).order_by(Blob.hash)).yield_per(50):
        if blob.text is None:
            try:
                files.read(blob.hash)
            except LedgerStorageError as err:
                found.append(str(err))
        elif text_hash(blob.text) != blob.hash:
            found.append(f"the text stored under {blob.hash} was altered")
    return found + list(_altered_rows(session, files))


def _missing_rows(session: Session) -> Iterator[str]:
    """Yield events whose record is gone, and gaps in the order of events, which has none."""
    for table in ALL:
        name, kinds = table.model.__tablename__, [table.event]
        if table is EVALUATIONS:
            kinds.append("evaluation_settled")
        query = select(Event).where(Event.kind.in_(kinds), Event.ref.not_in(select(table.model.id))).order_by(Event.seq)
        for event in session.scalars(query):
            yield f"event {event.seq} tells of {event.ref}, which {name} does not hold"
    first, last, count = session.execute(select(func.min(Event.seq), func.max(Event.seq), func.count())).one()
    if count and last - first + 1 != count:
        yield f"{last - first + 1 - count} events between {first} and {last} are missing"


def _altered_rows(session: Session, files: BlobFiles) -> Iterator[str]:
    """Yield rows that are no longer what their ids were made of, and means that are none."""
    for table in ALL:
        for row in session.scalars(select(table.model).order_by(table.model.seq)).yield_per(200):
            try:
                key = [_key_part(session, files, table, row, name) for name in table.key]
            except LedgerStorageError:  # told of already
                continue
            if make_id(table.tag, *key) != row.id:
                yield f"{row.id} of {row.__tablename__} was altered: its id was made from another {', '.join(table.key)}"
    for evaluation in session.scalars(select(Evaluation).order_by(Evaluation.seq)).yield_per(200):
        try:
            chunks = evaluation.chunk_nll or ()
            mean = math.fsum(chunks) / len(chunks) if chunks else None
        except (TypeError, ValueError):
            yield f"evaluation {evaluation.id} holds losses of chunks that are no numbers"
            continue
        told = evaluation.nll
        # Versions of Python and of this package add up in different ways.
        if (told is None) != (mean is None) or (told is not None and not math.isclose(told, mean or 0.0, rel_tol=1e-9)):
            yield f"evaluation {evaluation.id} tells of {told} nats per token, its chunks of {mean}"


def _key_part(session: Session, files: BlobFiles, table: Table[Any], row: Any, name: str) -> Any:
    if name not in table.texts:
        return getattr(row, name)
    digest = getattr(row, f"{name}_hash")
    blob = session.get(Blob, digest)
    return files.read(digest) if blob is None or blob.text is None else blob.text
