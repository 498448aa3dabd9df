"""Reading a ledger of an older schema without touching it: a copy is brought to this version and read instead."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hypotheses.ledger import schema
from hypotheses.ledger.blob_files import BlobFiles
from hypotheses.ledger.database import connect_reader, translated
from hypotheses.ledger.ledger import Ledger


@contextmanager
def open_to_read(path: Path) -> Iterator[Ledger]:
    """Open a ledger read-only, whichever schema version it has; one of an older version stays as it is.

    Raises:
        LedgerNotFound: no file.
        LedgerSchemaError: no ledger, or one of a newer schema.
        LedgerStorageError: there is no room for the copy.
    """
    if not 0 < schema.version_of(path) < schema.SCHEMA_VERSION:
        with Ledger.open(path, read_only=True) as ledger:
            yield ledger
        return
    with tempfile.TemporaryDirectory(prefix="quantforge-ledger-") as folder:
        copy = Path(folder) / path.name
        with translated(path), closing(connect_reader(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        texts, own = BlobFiles(path).folder, BlobFiles(copy).folder
        own.mkdir()
        for text in texts.glob("*.gz") if texts.is_dir() else ():
            (own / text.name).symlink_to(text)
        schema.migrate(copy)
        with Ledger.open(copy, read_only=True) as ledger:
            yield ledger
