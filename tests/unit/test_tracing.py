"""A knocked-out twin is run on the whole subject once for each accepted proposal; a resumed campaign finds what it showed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluators.pool import EvaluatorPool
from evaluators.results import EvaluationResult, Evidence, Outcome
from forge.desk import Desk
from forge.progress import QuietProgress
from hypotheses.ledger import Ledger, NewProposal, Program
from tests.ledger_builders import new_campaign, new_program


class Traces:
    """Traces every program to one outcome, and counts."""

    def __init__(self, outcome: Outcome = Outcome.SCORED) -> None:
        self.outcome = outcome
        self.seen: list[tuple[int, int]] = []

    def trace(self, source: str, *, draw: int = 0, seed: int = 0) -> EvaluationResult:
        self.seen.append((draw, seed))
        layers = {"blocks.0.q": {"digest": "d", "weight_error": float("inf")}}
        return EvaluationResult(
            outcome=self.outcome, reason="", split="search", draw=draw, seed=seed, evidence=Evidence(layers=layers)
        )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        for turn in (1, 2):
            program = ledger.add_program(new_program(turn))
            for kind in ("candidate", "explanation"):
                ledger.record_proposal(
                    NewProposal(turn=turn, attempt=0, kind=kind, status="accepted", program_id=program.id)
                )
        yield ledger


def desk(ledger: Ledger, traces: Traces) -> Desk:
    return Desk(ledger, EvaluatorPool(lambda: traces), QuietProgress())  # type: ignore[arg-type,return-value]


def twin(ledger: Ledger) -> Program:
    return ledger.add_program(new_program(9, origin="knockout"))


def test_it_is_run_once_for_a_proposal_and_reads_the_same_ever_after(ledger: Ledger) -> None:
    traces = Traces()
    first = desk(ledger, traces).trace(twin(ledger), draw=0, seed=5, turn=1)
    again = desk(ledger, traces).trace(twin(ledger), draw=0, seed=5, turn=1)
    assert traces.seen == [(0, 5)]
    assert first == again
    assert first is not None
    assert first["layers"] == {"blocks.0.q": {"digest": "d", "weight_error": None}}
    desk(ledger, traces).trace(twin(ledger), draw=0, seed=5, turn=2)
    assert len(traces.seen) == 2
    assert [screening.checks for screening in ledger.screenings()] == [({"run": "trace", "draw": 0, "seed": 5},)] * 2


def test_one_that_does_not_end_is_remembered_too(ledger: Ledger) -> None:
    traces = Traces(Outcome.CRASHED)
    for _ in range(2):
        assert desk(ledger, traces).trace(twin(ledger), draw=0, seed=5, turn=1) is None
    assert len(traces.seen) == 1
