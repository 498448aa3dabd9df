"""Column types and helpers of the tables: canonical JSON, UTC times, references.

`info={"hashed": False}` marks columns and tables that tell about the host or the clock rather than about the search.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Dialect, ForeignKey, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, mapped_column

from hypotheses.ledger.canonical import canonical_json
from hypotheses.ledger.errors import LedgerStorageError

NOT_HASHED = {"hashed": False}
HASHED_WHEN_SET = {"hashed": "when set"}
"""Of a column that a later version added: where it is NULL, the content hash is what it was without it."""


class JsonText(TypeDecorator[Any]):
    """A JSON value as canonical text. Lists come back as tuples, because records are frozen."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Return the canonical text."""
        return None if value is None else canonical_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Return the value; a list at the top (and pairs within it) as tuples."""
        if value is None:
            return None
        try:
            loaded = json.loads(value)
        except ValueError as err:
            raise LedgerStorageError(f"the ledger holds a value that is no JSON ({err}): {value[:80]!r}") from err
        if isinstance(loaded, list):
            return tuple(tuple(item) if isinstance(item, list) else item for item in loaded)
        return loaded


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time as ISO text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        """Return ISO text in UTC."""
        return None if value is None else value.astimezone(UTC).isoformat(timespec="microseconds")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:
        """Return an aware time."""
        return None if value is None else datetime.fromisoformat(value)


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {str: Text, datetime: UtcTime}


def seq_column(name: str = "seq") -> Any:
    """A place in the order of events; unique, and not part of the content."""
    return mapped_column(name, ForeignKey("events.seq"), unique=True, info=NOT_HASHED)


def json_column(*, nullable: bool = False, **kwargs: Any) -> Any:
    """A JSON value."""
    return mapped_column(JsonText, nullable=nullable, **kwargs)


def blob_column(*, nullable: bool = False, **kwargs: Any) -> Any:
    """The sha256 of a text in `blobs`."""
    return mapped_column(ForeignKey("blobs.hash"), nullable=nullable, **kwargs)


def ref_column(target: str, **kwargs: Any) -> Any:
    """The id of a row of another table."""
    return mapped_column(ForeignKey(f"{target}.id"), **kwargs)
