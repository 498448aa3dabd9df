"""Rules hold for any connection, also one that knows nothing of this code and checks no foreign keys."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hypotheses.ledger import (
    Ledger,
)
from hypotheses.ledger.columns import Base
from tests.ledger_builders import candidate, control_evaluation, evaluate, new_program, observe, register, scored


def test_no_row_of_any_table_is_changed_deleted_or_replaced(played: Path) -> None:
    connection = sqlite3.connect(played)
    before = list(connection.iterdump())
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    checked = 0
    for name in names:
        if name.startswith("sqlite_") or connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] == 0:
            continue
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
        last = columns[-1]
        for statement in (
            f"UPDATE {name} SET {last} = {last}",
            f"UPDATE OR REPLACE {name} SET {last} = NULL",
            f"DELETE FROM {name}",
            f"INSERT OR REPLACE INTO {name} SELECT * FROM {name}",
            f"REPLACE INTO {name} ({', '.join(columns)}) SELECT {', '.join(columns[:-1])}, 0 FROM {name}",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="ledger: "):
                connection.execute(statement)
            checked += 1
    assert checked == 5 * len(Base.metadata.tables)
    assert list(connection.iterdump()) == before
    connection.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "control", "control_id": "ctl-x"}, "after its predictions are registered"),
        ({"kind": "control"}, "after its predictions are registered"),
        ({"state": "settled"}, "reserved before it is settled"),
        ({"kind": "free"}, "CHECK constraint failed"),
        ({"program_id": None}, "CHECK constraint failed"),
        ({"control_id": "ctl-x"}, "CHECK constraint failed"),
        ({"outcome": "scored", "nll": 1.0}, "CHECK constraint failed"),
    ],
)
def test_evaluations_that_break_a_rule_are_not_inserted(ledger: Ledger, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(sqlite3.IntegrityError, match=message):
        _insert_evaluation(ledger.path, **changes)
    assert ledger.budget().free == 10


def test_nothing_is_inserted_beyond_the_budget(played: Path) -> None:
    for kind in ("candidate", "confirmation", "final"):
        with pytest.raises(sqlite3.IntegrityError, match="no evaluator call is free"):
            _insert_evaluation(played, kind=kind)


def test_a_prediction_after_the_fact_and_a_second_campaign_are_not_inserted(played: Path) -> None:
    connection = sqlite3.connect(played)
    with pytest.raises(sqlite3.IntegrityError, match="what is known is never predicted"):
        connection.execute(
            "INSERT INTO predictions"
            " (id, registered_seq, observation_id, hypothesis_id, control_id, low, high, body)"
            " SELECT 'pred-x', 1000000, observation_id, hypothesis_id, control_id, low, high, body FROM predictions"
        )
    columns = [row[1] for row in connection.execute("PRAGMA table_info(campaign)")][2:]
    with pytest.raises(sqlite3.IntegrityError, match="one campaign"):
        connection.execute(
            f"INSERT INTO campaign (id, seq, {', '.join(columns)}) "
            f"SELECT 'camp-x', 1000000, {', '.join(columns)} FROM campaign"
        )
    connection.close()


def test_a_control_whose_result_was_known_is_not_inserted(ledger: Ledger) -> None:
    """The same program, measured for one observation before the predictions of another one were registered."""
    first = register(ledger, observe(ledger))
    program = ledger.add_program(new_program(9, origin="control"))
    evaluate(ledger, control_evaluation(first, program), scored())
    second = register(ledger, observe(ledger, number=2))
    changes = {"kind": "control", "control_id": second.controls[0].id, "program_id": program.id}
    with pytest.raises(sqlite3.IntegrityError, match="measured before its predictions were registered"):
        _insert_evaluation(ledger.path, **changes)
    _insert_evaluation(ledger.path, **changes, draw=1)


def test_a_reserved_evaluation_can_only_be_settled_as_what_it_is(ledger: Ledger) -> None:
    program = ledger.add_program(new_program())
    ledger.add_program(new_program(1))
    ledger.reserve_evaluation(candidate(program))
    connection = sqlite3.connect(ledger.path)
    for change in ("draw = 1", "turn = 5", "kind = 'setup'", "state = 'settled', program_id = 'x'", "nll = 1.0"):
        with pytest.raises(sqlite3.IntegrityError, match="can only be settled"):
            connection.execute(f"UPDATE evaluations SET {change}")
    connection.close()


def _insert_evaluation(path: Path, **changes: Any) -> None:
    row = {"id": "eval-x", "reserved_seq": 10**6, "kind": "candidate", "state": "reserved", "program_id": "prog-x"}
    row |= {"split": "search", "draw": 0, "seed": 0} | changes
    connection = sqlite3.connect(path)
    try:
        places = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO evaluations ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
    finally:
        connection.close()
