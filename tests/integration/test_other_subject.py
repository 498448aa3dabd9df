"""The quickstart's catalogue on a subject and with a seed that it was not written with. Minutes.

Less text, fewer draws and fewer calls than the quickstart has: invariants do not hang on luck, and of lucky verdicts only
`test_quickstart` asks.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

from tests.campaign_builders import QUICKSTART, run_quickstart
from tests.ledger_queries import OBSERVATIONS_WITH_RIVALS, count, violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_another_subject_and_seed_keep_the_same_invariants(tmp_path: Path) -> None:
    recipe = tomllib.loads(QUICKSTART.read_text())
    recipe["campaign"] |= {"budget_calls": 8}
    recipe["corpus"] |= {"search": 40, "confirm": 40}
    recipe["evaluation"] |= {"calibration_chunks": 16, "noise_draws": 5}
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe))
    ledger = run_quickstart(tmp_path / "run", "--subject", "nano-qwen3", "--seed", "2026", recipe=path)
    assert violations(ledger) == {}
    assert count(ledger, OBSERVATIONS_WITH_RIVALS) >= 1
