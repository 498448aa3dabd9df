"""The ledger against real processes: several at once, and some that die at the worst moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from hypotheses.ledger import Ledger, LedgerBusy
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, observe, play, register, scored

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import signal, sys, time
from hypotheses.ledger import *
from tests.ledger_builders import *
path, name = sys.argv[1], sys.argv[2]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        observe(ledger)
    return path


def start(path: Path, body: str, name: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + dedent(body), str(path), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@contextmanager
def killed_after(path: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Run `body` until it prints its first line, yield, then kill it with SIGKILL."""
    process = start(path, body)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline(), process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


RESERVE_AND_HANG = """
ledger = Ledger.open(path)
program = ledger.add_program(new_program(2))
ledger.reserve_evaluation(candidate(program, turn=2))
print("reserved", flush=True)
time.sleep(600)
"""


def test_a_call_of_a_killed_process_is_tried_again_at_no_charge(path: Path) -> None:
    with killed_after(path, RESERVE_AND_HANG) as process, Ledger.open(path, read_only=True) as reader:
        with pytest.raises(LedgerBusy, match=f"process {process.pid}"):
            Ledger.open(path)
        assert (reader.budget().used, reader.budget().reserved, reader.budget().free) == (2, 1, 7)
    with Ledger.open(path) as ledger:
        observe(ledger)
        program = ledger.add_program(new_program(2))
        evaluation = ledger.reserve_evaluation(candidate(program, turn=2))
        assert (evaluation.attempt, evaluation.is_settled) == (2, False)
        assert (ledger.budget().used, ledger.budget().reserved, ledger.budget().free) == (2, 1, 7)
        ledger.settle_evaluation(evaluation.id, scored())
        assert (ledger.budget().used, ledger.budget().reserved, ledger.budget().free) == (3, 0, 7)
        assert ledger.check_invariants() == []


def test_killed_again_and_again_the_run_ends_with_the_same_content(path: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with killed_after(path, RESERVE_AND_HANG):
            pass
    hashes = []
    for file in (path, tmp_path / "calm.sqlite"):
        with Ledger.open(file) if file.exists() else Ledger.create(file, new_campaign()) as ledger:
            observe(ledger)
            evaluation = evaluate(ledger, candidate(ledger.add_program(new_program(2)), turn=2), scored())
            assert evaluation.attempt == (3 if file == path else 1)
            hashes.append(ledger.content_hash())
    assert hashes[0] == hashes[1]


def test_a_registration_killed_half_way_is_not_there(path: Path) -> None:
    body = """
    class Stuck(tuple):
        rounds = 0
        def __iter__(self):
            Stuck.rounds += 1
            if Stuck.rounds == 2:
                print("hypotheses are inserted", flush=True)
                time.sleep(600)
            return super().__iter__()

    ledger = Ledger.open(path)
    observation = observe(ledger)
    register(ledger, observation, controls=Stuck((NewControl(name="without-rotation", kind="knockout"),)))
    """
    with killed_after(path, body):
        pass
    with Ledger.open(path) as ledger:
        observation = observe(ledger)
        assert ledger.num_unreplayed() == 0
        assert ledger.hypotheses() == ()
        assert len(register(ledger, observation).predictions) == 2
        assert ledger.check_invariants() == []


def test_a_creation_killed_half_way_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite"
    body = """
    from hypotheses.ledger import schema
    statements = schema.schema_statements()
    def stuck():
        yield from statements[:10]
        print("half of the schema is made", flush=True)
        time.sleep(600)
    schema.schema_statements = stuck
    Ledger.create(path, new_campaign())
    """
    with killed_after(path, body):
        pass
    with Ledger.create(path, new_campaign()) as ledger:
        play(ledger)
        assert ledger.check_invariants() == []


@pytest.mark.slow
def test_eight_processes_that_take_turns_get_exactly_the_calls_there_are(path: Path) -> None:
    body = """
    number = 0
    while True:
        try:
            with Ledger.open(path) as ledger:
                evaluate(ledger, candidate(ledger.add_program(new_program(100 * int(name) + number))), scored())
        except LedgerBusy:
            time.sleep(0.05)
            continue
        except BudgetExhausted:
            break
        number += 1
    print(number)
    """
    processes = [start(path, body, name=str(name)) for name in range(1, 9)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, results
    assert sum(int(out) for out, _ in results) == 8
    with Ledger.open(path, read_only=True) as reader:
        assert len([e for e in reader.evaluations() if e.is_settled]) == 10
        assert reader.budget().free == 0
        assert reader.check_invariants() == []


def test_a_full_disk_stops_with_a_clear_error_and_loses_nothing(path: Path) -> None:
    body = """
    import resource
    ledger = Ledger.open(path)
    observe(ledger)
    limit = 200 * 1024
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    stored = 0
    try:
        for number in range(100):
            ledger.add_program(new_program(1000 + number, source=f"# {number}" + "x" * 20000))
            stored += 1
    except LedgerStorageError as err:
        print(stored, err)
    """
    out, err = start(path, body).communicate(timeout=60)
    assert err == ""
    stored, message = out.split(maxsplit=1)
    assert "disk" in message
    with Ledger.open(path) as ledger:
        observe(ledger)
        for number in range(int(stored) + 1):
            ledger.add_program(new_program(1000 + number, source=f"# {number}" + "x" * 20000))
        assert ledger.num_unreplayed() == 0
        assert len(ledger.programs()) == 2 + int(stored) + 1
        assert ledger.check_invariants() == []


def test_a_child_process_does_not_keep_the_lock(path: Path) -> None:
    with Ledger.open(path):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    try:
        Ledger.open(path).close()
    finally:
        child.kill()
        child.wait()
