"""Every known evasion, as a real program in the real sandbox: what does nothing is refused or reads not executed."""

from __future__ import annotations

import pytest

from forge.evasions.cases import CASES, Case
from forge.evasions.table import Row, probe_rows

BY_KEY = {case.key: case for case in CASES}


def rows_of(*keys: str) -> list[Row]:
    return list(probe_rows([BY_KEY[key] for key in keys]))


def test_the_cases_cover_what_is_known() -> None:
    assert len(BY_KEY) == len(CASES)
    assert [case.key for case in CASES if case.is_sound] == ["honest", "beyond_the_truncated_subject"]


def test_a_dead_body_with_a_harmful_neutral_is_refused_and_a_late_mechanism_is_not() -> None:
    harmful, late = rows_of("harmful_neutral", "beyond_the_truncated_subject")
    assert harmful.screening.startswith("refused (neutral): Either a neutral does something, or the edit changes")
    assert (
        "with 'spin' at the neutral the smoke run does not install what its parent installs: 14 of 14"
        in harmful.screening
    )
    assert (harmful.knockout, harmful.explained, harmful.reads) == ("not executed", (), "refused")
    assert (late.screening, late.knockout, late.explained, late.reads) == (
        "accepted",
        "executed",
        ("spin",),
        "executed",
    )


@pytest.mark.slow
def test_nothing_gets_past_the_probes() -> None:
    rows = {row.key: row for row in probe_rows()}
    assert rows.keys() == BY_KEY.keys()
    for key, row in rows.items():
        assert row.is_right, row
        if not row.is_sound:
            assert row.knockout in ("", "not executed"), row
            probed: Case = BY_KEY[key]
            # A part that acts may be explained; the part that the probe is about may not.
            assert key == "first_blocks_only" or probed.knockout.mechanism not in row.explained, row
    assert (
        rows["first_blocks_only"].why
        == "knocking out 'spin' changes 0 of 14 layers at all roles of blocks 2, 3, 100% wanted"
    )
    assert rows["harmful_neutral_beside"].explained == ("spin",)
    for key in ("empty_steps", "zero_branch"):
        assert rows[key].artifact == "not executed"
        assert rows[key].screening.startswith("refused (execution)")
    for key in ("only_on_the_truncated_subject", "harmful_neutral_later"):
        assert (rows[key].screening, rows[key].reads) == ("accepted", "not executed")
