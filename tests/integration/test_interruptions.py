"""Stopped, paused, doubled, put off or over: what a campaign does when something other than `kill -9` comes between."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge import launch as launching
from forge.launch import relaunch
from forge.progress import QuietProgress
from hypotheses.ledger import Ledger
from tests.crash_runs import Crashes, drive, finish, left_by_a_kill, orphans, start
from tests.driver_forks import end_nurseries
from tests.integration.test_crash_points import SETUP, shared_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    end_nurseries()


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Crashes:
    return Crashes.shared(shared_folder(tmp_path_factory), kills=SETUP)


def wait_until_locked(run: Path, pid: int) -> None:
    """Wait until a process has become the writer of a run."""
    lock = run / "ledger.sqlite.lock"
    deadline = time.monotonic() + 120
    while not lock.exists() or lock.read_text().strip() != str(pid):
        assert time.monotonic() < deadline, f"process {pid} never opened the ledger"
        time.sleep(0.1)


SIGNALS = (
    ("INT", "program-running", 130, "interrupted"),
    ("INT", "settle-commit-sent", 130, "interrupted"),
    ("TERM", "registration-inside", 143, "terminated"),
    ("TERM", "trace-running", 143, "terminated"),
)
"""In the order in which a campaign meets the points."""


def test_a_signal_ends_it_in_one_line_and_it_goes_on(crashes: Crashes) -> None:
    run = crashes.place("signals")
    for name, point, status, word in SIGNALS:
        stopped = crashes.go(run, "--signal", name, point=point)
        assert stopped.status == status, f"SIG{name} at {point}: {stopped.err[-3000:]}"
        assert "Traceback" not in stopped.err
        last = stopped.err.splitlines()[-1]
        assert last == f"quantforge: {word}; `quantforge resume {run}` goes on where it stopped"
        assert stopped.left == (), f"after SIG{name} at {point}"
        _, problems = left_by_a_kill(run)
        assert problems == [], f"after SIG{name} at {point}"
    assert crashes.compare(run, crashes.go(run)) == []


def test_a_second_orchestrator_is_refused_until_the_first_is_dead(crashes: Crashes) -> None:
    run = crashes.place("second")
    with orphans() as left:
        first = start("resume", run)
        began = time.monotonic()
        try:
            wait_until_locked(run, first.pid)
            for paused in (False, True):
                if paused:
                    os.kill(first.pid, signal.SIGSTOP)
                second = drive("resume", run)
                assert second.status == 2, second.err
                (told,) = [line for line in second.err.splitlines() if line.startswith("quantforge: ")]
                assert f"is being written by process {first.pid};" in told
                assert "Traceback" not in second.err
        finally:
            first.kill()
        killed = finish(first, left, began)
    assert killed.status == -signal.SIGKILL
    assert killed.left == ()
    assert crashes.compare(run, crashes.go(run)) == []


def test_campaigns_side_by_side_do_not_disturb_each_other(crashes: Crashes) -> None:
    """One lives while three others are ended beside it, each in another way, in the middle of a program's run."""
    survivor = crashes.place("survivor")
    began = time.monotonic()
    with orphans() as left:
        process = start("resume", survivor)
        try:
            for name, status in (("KILL", -signal.SIGKILL), ("TERM", 143), ("INT", 130)):
                ended = start_beside(crashes, name)
                assert ended == status, f"the one ended by SIG{name} ended with {ended}"
        except BaseException:
            process.kill()
            raise
        lived = finish(process, left, began)
    assert crashes.compare(survivor, lived) == []


def start_beside(crashes: Crashes, name: str) -> int:
    """Start another campaign that a signal ends; return its exit status."""
    run = crashes.place(f"beside-{name}")
    process = start("resume", run, "--point", "program-running", "--signal", name)
    try:
        process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode


def test_an_outage_of_the_proposer_is_no_end(crashes: Crashes) -> None:
    run = crashes.place("outage")
    for _ in range(2):
        stopped = crashes.go(run, "--outage-turn", "2")
        assert stopped.status == 1, stopped.err[-3000:]
        assert "stopped: the proposer cannot go on: the server is down" in stopped.err
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert [note.topic for note in ledger.notes()].count("stopped") == 1
        assert ledger.llm_spend().num_failures == 2
        assert "end" not in [note.topic for note in ledger.notes()]
    ended = crashes.go(run)
    data = ended.summary
    for key in ("content_hash", "budget", "figures", "observations", "required_edits", "ending", "violations"):
        assert data[key] == crashes.reference[key], key


def test_deleted_artifacts_are_made_again_at_no_charge(crashes: Crashes) -> None:
    run = crashes.place("deleted")
    kept = {path.name for path in (run / "artifacts").iterdir()}
    assert kept
    for path in (run / "artifacts").iterdir():
        path.unlink()
    assert crashes.compare(run, crashes.go(run)) == []
    assert kept <= {path.name for path in (run / "artifacts").iterdir()}


def test_a_seed_program_that_is_gone_does_not_matter(crashes: Crashes) -> None:
    """The ledger holds the seed; the file that the recipe names was only needed once."""
    seed = crashes.folder / "seed.py"
    hidden = seed.rename(seed.with_suffix(".gone"))
    try:
        killed = crashes.go(crashes.place("no-seed"), point="reply-before-record")
    finally:
        hidden.rename(seed)
    assert killed.status == -signal.SIGKILL, killed.err[-2000:]


def test_a_finished_one_is_told_to_be_over_without_its_subject(
    crashes: Crashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        pytest.fail("an ended campaign needs nothing of the kind")

    for name in ("load_subject", "load_corpus", "make_isolation", "make_proposer", "open_evaluators"):
        monkeypatch.setattr(launching, name, never)
    run = crashes.folder / "finished" / "run"
    shutil.copytree(crashes.calm, run)
    (run / "report.md").unlink()
    outcome = relaunch(run, QuietProgress())
    assert outcome.ending.reason == crashes.reference["ending"]
    assert outcome.summary.content_hash == crashes.reference["content_hash"]
    for name in ("report.md", "ledger.sqlite"):
        assert (run / name).read_bytes() == (crashes.calm / name).read_bytes(), name
