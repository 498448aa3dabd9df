"""Schema versions, read-only media, and what the invariants find in a ledger that somebody has tampered with."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hypotheses.ledger import Ledger, LedgerConflict, LedgerSchemaError, LedgerStorageError, NewRequiredEdit
from hypotheses.ledger.blob_files import BlobFiles
from hypotheses.ledger.columns import Base
from hypotheses.ledger.schema import SCHEMA_VERSION, migrate
from tests.ledger_builders import new_campaign, new_program, observe, play

NEXT = SCHEMA_VERSION + 1


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("played") / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        play(ledger)
        assert ledger.check_invariants() == []
    return path


@pytest.fixture
def copy(played: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(played, tmp_path / "ledger.sqlite"))


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE campaign SET budget = 5", r"budget: 10 used \+ 0 reserved exceed the budget of 5"),
        ("UPDATE predictions SET registered_seq = 40 WHERE rowid = 1", "not before its control's evaluation"),
        ("DELETE FROM predictions WHERE rowid = 1", "has no prediction of hypothesis"),
        (
            "UPDATE controls SET program_id = (SELECT id FROM programs WHERE origin = 'seed')",
            "its control ctl-[0-9a-f]* was registered with prog-",
        ),
        ("UPDATE evaluations SET kind = 'candidate' WHERE kind = 'confirmation'", "is no scored confirmation"),
        ("UPDATE incumbents SET program_id = (SELECT max(id) FROM programs)", "is no scored evaluation of its"),
        (
            "UPDATE evaluations SET outcome = 'crashed', nll = NULL WHERE kind = 'control'",
            "no control of its observation was settled",
        ),
        ("DELETE FROM probe_results WHERE target_id LIKE 'edit-%'", "discharged without evidence"),
        ("UPDATE probe_results SET provisional = 1", "discharged without evidence"),
        ("DELETE FROM leases WHERE number = 1", "has no lease"),
        (
            "UPDATE notes SET seq = 1 WHERE turn = 3",
            "notes has 1 rows whose event is missing or tells of another record",
        ),
        ("UPDATE programs SET parent_id = 'prog-x' WHERE parent_id IS NOT NULL", "names a record of programs"),
        ("UPDATE blobs SET text = text || ' '", "was altered"),
    ],
)
def test_tampering_that_gets_past_the_triggers_is_found(copy: Path, statement: str, sentence: str) -> None:
    connection = sqlite3.connect(copy)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.executescript(statement)
    connection.close()
    with Ledger.open(copy, read_only=True) as reader:
        found = reader.check_invariants()
    assert any(re.search(sentence, violation) for violation in found), found


def test_two_open_blocking_edits_in_one_lineage_are_found_and_a_superseding_one_is_not(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        observation = observe(ledger)
        fields = {
            "observation_id": observation.id,
            "mechanism": "rotation",
            "cause": "x",
            "text": "y",
            "blocking": True,
        }
        first = ledger.add_required_edit(NewRequiredEdit(kind="remove", turn=1, **fields))
        second = ledger.add_required_edit(NewRequiredEdit(kind="refine", turn=2, **fields), supersedes=[first.id])
        assert [edit.state for edit in ledger.required_edits()] == ["superseded", "open"]
        assert ledger.check_invariants() == []
        ledger.add_required_edit(NewRequiredEdit(kind="extend", turn=3, **fields))
        assert ledger.check_invariants() == ["lineage main has 2 open blocking required edits"]
        ledger.change_required_edit(second.id, "expired", turn=4, reason="three paid attempts in vain")
        assert ledger.check_invariants() == []
        assert len(ledger.required_edits(state="open")) == 1


def test_foreign_keys_reach_between_tables_that_name_each_other(played: Path) -> None:
    connection = sqlite3.connect(played)
    targets = {row[2] for row in connection.execute("PRAGMA foreign_key_list(evaluations)")}
    connection.close()
    assert targets == {"events", "programs", "controls", "observations", "blobs"}


def add_column(connection: sqlite3.Connection, files: BlobFiles) -> None:
    connection.execute("ALTER TABLE notes ADD COLUMN author TEXT NOT NULL DEFAULT ''")


def test_an_older_schema_is_migrated_after_a_backup(copy: Path) -> None:
    migrate(copy, target=NEXT, steps={NEXT: add_column})
    connection = sqlite3.connect(copy)
    assert connection.execute("PRAGMA user_version").fetchone() == (NEXT,)
    assert connection.execute("SELECT version FROM schema_versions ORDER BY version").fetchall() == [
        (SCHEMA_VERSION,),
        (NEXT,),
    ]
    assert connection.execute("SELECT DISTINCT author FROM notes").fetchall() == [("",)]
    connection.close()
    with pytest.raises(LedgerSchemaError, match=f"schema version {NEXT}"):
        Ledger.open(copy)
    with Ledger.open(copy.with_name(f"ledger.sqlite.v{SCHEMA_VERSION}.backup"), read_only=True) as backup:
        assert len(backup.notes()) == 4
        assert backup.check_invariants() == []


def test_a_failing_migration_changes_nothing(copy: Path) -> None:
    def fail(connection: sqlite3.Connection, files: BlobFiles) -> None:
        add_column(connection, files)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        migrate(copy, target=NEXT, steps={NEXT: fail})
    with pytest.raises(LedgerSchemaError, match=f"no step leads to {NEXT}"):
        migrate(copy, target=NEXT, steps={})
    with Ledger.open(copy) as ledger:
        play(ledger)
        assert ledger.num_unreplayed() == 0


def test_a_copy_beside_its_original_is_a_ledger_of_its_own(copy: Path, played: Path) -> None:
    with Ledger.open(copy) as first, Ledger.open(played) as second:
        assert first.content_hash() == second.content_hash()
        with pytest.raises(LedgerConflict):
            first.add_program(new_program(0, title="other"))


@contextmanager
def _without_root() -> Iterator[None]:
    """Permissions do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_media_can_be_read_and_say_so_to_a_writer(played: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(shutil.copy(played, folder / "ledger.sqlite"))
        path.chmod(0o444)
        folder.chmod(0o555)
        with _without_root():
            with Ledger.open(path, read_only=True) as reader:
                assert len(reader.programs()) > 3
                assert reader.check_invariants() == []
            with pytest.raises(LedgerStorageError, match="cannot make the lock"):
                Ledger.open(path)
        assert [item.name for item in folder.iterdir()] == ["ledger.sqlite"]
        folder.chmod(0o755)


def test_every_table_of_the_record_is_hashed_or_named_as_not(played: Path) -> None:
    left_out = {name for name, table in Base.metadata.tables.items() if not table.info.get("hashed", True)}
    assert left_out == {"schema_versions", "events", "blobs", "environment", "llm_failures", "leases"}
