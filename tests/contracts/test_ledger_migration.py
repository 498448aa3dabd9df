"""A ledger of schema version 1, written by the code of its time, comes over record by record."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from pathlib import Path

import pytest

from hypotheses.ledger import Ledger, LedgerSchemaError, LedgerStorageError, open_to_read
from hypotheses.ledger.blob_files import MAX_INLINE_BYTES
from hypotheses.ledger.canonical import make_id
from hypotheses.ledger.schema import SCHEMA_VERSION, migrate
from tests.ledger_builders import evaluate, new_campaign, new_program, play, scored

GOLDENS = tuple((Path(__file__).parents[1] / "golden").glob("ledger_v*.sql"))
GOLDEN = Path(__file__).parents[1] / "golden" / "ledger_v1.sql"
LONG = "# a long source\n" + "\u00fc" * MAX_INLINE_BYTES
LONG_ID = make_id("prog", LONG, "candidate", None)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The golden ledger as a file, with one text that is too long for a row today."""
    path = tmp_path / "ledger.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(GOLDEN.read_text(encoding="utf-8"))
    digest = hashlib.sha256(LONG.encode()).hexdigest()
    connection.execute("INSERT INTO blobs VALUES (?, ?)", (digest, LONG))
    seq = connection.execute(
        "INSERT INTO events (kind, ref, at) VALUES ('program', ?, '2026-01-01T00:00:00.000000+00:00')", (LONG_ID,)
    ).lastrowid
    connection.execute(
        "INSERT INTO programs (id, seq, source_hash, origin, title, mechanisms, ast_hash, normalized_ast_hash)"
        " VALUES (?, ?, ?, 'candidate', 'long', '[]', 'a', 'n')",
        (LONG_ID, seq, digest),
    )
    connection.commit()
    connection.close()
    return path


def rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return every row of every table, in order."""
    connection = sqlite3.connect(path)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}
    connection.close()
    return found


def shape(path: Path) -> dict[str, object]:
    """Return columns, foreign keys and the SQL of triggers, views and indexes."""
    connection = sqlite3.connect(path)
    found: dict[str, object] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        if kind == "table":
            columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
            keys = sorted(row[2:] for row in connection.execute(f"PRAGMA foreign_key_list({name})"))
            found[f"table {name}"] = (columns, keys)
        else:
            found[f"{kind} {name}"] = sql
    connection.close()
    return found


def test_every_record_of_version_1_is_there_after_the_migration(old: Path) -> None:
    before = rows(old)
    Ledger.open(old).close()
    after = rows(old)
    assert after.keys() == before.keys()
    for name in before.keys() - {"blobs", "schema_versions", "hypotheses"}:
        assert after[name] == before[name], name
    assert after["hypotheses"] == [(*row, None) for row in before["hypotheses"]]
    assert [row[0] for row in after["schema_versions"]] == list(range(1, SCHEMA_VERSION + 1))
    texts = dict(after["blobs"])
    assert {digest for digest, text in texts.items() if text is None} == {hashlib.sha256(LONG.encode()).hexdigest()}
    with Ledger.open(old, read_only=True) as reader:
        assert reader.program(LONG_ID).source == LONG
        for digest, text in before["blobs"]:
            assert (LONG if texts[digest] is None else texts[digest]) == text, digest
        assert reader.check_invariants() == []
    copy = rows(old.with_name("ledger.sqlite.v1.backup"))
    assert copy == before


def opened(golden: Path, folder: Path) -> Path:
    path = folder / "ledger.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(golden.read_text(encoding="utf-8"))
    connection.close()
    return path


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_the_content_hash_is_that_of_its_version(golden: Path, tmp_path: Path) -> None:
    path = opened(golden, tmp_path)
    expected = re.search("content hash: ([0-9a-f]{64})", golden.read_text(encoding="utf-8"))
    assert expected is not None
    with open_to_read(path) as ledger:
        assert ledger.content_hash() == expected[1]
    with Ledger.open(path) as ledger:
        assert ledger.content_hash() == expected[1]


def test_there_is_a_golden_ledger_of_every_older_version() -> None:
    assert {path.stem for path in GOLDENS} == {f"ledger_v{number}" for number in range(1, SCHEMA_VERSION)}


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_a_migrated_ledger_has_the_shape_of_a_new_one(golden: Path, tmp_path: Path) -> None:
    path = opened(golden, tmp_path)
    Ledger.open(path).close()
    Ledger.create(tmp_path / "new.sqlite", new_campaign()).close()
    assert shape(path) == shape(tmp_path / "new.sqlite")


def test_an_older_ledger_is_read_through_a_copy_and_stays_as_it_is(old: Path) -> None:
    """Its long texts are read too, and nothing is left behind; a migrated one is read in place."""
    before = old.read_bytes()
    with open_to_read(old) as reader:
        assert reader.is_read_only
        assert reader.path != old
        assert reader.program(LONG_ID).source == LONG
        assert reader.check_invariants() == []
        copy = reader.path
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["ledger.sqlite"]
    assert not copy.parent.exists()
    Ledger.open(old).close()
    with open_to_read(old) as reader:
        assert reader.path == old


def test_texts_in_files_of_version_2_are_read_through_the_copy(old: Path) -> None:
    migrate(old, target=2)
    assert list((old.parent / "blobs").iterdir())
    with open_to_read(old) as reader:
        assert reader.program(LONG_ID).source == LONG


def test_a_migrated_campaign_goes_on_where_it_stopped(old: Path) -> None:
    with Ledger.open(old) as ledger:
        play(ledger)
        program = ledger.add_program(new_program(700, source=LONG + "\n"))
        with Ledger.open(old, read_only=True) as reader:
            left = [e for e in reader.evaluations() if not e.is_settled]
            assert [e.attempt for e in left] == [1, 1]
            assert reader.program(program.id).source == LONG + "\n"
        for waiting in left:
            names = type(waiting).__mro__[1].__dataclass_fields__
            new = type(waiting).__mro__[1](**{name: getattr(waiting, name) for name in names})
            assert evaluate(ledger, new, scored()).attempt == 2
        assert ledger.check_invariants() == []


def test_an_old_ledger_opened_read_only_says_what_to_do_and_stays_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    with pytest.raises(LedgerSchemaError, match="has the older schema 1; resume it once to migrate it"):
        Ledger.open(old, read_only=True)
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["ledger.sqlite"]


def test_without_room_for_the_files_nothing_is_migrated(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(old)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(LedgerStorageError, match="the disk is full; make room and resume"):
            Ledger.open(old)
    assert rows(old) == before
    Ledger.open(old).close()
    assert len(rows(old)["blobs"]) == len(before["blobs"])


def test_a_text_that_was_altered_before_is_still_reported_after(old: Path) -> None:
    connection = sqlite3.connect(old)
    connection.execute("DROP TRIGGER blobs_no_update")
    connection.execute("UPDATE blobs SET text = text || '!' WHERE length(text) > 60000")
    connection.execute(
        "CREATE TRIGGER blobs_no_update BEFORE UPDATE ON blobs BEGIN "
        "SELECT RAISE(ABORT, 'ledger: rows of blobs are never changed'); END"
    )
    connection.commit()
    connection.close()
    with Ledger.open(old) as ledger:
        assert [sentence for sentence in ledger.check_invariants() if "was altered" in sentence]


def test_a_row_that_names_nothing_stops_the_migration(old: Path) -> None:
    connection = sqlite3.connect(old)
    connection.execute("DROP TRIGGER programs_no_update")
    connection.execute("UPDATE programs SET parent_id = 'prog-x' WHERE id = ?", (LONG_ID,))
    connection.commit()
    connection.close()
    before = rows(old)
    with pytest.raises(LedgerSchemaError, match="of programs names a record of programs that does not exist"):
        Ledger.open(old)
    assert rows(old) == before
