"""One writer and many readers of one file; what is no ledger, or a newer one, is refused untouched."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hypotheses.ledger import (
    Ledger,
    LedgerBusy,
    LedgerConflict,
    LedgerError,
    LedgerNotFound,
    LedgerRefused,
    LedgerSchemaError,
    LedgerValueError,
    NewNote,
)
from hypotheses.ledger.schema import SCHEMA_VERSION
from tests.ledger_builders import (
    candidate,
    evaluate,
    new_campaign,
    new_program,
    scored,
)


class TestReaders:
    def test_a_reader_that_holds_a_snapshot_blocks_no_writer(self, ledger: Ledger) -> None:
        program = ledger.add_program(new_program())
        connection = sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True, isolation_level=None)
        connection.execute("BEGIN")
        assert connection.execute("SELECT count(*) FROM evaluations").fetchone() == (0,)
        with Ledger.open(ledger.path, read_only=True) as reader:
            for number in range(5):
                evaluate(ledger, candidate(program, draw=number), scored())
                assert len(reader.evaluations()) == number + 1
                assert reader.budget().used == number + 1
        assert connection.execute("SELECT count(*) FROM evaluations").fetchone() == (0,)
        connection.close()

    def test_readers_in_a_loop_beside_eight_writing_threads(self, ledger: Ledger) -> None:
        programs = [ledger.add_program(new_program(number)) for number in range(8)]
        stop = threading.Event()

        def watch() -> int:
            rounds = 0
            with Ledger.open(ledger.path, read_only=True) as reader:
                while not stop.is_set():
                    budget = reader.budget()
                    assert budget.used + budget.reserved + budget.free == budget.total
                    assert all(e.is_settled == (e.result is not None) for e in reader.evaluations())
                    rounds += 1
            return rounds

        def work(number: int) -> None:
            evaluate(ledger, candidate(programs[number]), scored())
            ledger.add_note(NewNote(turn=number, topic="x", text="y"))

        with ThreadPoolExecutor(10) as pool:
            watchers = [pool.submit(watch) for _ in range(2)]
            try:
                list(pool.map(work, range(8)))
            finally:
                stop.set()
            assert all(watcher.result() > 0 for watcher in watchers)
        assert ledger.budget().used == 8

    def test_a_reader_cannot_write(self, ledger: Ledger) -> None:
        with Ledger.open(ledger.path, read_only=True) as reader:
            assert reader.is_read_only
            with pytest.raises(LedgerRefused, match="read-only"):
                reader.add_program(new_program())


class TestFiles:
    def test_a_second_writer_is_refused_with_the_pid_of_the_first(self, ledger: Ledger) -> None:
        for attempt in (lambda: Ledger.open(ledger.path), lambda: Ledger.create(ledger.path, new_campaign())):
            with pytest.raises(LedgerBusy, match=f"process {os.getpid()}"):
                attempt()
        ledger.close()
        Ledger.open(ledger.path).close()

    def test_an_existing_ledger_is_never_overwritten(self, path: Path) -> None:
        Ledger.create(path, new_campaign()).close()
        with pytest.raises(LedgerConflict, match="resume it"):
            Ledger.create(path, new_campaign())
        Ledger.open(path).close()

    def test_a_failed_creation_leaves_no_ledger(self, path: Path) -> None:
        with pytest.raises(LedgerValueError, match="campaign.recipe.x is nan"):
            Ledger.create(path, new_campaign(recipe={"x": math.nan}))
        assert not path.exists()
        Ledger.create(path, new_campaign()).close()

    def test_an_interrupted_creation_is_said_to_be_one_and_can_be_repeated(self, path: Path) -> None:
        path.touch()
        with pytest.raises(LedgerSchemaError, match="start the run again"):
            Ledger.open(path)
        Ledger.create(path, new_campaign()).close()

    def test_a_newer_schema_is_refused_untouched(self, path: Path) -> None:
        Ledger.create(path, new_campaign()).close()
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
        connection.close()
        before = path.read_bytes()
        for read_only in (False, True):
            with pytest.raises(
                LedgerSchemaError,
                match=f"schema version {SCHEMA_VERSION + 1}; this QuantForge reads up to {SCHEMA_VERSION}",
            ):
                Ledger.open(path, read_only=read_only)
        assert path.read_bytes() == before

    def test_other_files_are_refused_untouched(self, tmp_path: Path) -> None:
        text, database = tmp_path / "text", tmp_path / "database"
        text.write_text("no database at all, but longer than one hundred bytes of header: " + "x" * 100)
        connection = sqlite3.connect(database)
        connection.execute("CREATE TABLE other (x)")
        connection.close()
        for path in (text, database):
            before = path.read_bytes()
            for attempt in (Ledger.open, lambda path: Ledger.create(path, new_campaign())):
                with pytest.raises(LedgerSchemaError, match="no ledger"):
                    attempt(path)
            assert path.read_bytes() == before
        with pytest.raises(LedgerNotFound, match="no ledger at"):
            Ledger.open(tmp_path / "missing")
        with pytest.raises(LedgerError, match="does not exist"):
            Ledger.create(tmp_path / "missing" / "ledger.sqlite", new_campaign())

    def test_odd_characters_in_the_path(self, tmp_path: Path) -> None:
        folder = tmp_path / "a b?c#d%41&mode=memory"
        folder.mkdir()
        with Ledger.create(folder / "ledger.sqlite", new_campaign()) as ledger:
            ledger.add_program(new_program())
            assert len(ledger.programs()) == 1
        assert (folder / "ledger.sqlite").stat().st_size > 0

    def test_durability_settings(self, ledger: Ledger) -> None:
        ledger.add_program(new_program())
        connection = sqlite3.connect(ledger.path)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT version FROM schema_versions").fetchall() == [(SCHEMA_VERSION,)]
        assert connection.execute("SELECT * FROM budget").fetchall() == [(10, 0, 0, 10, 0)]
        connection.close()
