"""Connections, transactions and the translation of driver errors.

Two engines on one file. The writer has one connection in WAL mode and starts every transaction with ``BEGIN
IMMEDIATE``, so that a transaction never has to be upgraded while it holds a snapshot; ``synchronous=FULL`` makes a
commit survive a power cut. Readers open the file with ``mode=ro`` and see the snapshot of their transaction; in WAL
mode neither waits for the other.

The write-ahead log is folded into the file every `WAL_PAGES` pages and then written from its start again. A reader that
holds a transaction open keeps it growing meanwhile; with the first commits after that reader is gone it is cut back to
`WAL_LIMIT_BYTES`.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from hypotheses.ledger.blob_files import BlobFiles
from hypotheses.ledger.errors import (
    LedgerBusy,
    LedgerError,
    LedgerRefused,
    LedgerSchemaError,
    LedgerStorageError,
)
from hypotheses.ledger.transaction import END, Transaction

BUSY_TIMEOUT_S = 30.0
_COMPILED: dict[Any, Any] = {}
"""Statements, compiled; there are as many as the code has."""
WAL_PAGES = 1000
WAL_LIMIT_BYTES = 4 << 20
"""What `WAL_PAGES` pages take; a log that grew beyond it is cut."""


def file_uri(path: Path, *, options: str) -> str:
    """Return the SQLite URI of a file."""
    return f"file:{quote(str(path.absolute()))}?{options}"


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a ledger file for reading only.

    On read-only media the wal index cannot be made; without pending frames the file then counts as immutable.
    """
    connection = _connect(file_uri(path, options="mode=ro"))
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as err:
        connection.close()
        wal = path.with_name(path.name + "-wal")
        unwritable = str(getattr(err, "sqlite_errorname", "")).startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
        if not unwritable or not path.exists() or (wal.exists() and wal.stat().st_size > 0):
            raise
        connection = _connect(file_uri(path, options="mode=ro&immutable=1"))
    return connection


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open a ledger file for writing, creating it when it is missing."""
    connection = _connect(file_uri(path, options="mode=rwc"))
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA recursive_triggers=ON")
    connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit={WAL_LIMIT_BYTES}")
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    # isolation_level=None: transactions are begun here and not by the driver.
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and SQLAlchemy into errors of the ledger."""
    try:
        yield
    except DBAPIError as err:
        original = err.orig if isinstance(err.orig, sqlite3.Error) else sqlite3.Error(str(err.orig))
        raise _translation(path, original, integrity=isinstance(err, IntegrityError)) from err
    except sqlite3.Error as err:
        raise _translation(path, err, integrity=isinstance(err, sqlite3.IntegrityError)) from err


def _translation(path: Path, err: sqlite3.Error, *, integrity: bool) -> LedgerError:
    if integrity:
        return LedgerRefused(str(err).removeprefix("ledger: "))
    name = getattr(err, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return LedgerBusy(f"{str(path)!r} was locked for more than {BUSY_TIMEOUT_S:.0f} s by another process")
    if name.startswith("SQLITE_NOTADB"):
        return LedgerSchemaError(f"{str(path)!r} is no ledger: it is not a SQLite file")
    repairs = {
        "SQLITE_FULL": "the disk is full; make room and resume, nothing recorded so far is lost",
        "SQLITE_READONLY_DBMOVED": "the file was moved or removed while it was open; nothing more can be recorded",
        "SQLITE_READONLY": "the file or its folder is read-only; make it writable, or open the ledger read-only",
        "SQLITE_IOERR": "the disk gave an input/output error; nothing of this step was stored",
        "SQLITE_CORRUPT": "the file is damaged; restore it from a copy",
        "SQLITE_CANTOPEN": "the file cannot be opened; check that it exists and who may read it",
    }
    for prefix, repair in repairs.items():
        if name.startswith(prefix):
            return LedgerStorageError(f"{str(path)!r}: {repair}")
    return LedgerError(f"{str(path)!r}: {err}")


class Database:
    """Both engines of one file. Writes of this process queue at a lock, which is fairer than SQLite's waiting."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path.absolute()  # what it is now, wherever the process goes
        self.files = BlobFiles(self.path)
        self._writing = threading.Lock()
        self._is_closed = False
        self._identity: tuple[int, int] | None = None
        self._reader = _engine(lambda: connect_reader(self.path), max_overflow=-1)
        event.listen(self._reader, "begin", _begin("BEGIN"))
        self._writer: Engine | None = None
        if not read_only:
            self._writer = _engine(self._connect_writer, pool_size=1, max_overflow=0)
            event.listen(self._writer, "begin", _begin("BEGIN IMMEDIATE"))

    @contextmanager
    def write(self, *, as_of: int = END) -> Iterator[Transaction]:
        """One write transaction: committed at the end, rolled back on any exception.

        Raises:
            LedgerRefused: opened read-only, closed, or a trigger or constraint forbids the write.
            LedgerStorageError: the disk failed, or the file is no longer where it was.
        """
        if self._writer is None:
            raise LedgerRefused(f"{str(self.path)!r} was opened read-only")
        with self._writing:
            self._require_open()
            with translated(self.path), Session(self._writer) as session, session.begin():
                yield Transaction(session, self.files, as_of=as_of)
                session.flush()  # connects, if nothing else did yet
                self._require_same_file()

    @contextmanager
    def read(self, *, as_of: int = END) -> Iterator[Transaction]:
        """One consistent snapshot; the writer is not held up by it."""
        self._require_open()
        with translated(self.path), Session(self._reader) as session:
            yield Transaction(session, self.files, as_of=as_of)

    def close(self) -> None:
        """Wait for a write in progress, then close all connections; the last one folds the log into the file.

        Later calls are refused: the run lock is about to be given back, and a connection made now would write without it.
        """
        with self._writing:
            self._is_closed = True
            self._reader.dispose()
            if self._writer is not None:
                self._writer.dispose()

    def _connect_writer(self) -> sqlite3.Connection:
        connection = connect_writer(self.path)
        self._identity = self._identity or _identity(self.path)
        return connection

    def _require_open(self) -> None:
        if self._is_closed:
            raise LedgerRefused(f"{str(self.path)!r} was closed; open it again")

    def _require_same_file(self) -> None:
        """Refuse to commit into a file that has no name any more: SQLite would go on without an error, and all be lost."""
        try:
            identity = _identity(self.path)
        except OSError as err:
            raise LedgerStorageError(
                f"{str(self.path)!r} was removed while it was open ({err.strerror}); nothing more can be recorded"
            ) from err
        if self._identity not in (None, identity):
            raise LedgerStorageError(
                f"{str(self.path)!r} was replaced by another file while it was open; nothing more can be recorded"
            )


@functools.cache
def _first_engine() -> Engine:
    """An engine that has met SQLite; its dialect, for which statements are compiled, serves all others."""
    engine = create_engine("sqlite://")
    engine.connect().close()
    return engine


def _engine(connect: Callable[[], sqlite3.Connection], **options: int) -> Engine:
    """Return an engine that shares compiled statements with all others: else every opening compiles each of them anew."""
    first = _first_engine()
    pool = QueuePool(connect, dialect=first.dialect, **options)  # type: ignore[arg-type]
    return Engine(pool, first.dialect, first.url, execution_options={"compiled_cache": _COMPILED})


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _begin(statement: str) -> Callable[[Connection], None]:
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(statement)

    return begin
