"""Long texts lie in files beside the ledger: whole before they are named, checked when read, the same record either way."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import sqlite3
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from hypotheses.ledger import (
    Evaluation,
    Ledger,
    LedgerStorageError,
    LedgerValueError,
    NewLlmCall,
    NewScreening,
    Settlement,
)
from hypotheses.ledger.blob_files import MAX_INLINE_BYTES, MAX_TEXT_BYTES
from hypotheses.ledger.canonical import canonical_json, text_hash
from hypotheses.ledger.evaluations import MAX_LOG_CHARACTERS
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, scored

LONG = "x" * MAX_INLINE_BYTES + "\n\u00e4"


def events(count: int) -> dict[str, Any]:
    return {"events": [{"index": index, "op": "weight", "layer": "blocks.0.q"} for index in range(count)], "layers": {}}


def names(ledger: Ledger) -> list[str]:
    folder = ledger.path.with_name("blobs")
    return sorted(os.listdir(folder)) if folder.exists() else []


def run_with_long_evidence(ledger: Ledger, number: int = 0) -> Evaluation:
    program = ledger.add_program(new_program(number))
    return evaluate(ledger, candidate(program), scored(evidence=events(2000)))


def test_only_what_is_too_long_for_a_row_becomes_a_file(ledger: Ledger) -> None:
    short = NewLlmCall(purpose="a", prompt="p" * MAX_INLINE_BYTES, reply="r", model="m")
    ledger.record_llm_call(short)
    assert names(ledger) == []
    ledger.record_llm_call(NewLlmCall(purpose="b", prompt=LONG, reply=LONG, model="m"))
    assert names(ledger) == [f"{text_hash(LONG)}.gz"]
    with gzip.open(ledger.path.with_name("blobs") / f"{text_hash(LONG)}.gz") as file:
        assert file.read() == LONG.encode()
    connection = sqlite3.connect(ledger.path)
    assert connection.execute("SELECT hash FROM blobs WHERE text IS NULL").fetchall() == [(text_hash(LONG),)]
    assert connection.execute("SELECT max(length(text)) FROM blobs").fetchone() == (MAX_INLINE_BYTES,)
    connection.close()


def test_every_kind_of_long_text_is_read_back_by_another_opening(ledger: Ledger) -> None:
    program = ledger.add_program(new_program(source=LONG))
    call = ledger.record_llm_call(NewLlmCall(purpose="a", prompt=LONG + "p", reply=LONG + "r", model="m"))
    screening = ledger.record_screening(
        NewScreening(program_id=program.id, passed=True, smoke_outcome="scored", evidence=events(2000))
    )
    evaluation = evaluate(ledger, candidate(program), scored(evidence=events(3000)))
    assert len(names(ledger)) == 5
    with Ledger.open(ledger.path, read_only=True) as reader:
        assert reader.program(program.id) == program
        assert reader.llm_calls() == (call,)
        assert reader.screenings() == (screening,)
        assert reader.evaluation(evaluation.id) == evaluation
        assert reader.evaluation(evaluation.id).result == scored(evidence=events(3000))
        assert reader.check_invariants() == []


def test_the_content_hash_does_not_depend_on_where_a_text_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes, files = [], []
    for limit in (MAX_INLINE_BYTES, 100, MAX_TEXT_BYTES):
        monkeypatch.setattr("hypotheses.ledger.transaction.MAX_INLINE_BYTES", limit)
        folder = tmp_path / str(limit)
        folder.mkdir()
        with Ledger.create(folder / "ledger.sqlite", new_campaign()) as ledger:
            run_with_long_evidence(ledger)
            hashes.append(ledger.content_hash())
            files.append(len(names(ledger)))
            assert ledger.check_invariants() == []
    assert files == [1, 1, 0]
    assert len(set(hashes)) == 1


def test_a_ledger_copied_with_its_folder_is_whole_and_one_copied_alone_names_what_is_missing(
    ledger: Ledger, tmp_path: Path
) -> None:
    evaluation = run_with_long_evidence(ledger)
    ledger.close()
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    whole.mkdir()
    alone.mkdir()
    for folder in (whole, alone):
        shutil.copy(ledger.path, folder)
    shutil.copytree(ledger.path.with_name("blobs"), whole / "blobs")
    with Ledger.open(whole / "ledger.sqlite", read_only=True) as reader:
        assert reader.evaluation(evaluation.id) == evaluation
    missing = alone / "blobs" / names(ledger)[0]
    with Ledger.open(alone / "ledger.sqlite", read_only=True) as reader:
        with pytest.raises(LedgerStorageError, match=f"{missing}' is missing.*copy the folder 'blobs' from"):
            reader.evaluation(evaluation.id)
        assert [sentence for sentence in reader.check_invariants() if f"{missing}' is missing" in sentence]
        assert len(reader.programs()) == 1


def flip(data: bytes) -> bytes:
    return data[:-10] + bytes([data[-10] ^ 1]) + data[-9:]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[: len(data) // 2], "is damaged: Compressed file ended"),
        (lambda data: b"", "was altered|is damaged"),
        (flip, "is damaged"),
        (lambda data: gzip.compress(b"another text"), "was altered: it holds another text"),
        (lambda data: gzip.compress(b"\xff\xfe"), "is damaged: 'utf-8'"),
        (lambda data: gzip.compress(bytes(1 << 28)), "was altered"),
        (lambda data: b"plain", "is damaged: Not a gzipped file"),
    ],
)
def test_a_damaged_file_is_named_reported_and_replaced_when_its_text_comes_again(
    ledger: Ledger, damage: Any, told: str
) -> None:
    evaluation = run_with_long_evidence(ledger)
    file = ledger.path.with_name("blobs") / names(ledger)[0]
    good = file.read_bytes()
    file.write_bytes(damage(good))
    with pytest.raises(LedgerStorageError, match=told) as info:
        ledger.evaluation(evaluation.id)
    assert str(file) in str(info.value)
    assert [sentence for sentence in ledger.check_invariants() if str(file) in sentence]
    run_with_long_evidence(ledger, 1)
    assert file.read_bytes() == good
    assert ledger.evaluation(evaluation.id) == evaluation
    assert ledger.check_invariants() == []


def test_a_file_that_no_row_names_is_harmless_and_is_used_when_its_text_comes(ledger: Ledger) -> None:
    program = ledger.add_program(new_program())
    evaluation = ledger.reserve_evaluation(candidate(program))
    with pytest.raises(LedgerValueError, match="wall_s is nan"):
        ledger.settle_evaluation(evaluation.id, scored(evidence=events(2000), wall_s=float("nan")))
    (orphan,) = names(ledger)
    file = ledger.path.with_name("blobs") / orphan
    inode = file.stat().st_ino
    assert ledger.check_invariants() == []
    ledger.settle_evaluation(evaluation.id, scored(evidence=events(2000)))
    assert (names(ledger), file.stat().st_ino) == ([orphan], inode)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the disk is full; make room and resume, nothing recorded so far is lost"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the disk is read-only"),
        (errno.EIO, "Input/output error; nothing of this step was stored"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "open", "replace"])
def test_a_disk_that_fails_stores_nothing_and_leaves_no_half_written_file(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str, number: int, told: str
) -> None:
    evaluation = ledger.reserve_evaluation(candidate(ledger.add_program(new_program())))
    before = ledger.events()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "replace" else os, call, fail)
        with pytest.raises(LedgerStorageError, match=f"blobs/[0-9a-f]*.gz' cannot be written: {told}"):
            ledger.settle_evaluation(evaluation.id, scored(evidence=events(2000)))
    assert names(ledger) == []
    assert ledger.events() == before
    assert ledger.settle_evaluation(evaluation.id, scored(evidence=events(2000))).is_settled


def test_the_file_is_on_disk_before_the_row_is_committed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the flushes, as the disk sees it: the file, its name, its folder; only then the commit."""
    steps: list[str] = []
    flush, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append("flush " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.rpartition(".")[2])
        assert _num_settled(ledger.path) == 0
        flush(descriptor)

    def replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    run_with_long_evidence(ledger)
    assert steps == [f"flush {ledger.path.parent.name}", "flush part", "rename", "flush blobs"]
    assert _num_settled(ledger.path) == 1


