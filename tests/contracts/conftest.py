"""Ledgers for the contract tests: an empty one, and one with rows in every table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypotheses.ledger import Ledger
from tests.ledger_builders import new_campaign, play


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.create(path, new_campaign()) as opened:
        yield opened


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished ledger with rows in every table; tests must not change it."""
    path = tmp_path_factory.mktemp("played") / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        play(ledger)
        ledger.record_environment(device="cpu", versions={})
        ledger.record_llm_failure("turn-1/propose/0", model="m", error="503")
        assert ledger.budget().free == 0
    return path
