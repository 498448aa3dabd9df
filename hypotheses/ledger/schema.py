"""Schema: version, triggers, creation and migration.

The rules that make the record worth something are triggers, so that they hold for every connection and not only for
this code: what is registered or settled is never changed or removed, a control is never evaluated before its
predictions are registered, and no evaluation is reserved beyond the budget. `INSERT OR REPLACE` would delete without
firing a delete trigger, so inserting over an existing key is refused as well.

To change the schema: raise `SCHEMA_VERSION`, and append to `migrations.MIGRATIONS` a function that brings a file from the
version before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection

from hypotheses.ledger.blob_files import BlobFiles
from hypotheses.ledger.columns import Base
from hypotheses.ledger.database import connect_reader, connect_writer, translated
from hypotheses.ledger.errors import LedgerNotFound, LedgerSchemaError
from hypotheses.ledger.migrations import MIGRATIONS, Migration
from hypotheses.ledger.models import Evaluation

SCHEMA_VERSION = 3
APPLICATION_ID = 0x51464C44  # "QFLD", in the header of the file

_RESERVATION = (
    "id", "reserved_seq", "kind", "program_id", "split", "draw", "seed", "control_id", "observation_id",
    "reference_artifact", "turn",
)  # fmt: skip


def create(connection: Connection) -> None:
    """Make all tables, triggers and views in the open transaction."""
    Base.metadata.create_all(connection)
    for statement in schema_statements():
        connection.exec_driver_sql(statement)
    stamp = (SCHEMA_VERSION, datetime.now(UTC).isoformat())
    connection.exec_driver_sql("INSERT INTO schema_versions (version, applied_at) VALUES (?, ?)", stamp)
    connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")


def schema_statements() -> list[str]:
    """Return the SQL of every trigger and view."""
    statements: list[str] = []
    for table in sorted(Base.metadata.tables.values(), key=lambda table: table.name):
        name = table.name
        refuse = f"BEGIN SELECT RAISE(ABORT, 'ledger: rows of {name} are never %s'); END"
        statements.append(f"CREATE TRIGGER {name}_no_delete BEFORE DELETE ON {name} {refuse % 'deleted'}")
        if table is not Evaluation.__table__:
            statements.append(f"CREATE TRIGGER {name}_no_update BEFORE UPDATE ON {name} {refuse % 'changed'}")
        unique = [column.name for column in table.columns if column.primary_key or column.unique]
        same = " OR ".join(f"{column} = NEW.{column}" for column in unique)
        statements.append(
            f"CREATE TRIGGER {name}_no_replace BEFORE INSERT ON {name} "
            f"WHEN EXISTS (SELECT 1 FROM {name} WHERE {same}) {refuse % 'replaced'}"
        )
    moved = " OR ".join(f"NEW.{column} IS NOT OLD.{column}" for column in _RESERVATION)
    statements += [
        "CREATE TRIGGER evaluations_settle_once BEFORE UPDATE ON evaluations WHEN OLD.state <> 'reserved' "
        "BEGIN SELECT RAISE(ABORT, 'ledger: a settled evaluation is never changed'); END",
        f"CREATE TRIGGER evaluations_settle_only BEFORE UPDATE ON evaluations WHEN NEW.state <> 'settled' OR {moved} "
        "BEGIN SELECT RAISE(ABORT, 'ledger: a reserved evaluation can only be settled'); END",
        "CREATE TRIGGER evaluations_start_reserved BEFORE INSERT ON evaluations WHEN NEW.state <> 'reserved' "
        "BEGIN SELECT RAISE(ABORT, 'ledger: an evaluation is reserved before it is settled'); END",
        "CREATE TRIGGER evaluations_control_registered BEFORE INSERT ON evaluations WHEN NEW.kind = 'control' "
        "AND NOT EXISTS (SELECT 1 FROM predictions WHERE control_id = NEW.control_id "
        "AND registered_seq < NEW.reserved_seq) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: a control is evaluated only after its predictions are registered'); END",
        "CREATE TRIGGER evaluations_control_unknown BEFORE INSERT ON evaluations WHEN NEW.kind = 'control' "
        "AND EXISTS (SELECT 1 FROM predictions p JOIN programs a ON a.id = NEW.program_id JOIN programs b "
        "ON b.ast_hash = a.ast_hash OR b.normalized_ast_hash = a.normalized_ast_hash JOIN evaluations k "
        "ON k.program_id = b.id AND k.split = NEW.split AND k.draw = NEW.draw "
        "WHERE p.control_id = NEW.control_id AND k.settled_seq < p.registered_seq) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: this program was measured before its predictions were registered'); END",
        "CREATE TRIGGER evaluations_within_budget BEFORE INSERT ON evaluations WHEN NEW.kind <> 'setup' AND "
        "(SELECT count(*) FROM evaluations WHERE kind <> 'setup') >= (SELECT coalesce(max(budget), 0) FROM campaign) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: no evaluator call is free'); END",
        "CREATE TRIGGER predictions_before_control BEFORE INSERT ON predictions WHEN EXISTS "
        "(SELECT 1 FROM evaluations WHERE control_id = NEW.control_id) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: this control was evaluated; what is known is never predicted'); END",
        "CREATE TRIGGER campaign_is_one BEFORE INSERT ON campaign WHEN EXISTS (SELECT 1 FROM campaign) "
        "BEGIN SELECT RAISE(ABORT, 'ledger: a ledger holds one campaign'); END",
        "CREATE VIEW budget AS SELECT total, used, reserved, total - used - reserved AS free, setup FROM (SELECT "
        "(SELECT max(budget) FROM campaign) AS total, "
        "(SELECT count(*) FROM evaluations WHERE kind <> 'setup' AND state = 'settled') AS used, "
        "(SELECT count(*) FROM evaluations WHERE kind <> 'setup' AND state = 'reserved') AS reserved, "
        "(SELECT count(*) FROM evaluations WHERE kind = 'setup') AS setup)",
    ]  # fmt: skip
    return statements


def version_of(path: Path) -> int:
    """Return the schema version of a ledger file; 0 for an empty file, which a killed creation may leave.

    Raises:
        LedgerNotFound: no file.
        LedgerSchemaError: the file is something else, or newer than this version of the software.
    """
    if not path.is_file():
        raise LedgerNotFound(f"no ledger at {str(path)!r}")
    with translated(path):
        connection = connect_reader(path)
        try:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            application = int(connection.execute("PRAGMA application_id").fetchone()[0])
            num_tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        finally:
            connection.close()
    if num_tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise LedgerSchemaError(f"{str(path)!r} is a SQLite file, but no ledger of QuantForge")
    if version > SCHEMA_VERSION:
        raise LedgerSchemaError(
            f"{str(path)!r} has schema version {version}; this QuantForge reads up to {SCHEMA_VERSION}, "
            "install a newer one"
        )
    return version


def migrate(path: Path, *, target: int = SCHEMA_VERSION, steps: Mapping[int, Migration] = MIGRATIONS) -> None:
    """Bring an older ledger to `target`: a copy beside it first, then each step in a transaction of its own.

    Raises:
        LedgerSchemaError: a step is missing, or leaves a row that names nothing. The file is unchanged.
        LedgerStorageError: there is no room for the copy or for what the step writes. The file is unchanged.
    """
    files = BlobFiles(path)
    with translated(path):
        connection = connect_writer(path)
        try:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            missing = [number for number in range(version + 1, target + 1) if number not in steps]
            if missing:
                raise LedgerSchemaError(f"{str(path)!r} has schema version {version}; no step leads to {missing[0]}")
            if version < target:
                _back_up(connection, path.with_name(f"{path.name}.v{version}.backup"))
            # A table is rebuilt by dropping the old one, which foreign keys in force would forbid; no effect inside BEGIN.
            connection.execute("PRAGMA foreign_keys=OFF")
            for number in range(version + 1, target + 1):
                connection.execute("BEGIN IMMEDIATE")
                try:
                    steps[number](connection, files)
                    broken = connection.execute("PRAGMA foreign_key_check").fetchone()
                    if broken is not None:
                        raise LedgerSchemaError(
                            f"{str(path)!r}: version {number} cannot be reached, because row {broken[1]} of {broken[0]} "
                            f"names a record of {broken[2]} that does not exist; restore it from a copy"
                        )
                    stamp = (number, datetime.now(UTC).isoformat())
                    connection.execute("INSERT INTO schema_versions (version, applied_at) VALUES (?, ?)", stamp)
                    connection.execute(f"PRAGMA user_version={number}")
                    connection.execute("COMMIT")
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
        finally:
            connection.close()


def _back_up(connection: sqlite3.Connection, copy: Path) -> None:
    """Copy the database; an existing copy is the older and truer one and stays."""
    if copy.exists():
        return
    unfinished = copy.with_name(copy.name + ".part")
    target = sqlite3.connect(unfinished)
    try:
        connection.backup(target)
    finally:
        target.close()
    unfinished.replace(copy)
