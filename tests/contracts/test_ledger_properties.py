"""Random interleavings of reservations, results, failures of the host and killed processes keep the budget exact."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypotheses.ledger import BudgetExhausted, EvaluationInProgress, Ledger, LedgerRefused, Settlement
from tests.ledger_builders import candidate, new_campaign, new_program, scored

STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["reserve", "settle", "fail", "release"]), st.integers(0, 5)),
        st.tuples(st.just("kill"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(budget=st.integers(0, 4), steps=STEPS)
def test_used_reserved_and_free_always_sum_to_the_budget(budget: int, steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = Ledger.create(path, new_campaign(budget=budget))
        programs = [ledger.add_program(new_program(number)) for number in range(6)]
        ids: dict[int, str] = {}
        state: dict[int, str] = {}  # "held" by this process, "idle" (released, or its process died), "settled"
        attempts: dict[int, int] = {}
        for action, number in steps:
            new = candidate(programs[number])
            now = state.get(number)
            if action == "kill":
                ledger.close()
                ledger = Ledger.open(path)
                state = {key: "idle" if value == "held" else value for key, value in state.items()}
            elif action == "reserve" and now is None and len(state) >= budget:
                with pytest.raises(BudgetExhausted):
                    ledger.reserve_evaluation(new)
            elif action == "reserve" and now == "held":
                with pytest.raises(EvaluationInProgress):
                    ledger.reserve_evaluation(new)
            elif action == "reserve":
                evaluation = ledger.reserve_evaluation(new)
                attempts[number] = attempts.get(number, 0) + (now != "settled")
                assert (evaluation.is_settled, evaluation.attempt) == (now == "settled", attempts[number])
                ids[number] = evaluation.id
                state[number] = "settled" if now == "settled" else "held"
            elif action in ("settle", "fail") and now == "held":
                result = scored() if action == "settle" else Settlement(outcome="crashed", reason="it raised")
                assert ledger.settle_evaluation(ids[number], result).is_settled
                state[number] = "settled"
            elif action == "release" and now == "held":
                ledger.release_evaluation(ids[number], reason="no memory")
                state[number] = "idle"
            elif now == "idle":
                with pytest.raises(LedgerRefused):
                    ledger.settle_evaluation(ids[number], scored())
            used = sum(value == "settled" for value in state.values())
            assert _budget(path) == (budget, used, len(state) - used, budget - len(state))
            seen = ledger.budget()
            assert seen.used + seen.reserved + seen.free == seen.total == budget
        assert ledger.check_invariants() == []
        ledger.close()


def _budget(path: Path) -> tuple[int, ...]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        row: tuple[int, ...] = connection.execute("SELECT total, used, reserved, free FROM budget").fetchone()
        return row
    finally:
        connection.close()