def _num_settled(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("SELECT count(*) FROM evaluations WHERE state = 'settled'").fetchone()[0])
    finally:
        connection.close()


def test_read_only_media_give_long_texts(ledger: Ledger) -> None:
    evaluation = run_with_long_evidence(ledger)
    ledger.close()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        shutil.copytree(ledger.path.parent, folder)
        (folder / "ledger.sqlite.lock").unlink()
        for path in (folder / "ledger.sqlite", *(folder / "blobs").iterdir()):
            path.chmod(0o444)
        (folder / "blobs").chmod(0o555)
        folder.chmod(0o555)
        with Ledger.open(folder / "ledger.sqlite", read_only=True) as reader:
            assert reader.evaluation(evaluation.id) == evaluation
            assert reader.check_invariants() == []
        folder.chmod(0o755)
        (folder / "blobs").chmod(0o755)


def test_a_reader_beside_the_writer_finds_the_file_of_every_row_it_sees(ledger: Ledger) -> None:
    stop = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            with Ledger.open(ledger.path, read_only=True) as reader:
                while not stop.is_set():
                    results = [e.result for e in reader.evaluations() if e.result is not None]
                    assert all(len(result.evidence["events"]) > 2000 for result in results)
                    seen.append(len(results))
        except BaseException as err:
            failures.append(err)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(10):
        evaluate(ledger, candidate(ledger.add_program(new_program(number))), scored(evidence=events(2001 + number)))
    stop.set()
    watcher.join()
    assert failures == []
    assert seen == sorted(seen)
    assert len(names(ledger)) == 10


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10**6,
        "\U0001f600" * 10**6,
        "\ud83d" * 10**6,
        "\x00" * 10**6,
        "e\u0301" * 10**6,
        "\r\n" * 10**6,
        "\u2028\u202e" * 10**5,
        "a" * MAX_LOG_CHARACTERS + "\U0001f600",
        "\ud83d\ude00" * MAX_LOG_CHARACTERS,
    ],
    ids=["ascii", "astral", "surrogates", "NUL", "combining", "lines", "separators", "at the cut", "pairs"],
)
def test_what_is_kept_of_output_is_capped_whatever_it_is(ledger: Ledger, text: str) -> None:
    program = ledger.add_program(new_program())
    ledger.record_screening(NewScreening(program_id=program.id, passed=False, smoke_outcome="crashed", reason=text))
    evaluation = evaluate(ledger, candidate(program), Settlement(outcome="crashed", reason=text, log_tail=text))
    assert evaluation.result is not None
    assert len(evaluation.result.log_tail) == min(len(text), MAX_LOG_CHARACTERS)
    assert evaluation.result.log_tail[-1] in text + "?\ufffd"
    connection = sqlite3.connect(ledger.path)
    (longest,) = connection.execute("SELECT max(length(CAST(text AS BLOB))) FROM blobs").fetchone()
    (reason,) = connection.execute("SELECT max(length(reason)) FROM evaluations").fetchone()
    (screened,) = connection.execute("SELECT max(length(reason)) FROM screenings").fetchone()
    connection.close()
    assert longest <= MAX_INLINE_BYTES
    assert max(reason, screened) <= 4096
    assert names(ledger) == []
    assert ledger.check_invariants() == []


def test_evidence_is_cut_below_the_cap_and_stays_json(ledger: Ledger) -> None:
    program = ledger.add_program(new_program())
    evaluation = evaluate(ledger, candidate(program), scored(evidence=events(100_000)))
    (file,) = names(ledger)
    with gzip.open(ledger.path.with_name("blobs") / file) as stream:
        data = stream.read()
    assert MAX_TEXT_BYTES * 0.9 < len(data) <= MAX_TEXT_BYTES
    assert evaluation.result is not None
    assert canonical_json(json.loads(data)) == canonical_json(evaluation.result.evidence)
    assert (ledger.path.with_name("blobs") / file).stat().st_size < MAX_TEXT_BYTES / 4
