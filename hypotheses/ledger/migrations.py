"""Steps that bring an older ledger to the next schema version.

A step is literal SQL: it must go on doing what it did when it was written, whatever becomes of the models. It runs inside
one transaction with foreign keys off, and they are checked before it is committed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

from hypotheses.ledger.blob_files import MAX_INLINE_BYTES, BlobFiles
from hypotheses.ledger.canonical import text_hash

Migration = Callable[[sqlite3.Connection, BlobFiles], None]


def move_long_texts_to_files(connection: sqlite3.Connection, files: BlobFiles) -> None:
    """Version 2: `blobs.text` may be NULL, and texts too long for a row lie in their files.

    A text whose hash is wrong stays in its row, where `invariants` go on reporting it.
    """
    connection.execute("CREATE TABLE blobs_2 (hash TEXT NOT NULL, text TEXT, PRIMARY KEY (hash))")
    is_long = f"length(CAST(text AS BLOB)) > {MAX_INLINE_BYTES}"
    connection.execute(f"INSERT INTO blobs_2 SELECT hash, text FROM blobs WHERE NOT ({is_long})")
    for digest, text in connection.execute(f"SELECT hash, text FROM blobs WHERE {is_long}"):
        moves = text_hash(text) == digest
        if moves:
            files.keep(text, digest)
        connection.execute("INSERT INTO blobs_2 (hash, text) VALUES (?, ?)", (digest, None if moves else text))
    connection.execute("DROP TABLE blobs")
    connection.execute("ALTER TABLE blobs_2 RENAME TO blobs")
    for rule, event, message in (("no_delete", "DELETE", "deleted"), ("no_update", "UPDATE", "changed")):
        connection.execute(
            f"CREATE TRIGGER blobs_{rule} BEFORE {event} ON blobs "
            f"BEGIN SELECT RAISE(ABORT, 'ledger: rows of blobs are never {message}'); END"
        )
    connection.execute(
        "CREATE TRIGGER blobs_no_replace BEFORE INSERT ON blobs "
        "WHEN EXISTS (SELECT 1 FROM blobs WHERE hash = NEW.hash) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: rows of blobs are never replaced'); END"
    )


def name_predecessors(connection: sqlite3.Connection, files: BlobFiles) -> None:
    """Version 3: a hypothesis may name the one that it revises, and no control is run whose result was known.

    Both hold from now on: what an older ledger holds is not judged by it again, other than by `invariants`.
    """
    connection.execute("ALTER TABLE hypotheses ADD COLUMN predecessor_id TEXT REFERENCES hypotheses (id)")
    connection.execute(
        "CREATE TRIGGER evaluations_control_unknown BEFORE INSERT ON evaluations WHEN NEW.kind = 'control' "
        "AND EXISTS (SELECT 1 FROM predictions p JOIN programs a ON a.id = NEW.program_id JOIN programs b "
        "ON b.ast_hash = a.ast_hash OR b.normalized_ast_hash = a.normalized_ast_hash JOIN evaluations k "
        "ON k.program_id = b.id AND k.split = NEW.split AND k.draw = NEW.draw "
        "WHERE p.control_id = NEW.control_id AND k.settled_seq < p.registered_seq) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: this program was measured before its predictions were registered'); END"
    )


MIGRATIONS: Mapping[int, Migration] = {2: move_long_texts_to_files, 3: name_predecessors}
"""By the version they lead to; version 1 is the first there was."""
