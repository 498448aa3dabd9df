"""The content hash: the same for two runs that searched in the same way.

sha256 over, for each table by name and each row by id, one line of canonical JSON with all columns except those that
tell about the clock, the host or the order of arrival (``hashed: False`` in `models`): times, process ids, boot ids,
leases with their attempts, wall seconds, devices and versions, logs, places in the order of events, failed calls to a
proposer. Texts enter by their own sha256. Ids come from natural keys, so the order of rows does not depend on when they
were written. Notes of the topic ``stopped`` tell of an outage and not of the search, and are left out as well.
"""

from __future__ import annotations

import hashlib

from sqlalchemy import select
from sqlalchemy.orm import Session

from hypotheses.ledger.canonical import canonical_json
from hypotheses.ledger.columns import Base
from hypotheses.ledger.models import Note
from hypotheses.ledger.records import STOPPED


def content_hash(session: Session) -> str:
    """Return the hash of the whole ledger, in hex."""
    digest = hashlib.sha256()
    for table in sorted(Base.metadata.tables.values(), key=lambda table: table.name):
        if not table.info.get("hashed", True):
            continue
        columns = sorted((c for c in table.columns if c.info.get("hashed", True)), key=lambda column: column.name)
        digest.update(f"{table.name}\n".encode())
        rows = select(*columns).order_by(table.c.id)
        if table is Note.__table__:
            rows = rows.where(table.c.topic != STOPPED)
        for row in session.execute(rows):
            content = {
                column.name: value
                for column, value in zip(columns, row, strict=True)
                if value is not None or column.info.get("hashed") != "when set"
            }
            line = canonical_json(content, name=table.name)
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()
