"""A ledger under load: eight workers that settle realistic results, `show` in a loop, a reader that never lets go.

What is measured: wall time of each write (a program, a reservation, a settlement), waiting for the other threads included.
"""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hypotheses.ledger import Ledger, Settlement
from hypotheses.ledger.database import WAL_LIMIT_BYTES
from tests.ledger_builders import candidate, new_campaign, new_program, scored

ROOT = Path(__file__).resolve().parents[2]
NUM_WORKERS = 8
NUM_LAYERS = 56
PATIENCE_S = 10.0
"""A write that waits longer than this holds a worker up; on an idle machine the slowest takes a tenth of it."""


def realistic(number: int) -> Settlement:
    """Return a result as a program on a model of 56 layers leaves it: about 60 KB of evidence, a log, 64 chunk losses."""
    dice = random.Random(number)
    names = [f"model.layers.{index // 7}.{index % 7}.proj" for index in range(NUM_LAYERS)]
    layers = {
        name: {
            "digest": f"{dice.getrandbits(256):064x}",
            "transform": ["permutation", "hadamard32"],
            "scale_rule": "ceil",
            "code_rule": "even",
            "rank": 0,
            "bits": 4.25 + dice.random() / 100,
            "weight_error": dice.random() / 100,
        }
        for name in names
    }
    events = [
        {
            "index": 6 * place + step,
            "op": op,
            "layer": name,
            "shape": [576, 1536],
            "digest": f"{dice.getrandbits(64):016x}",
        }
        for place, name in enumerate(names)
        for step, op in enumerate(("weight", "inputs", "second_moment", "install", "output_error", "log"))
    ]
    return scored(
        *(2.0 + dice.random() for _ in range(64)),
        evidence={"events": events, "layers": layers},
        log_tail="".join(f"layer {name}: error {dice.random()}\n" for name in names),
    )


@dataclass
class Load:
    """What a load did to the ledger."""

    writes_s: list[float] = field(default_factory=list)
    num_settled: int = 0
    num_shows: int = 0
    longest_show_s: float = 0.0
    peak_wal: int = 0
    wall_s: float = 0.0

    def __str__(self) -> str:
        ordered = sorted(self.writes_s)
        return (
            f"{len(ordered)} writes in {self.wall_s:.1f} s ({len(ordered) / self.wall_s:.0f}/s), "
            f"{self.num_settled} settlements ({self.num_settled / self.wall_s:.0f}/s); median write "
            f"{1e3 * ordered[len(ordered) // 2]:.0f} ms, slowest {1e3 * ordered[-1]:.0f} ms; "
            f"log at most {self.peak_wal / 2**20:.1f} MiB; {self.num_shows} times `show`"
        )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text("")
    return tmp_path


def wal_size(ledger: Ledger) -> int:
    wal = ledger.path.with_name(ledger.path.name + "-wal")
    return wal.stat().st_size if wal.exists() else 0


