"""One transaction on the ledger: idempotent inserts, reads as of a position, texts.

`insert` is what makes a replay safe: a record whose natural key is stored already is compared with what is given now.
The same content gives back the stored record and writes nothing; other content is a `LedgerConflict` that names each
field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Float, select
from sqlalchemy.orm import Session

from hypotheses.ledger import models
from hypotheses.ledger.blob_files import MAX_INLINE_BYTES, MAX_TEXT_BYTES, BlobFiles
from hypotheses.ledger.canonical import canonical_json, make_id, text_hash
from hypotheses.ledger.errors import LedgerConflict, LedgerNotFound, LedgerStorageError, LedgerValueError
from hypotheses.ledger.tables import R, Table

END = 2**62
"""A position after every event: reads see everything."""


class Transaction:
    """A session with a position.

    `rows` and what builds on it see events up to `horizon`: the position `as_of` at the start, or the last event that
    this transaction wrote or met (`touched`), whichever is later. Inserts and `find` see everything.
    """

    def __init__(self, session: Session, files: BlobFiles, *, as_of: int = END) -> None:
        self.session = session
        self.files = files
        self.as_of = as_of
        self.touched = 0
        self._fetched: list[Any] = []

    @property
    def horizon(self) -> int:
        """The last visible event."""
        return max(self.as_of, self.touched)

    def touch(self, seq: int) -> None:
        """Count an event as met."""
        self.touched = max(self.touched, seq)

    def event(self, kind: str, ref: str) -> int:
        """Take the next place in the order of events."""
        row = models.Event(kind=kind, ref=ref, at=datetime.now(UTC))
        self.session.add(row)
        self.session.flush()
        self.touch(row.seq)
        return row.seq

    def put_text(self, text: str, *, name: str) -> str:
        """Store a text under its sha256, once, and return the hash. A long one is in its file before its row is written.

        Raises:
            LedgerValueError: more than `MAX_TEXT_BYTES` of UTF-8, or a lone surrogate.
            LedgerStorageError: its file cannot be written.
        """
        digest = text_hash(text)
        is_long = keep_if_long(self.files, text, name=name)
        if self.session.get(models.Blob, digest) is None:
            self.session.add(models.Blob(hash=digest, text=None if is_long else text))
            self.session.flush()
        return digest

    def text(self, digest: str | None) -> str:
        """Return a stored text; the empty text for None."""
        if digest is None:
            return ""
        blob = self.session.get(models.Blob, digest)
        if blob is None:
            raise LedgerNotFound(f"no text with the hash {digest!r}")
        return self.files.read(digest) if blob.text is None else blob.text

    def columns(self, table: Table[Any], content: Mapping[str, Any], *, store: bool) -> dict[str, Any]:
        """Return column values for record fields; texts become hashes (stored if `store`), numbers are checked."""
        values: dict[str, Any] = {}
        for name, value in content.items():
            label = f"{table.event}.{name}"
            if name in table.texts or name in table.jsons:
                text = text_of(table, name, value)
                values[f"{name}_hash"] = self.put_text(text, name=label) if store else text_hash(text)
                continue
            if isinstance(value, str):
                value = str.__str__(value)
                if not value.isascii():
                    _check_unicode(value, label)
            elif isinstance(value, int) and isinstance(table.model.__table__.c[_column_name(table, name)].type, Float):
                value = float(value)
            canonical_json(value, name=label)
            values[name] = value
        return values

    def insert(self, table: Table[R], content: Mapping[str, Any], **extra: Any) -> R:
        """Insert a record, or return the equal one stored before. `extra` are record fields that are no columns."""
        row = self.insert_row(table, content)
        return self.load(table, row, **extra)

    def insert_row(self, table: Table[Any], content: Mapping[str, Any]) -> Any:
        """Insert a row, or return the equal one stored before.

        Raises:
            LedgerConflict: same key, other content.
            LedgerNotFound: a field names a record that does not exist.
        """
        row_id = make_id(table.tag, *(content[name] for name in table.key))
        row = self.session.get(table.model, row_id)
        if row is not None:
            self.compare(table, row, self.columns(table, content, store=False))
            self.touch(row.seq)
            return row
        values = self.columns(table, content, store=True)
        self._check_references(table, values)
        row = table.model(id=row_id, seq=self.event(table.event, row_id), **values)
        self.session.add(row)
        self.session.flush()
        self.session.refresh(row)
        return row

    def compare(self, table: Table[Any], row: Any, values: Mapping[str, Any]) -> None:
        """Raise `LedgerConflict` when the stored row differs from the values given."""
        differences = [
            f"{name}: stored {_short(getattr(row, name))}, given {_short(value)}"
            for name, value in values.items()
            if canonical_json(getattr(row, name)) != canonical_json(value)
        ]
        if differences:
            raise LedgerConflict(f"{row.id} was recorded with other content: {'; '.join(differences)}")

    def _check_references(self, table: Table[Any], values: Mapping[str, Any]) -> None:
        for column in table.model.__table__.columns:
            value = values.get(column.name)
            for key in column.foreign_keys:
                target = key.column.table
                if value is None or "id" not in target.c:
                    continue
                if self.session.execute(select(target.c.id).where(target.c.id == value)).first() is None:
                    raise LedgerNotFound(f"{table.event}.{column.name} is {value!r}; {target.name} has no such record")

    def load(self, table: Table[R], row: Any, **extra: Any) -> R:
        """Return the frozen record of a row."""
        values = dict(extra)
        for item in fields(table.record):
            if item.name in values:
                continue
            if item.name == "at":
                event = self.session.get(models.Event, row.seq)
                if event is None:
                    raise LedgerStorageError(
                        f"event {row.seq}, which tells of {row.id}, is missing: the ledger was altered"
                    )
                values["at"] = event.at
            elif item.name in table.texts:
                values[item.name] = self.text(getattr(row, f"{item.name}_hash"))
            elif item.name in table.jsons:
                values[item.name] = json.loads(self.text(getattr(row, f"{item.name}_hash")) or "{}")
            else:
                values[item.name] = getattr(row, item.name)
        return table.record(**values)

    def rows(self, table: Table[Any], **where: Any) -> list[Any]:
        """Return the rows visible at this position with the given column values (None: any), in order of events."""
        model = table.model
        statement = select(model).where(model.seq <= self.horizon).order_by(model.seq)
        for name, value in where.items():
            if value is not None:
                statement = statement.where(getattr(model, name) == value)
        found = list(self.session.scalars(statement))
        self._prefetch(table, found)
        return found

    def all(self, table: Table[R], **where: Any) -> tuple[R, ...]:
        """Return the records of `rows`."""
        return tuple(self.load(table, row) for row in self.rows(table, **where))

    def row(self, table: Table[Any], row_id: str) -> Any:
        """Return one visible row by id.

        Raises:
            LedgerNotFound: there is none at this position.
        """
        row = self.session.get(table.model, row_id)
        if row is None or row.seq > self.horizon:
            raise LedgerNotFound(f"{table.model.__tablename__} has no record {row_id!r}")
        return row

    def get(self, table: Table[R], row_id: str) -> R:
        """Return one visible record by id."""
        return self.load(table, self.row(table, row_id))

    def find(self, table: Table[R], *key: Any) -> R | None:
        """Return the record with this natural key wherever the position is, and count it as met."""
        row = self.session.get(table.model, make_id(table.tag, *key))
        if row is None:
            return None
        self.touch(row.seq)
        return self.load(table, row)

    def _prefetch(self, table: Table[Any], rows: list[Any]) -> None:
        """Load events and texts of many rows into the session at once, and hold them: a session keeps only what others hold."""
        hashes = {getattr(row, f"{name}_hash") for row in rows for name in (*table.texts, *table.jsons)} - {None}
        for column, keys in ((models.Event.seq, [row.seq for row in rows]), (models.Blob.hash, sorted(hashes))):
            for start in range(0, len(keys), 500):
                statement = select(column.class_).where(column.in_(keys[start : start + 500]))
                self._fetched += self.session.scalars(statement)


def text_of(table: Table[Any], name: str, value: Any) -> str:
    """Return a field that is kept as a text."""
    return canonical_json(value, name=f"{table.event}.{name}") if name in table.jsons else str(value)


def keep_if_long(files: BlobFiles, text: str, *, name: str) -> bool:
    """Write the file of a text that is too long for a row; return whether it is.

    Raises:
        LedgerValueError: more than `MAX_TEXT_BYTES` of UTF-8, or a lone surrogate.
        LedgerStorageError: the file cannot be written.
    """
    size = _check_unicode(text, name)
    if size > MAX_TEXT_BYTES:
        raise LedgerValueError(f"{name} has {size} bytes; the ledger keeps texts of up to {MAX_TEXT_BYTES} bytes")
    if size > MAX_INLINE_BYTES:
        files.keep(text, text_hash(text))
    return size > MAX_INLINE_BYTES


def _column_name(table: Table[Any], field: str) -> str:
    return str(getattr(table.model, field).property.columns[0].name)


def _check_unicode(text: str, name: str) -> int:
    """Return the number of UTF-8 bytes of a text."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as err:
        raise LedgerValueError(f"{name} is no valid Unicode text: {err.reason} at character {err.start}") from err


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
