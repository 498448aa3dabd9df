"""A ledger whose writers are killed with SIGKILL at every step and at any moment: exact budget, nothing settled twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(what: str, number: int, folder: Path) -> None:
    """Run the killer; it asserts after every kill, and its last words are kept in the test's output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ledger_killer", what, str(number), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "killed" in done.stdout
    print(done.stdout)


def test_killed_at_every_seventh_step_a_call_is_taken_over_at_no_charge(tmp_path: Path) -> None:
    run("points", 7, tmp_path)


def test_eight_workers_killed_at_random_moments_end_with_ten_starts_and_ten_results(tmp_path: Path) -> None:
    run("moments", 1, tmp_path)


@pytest.mark.slow
def test_killed_at_every_step_a_call_is_taken_over_at_no_charge(tmp_path: Path) -> None:
    run("points", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_eight_workers_killed_at_many_random_moments(tmp_path: Path, seed: int) -> None:
    run("moments", seed, tmp_path)