def show(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from forge.cli.app import main; main()", "show", str(folder), "calls", "--json"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("["), done.stdout[:200]


@contextmanager
def held_transaction(ledger: Ledger) -> Iterator[sqlite3.Connection]:
    """A reader that begins now and sees nothing of what comes."""
    connection = sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True, isolation_level=None)
    connection.execute("BEGIN")
    before = connection.execute("SELECT count(*) FROM events").fetchone()
    try:
        yield connection
        assert connection.execute("SELECT count(*) FROM events").fetchone() == before
    finally:
        connection.close()


def checkpoint(ledger: Ledger, mode: str, *, timeout: float) -> None:
    connection = sqlite3.connect(ledger.path, timeout=timeout, isolation_level=None)
    try:
        connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    finally:
        connection.close()


def put_under_load(ledger: Ledger, folder: Path, *, min_shows: int, min_settled: int, first_program: int) -> Load:
    """Write from eight threads until enough was settled and shown; raise what any of them raised."""
    load = Load()
    stop = threading.Event()
    counting = threading.Lock()
    failures: list[BaseException] = []

    def guard(work: threading.Event, task: object) -> None:
        try:
            task()  # type: ignore[operator]
        except BaseException as err:
            failures.append(err)
            work.set()

    def write(worker: int) -> None:
        number = first_program + 100_000 * worker
        while not stop.is_set() or load.num_settled < min_settled:
            number += 1
            times = [time.perf_counter()]
            program = ledger.add_program(new_program(number))
            times.append(time.perf_counter())
            evaluation = ledger.reserve_evaluation(candidate(program))
            times.append(time.perf_counter())
            result = realistic(number)
            begin = time.perf_counter()
            stored = ledger.settle_evaluation(evaluation.id, result)
            writes_s = [times[1] - times[0], times[2] - times[1], time.perf_counter() - begin]
            assert stored.result is not None
            assert stored.result.chunk_nll == result.chunk_nll
            with counting:
                load.writes_s += writes_s
                load.num_settled += 1
                load.peak_wal = max(load.peak_wal, wal_size(ledger))
            if failures:
                return
            time.sleep(0.02)  # an evaluation takes seconds; leave `show` some of the machine

    def show_in_a_loop() -> None:
        while load.num_shows < min_shows:
            begun = time.perf_counter()
            show(folder)
            load.longest_show_s = max(load.longest_show_s, time.perf_counter() - begun)
            load.num_shows += 1
        stop.set()

    def disturb() -> None:
        rounds = 0
        while not stop.wait(0.3):
            rounds += 1
            checkpoint(ledger, "TRUNCATE" if rounds % 5 == 0 else "PASSIVE", timeout=0.2)

    begin = time.perf_counter()
    with ThreadPoolExecutor(NUM_WORKERS + 2) as pool:
        tasks = [lambda worker=worker: write(worker) for worker in range(NUM_WORKERS)]  # type: ignore[misc]
        for task in [*tasks, show_in_a_loop, disturb]:
            pool.submit(guard, stop, task)
    load.wall_s = time.perf_counter() - begin
    assert failures == []
    return load


def settle_some(ledger: Ledger, count: int, first_program: int) -> None:
    for number in range(first_program, first_program + count):
        evaluation = ledger.reserve_evaluation(candidate(ledger.add_program(new_program(number))))
        ledger.settle_evaluation(evaluation.id, realistic(number))


def endure(folder: Path, *, shows: tuple[int, int], min_settled: int) -> None:
    """Load a ledger with a reader that holds a transaction, let go, and load it again; `shows` counts for each."""
    with Ledger.create(folder / "ledger.sqlite", new_campaign(budget=10**6)) as ledger:
        with held_transaction(ledger):
            held = put_under_load(ledger, folder, min_shows=shows[0], min_settled=min_settled, first_program=1_000_000)
            grown = wal_size(ledger)
        print(f"with a reader that holds on: {held}")
        assert grown > WAL_LIMIT_BYTES, f"the log has {grown} bytes: the reader held nothing up"
        settle_some(ledger, 3, 5_000_000)
        assert wal_size(ledger) <= WAL_LIMIT_BYTES, f"the log of {grown} bytes still has {wal_size(ledger)}"
        free = put_under_load(ledger, folder, min_shows=shows[1], min_settled=min_settled, first_program=2_000_000)
        print(f"without it: {free}")
        # `show` reads one snapshot, and what is written meanwhile stays in the log until it is done.
        bytes_per_write = grown / len(held.writes_s)
        during_a_show = free.longest_show_s * len(free.writes_s) / free.wall_s * bytes_per_write
        bound = 4 * WAL_LIMIT_BYTES + during_a_show
        assert free.peak_wal <= bound, (
            f"the log grew to {free.peak_wal} bytes with nobody holding it; at most {bound:.0f}"
        )
        settle_some(ledger, 3, 6_000_000)
        assert wal_size(ledger) <= WAL_LIMIT_BYTES, f"the log still has {wal_size(ledger)} bytes after the load"
        for load in (held, free):
            assert max(load.writes_s) < PATIENCE_S, str(load)
        budget = ledger.budget()
        assert (budget.used, budget.reserved) == (held.num_settled + free.num_settled + 6, 0)
        assert ledger.check_invariants() == []
    assert not (folder / "ledger.sqlite-wal").exists()


def test_under_load_no_writer_fails_or_waits_long_and_the_log_is_cut_when_the_reader_lets_go(run_folder: Path) -> None:
    endure(run_folder, shows=(1, 0), min_settled=48)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_under_long_load(run_folder: Path) -> None:
    endure(run_folder, shows=(4, 4), min_settled=500)
