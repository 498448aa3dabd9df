"""The quickstart as it ships, and the same catalogue on a subject and seed that it was not written with. Minutes each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign_builders import QUICKSTART
from tests.ledger_queries import (
    DISCHARGED_LATER,
    OBSERVATIONS_WITH_RIVALS,
    REFUSED_BEFORE_A_CALL,
    VERDICTS,
    count,
    recomputed,
    violations,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(folder: Path, *arguments: str) -> Path:
    """Run the quickstart as a user does; return its ledger."""
    command = [sys.executable, "-m", "forge", "run", str(QUICKSTART), "--out", str(folder), "--json", *arguments]
    # As a user runs it: the number of threads changes the last bits, and with them the luck.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["violations"] == []
    return folder / "ledger.sqlite"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("quickstart") / "run")


def test_it_shows_what_the_readme_promises(ledger: Path) -> None:
    assert violations(ledger) == {}
    assert count(ledger, OBSERVATIONS_WITH_RIVALS) >= 3
    assert count(ledger, REFUSED_BEFORE_A_CALL) >= 1


def test_it_decides(ledger: Path) -> None:
    """Verdicts hang on the processor's rounding as on any other luck; these are the ones that the shipped seed reaches."""
    assert count(ledger, VERDICTS, "refuted") >= 1
    assert count(ledger, VERDICTS, "supported") >= 1
    assert count(ledger, DISCHARGED_LATER) >= 1


def test_its_verdicts_follow_from_the_ledger_alone(ledger: Path) -> None:
    for observation, statuses in recomputed(ledger).items():
        for hypothesis, (stored, again) in statuses.items():
            assert stored == again, f"{observation} {hypothesis}"


def test_swapped_effects_flip_its_verdicts(ledger: Path) -> None:
    before = [pair for statuses in recomputed(ledger).values() for pair in statuses.values()]
    after = [pair for statuses in recomputed(ledger, swap=True).values() for pair in statuses.values()]
    supported = [index for index, (stored, _) in enumerate(before) if stored == "supported"]
    assert supported
    assert all(after[index][1] == "refuted" for index in supported)


def test_another_subject_and_seed_keep_the_same_invariants(tmp_path: Path) -> None:
    ledger = run(tmp_path / "run", "--subject", "nano-qwen3", "--seed", "2026")
    assert violations(ledger) == {}
    assert count(ledger, OBSERVATIONS_WITH_RIVALS) >= 1
