"""The quickstart as it ships. Minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.recomputing import recompute
from hypotheses.ledger import Ledger
from tests.campaign_builders import run_quickstart
from tests.ledger_queries import (
    DISCHARGED_LATER,
    OBSERVATIONS_WITH_RIVALS,
    REFUSED_BEFORE_A_CALL,
    RETURNED_RENAMED,
    VERDICTS,
    count,
    recomputed,
    violations,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_quickstart(tmp_path_factory.mktemp("quickstart") / "run")


def test_it_shows_what_the_readme_promises(ledger: Path) -> None:
    assert violations(ledger) == {}
    assert count(ledger, OBSERVATIONS_WITH_RIVALS) >= 3
    assert count(ledger, REFUSED_BEFORE_A_CALL) >= 1


def test_it_decides(ledger: Path) -> None:
    """Verdicts hang on the processor's rounding as on any other luck; these are the ones that the shipped seed reaches."""
    assert count(ledger, VERDICTS, "refuted") >= 1
    assert count(ledger, VERDICTS, "supported") >= 1
    assert count(ledger, DISCHARGED_LATER) >= 1


def test_a_refuted_mechanism_that_returns_under_another_name_is_refused_before_any_call(ledger: Path) -> None:
    assert count(ledger, RETURNED_RENAMED) >= 1


def test_its_verdicts_follow_from_the_ledger_alone(ledger: Path) -> None:
    for observation, statuses in recomputed(ledger).items():
        for hypothesis, (stored, again) in statuses.items():
            assert stored == again, f"{observation} {hypothesis}"


def test_its_verdicts_follow_from_its_losses_and_evidence(ledger: Path) -> None:
    with Ledger.open(ledger, read_only=True) as reader:
        found = recompute(reader)
    assert found.differences == ()
    assert found.agreeing == found.verdicts >= 6


def test_swapped_effects_take_every_support_away(ledger: Path) -> None:
    """With controls that came out the other way round none stays supported, and where a rival fits that result it is refuted."""
    swapped = [
        (hypothesis, again)
        for statuses in recomputed(ledger, swap=True).values()
        for hypothesis, (stored, again) in statuses.items()
        if stored == "supported"
    ]
    assert swapped
    assert [name for name, again in swapped if again == "supported"] == []
    assert "refuted" in {again for _, again in swapped}
