"""The attacks of `test_sandbox_attacks` without isolation: exactly those succeed of which `evaluators/SECURITY.md` says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.sandbox import NoIsolation
from tests.attacks import ATTACKS
from tests.attacks.range import run_all


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some ninety attacks, one after another
def test_without_isolation_exactly_the_listed_properties_fail(tmp_path: Path) -> None:
    harmless = [attack for attack in ATTACKS if not attack.harm]
    problems = run_all(tmp_path, NoIsolation(), harmless)
    failing = {name for name, found in problems.items() if found}
    expected = {attack.name for attack in harmless if attack.needs_isolation}
    assert failing == expected, (
        f"fail although listed as holding: { {name: problems[name] for name in failing - expected} }; "
        f"hold although listed as failing: {sorted(expected - failing)}"
    )
