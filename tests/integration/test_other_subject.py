"""The quickstart's catalogue on a subject and with a seed that it was not written with. Minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign_builders import run_quickstart
from tests.ledger_queries import OBSERVATIONS_WITH_RIVALS, count, violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_another_subject_and_seed_keep_the_same_invariants(tmp_path: Path) -> None:
    ledger = run_quickstart(tmp_path / "run", "--subject", "nano-qwen3", "--seed", "2026")
    assert violations(ledger) == {}
    assert count(ledger, OBSERVATIONS_WITH_RIVALS) >= 1
