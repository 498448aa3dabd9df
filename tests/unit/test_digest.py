"""The digest tells a proposer of verdicts first, then of the newest programs and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.digest import MAX_PROGRAM_LINES, ledger_digest
from hypotheses.ledger import Ledger, NewProposal, Settlement
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, play, scored


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(budget=50)) as ledger:
        yield ledger


def test_a_young_campaign_has_a_digest_too(ledger: Ledger) -> None:
    assert ledger_digest(ledger).split("\n") == ["Verdicts:", "- none yet", "Programs evaluated:", "- the seed only"]


def test_verdicts_come_first_then_programs_then_refusals(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "small.sqlite", new_campaign(budget=10)) as ledger:
        play(ledger)
        lines = ledger_digest(ledger).split("\n")
    assert lines[0] == "Verdicts:"
    assert lines[1].endswith("turn 1: program 1 +0.7500 +- 0.0200 nats/token, confirmed")
    assert lines[2:4] == [
        "  - outlier_spreading (rotation): refuted",
        "  - error_averaging (rotation): supported",
    ]
    assert any("program 1" in line and "2.5000 nats/token, 4.25 bits" in line for line in lines)
    assert any(line.endswith(": crashed") for line in lines)
    assert lines[-2:] == ["Refused before any call, newest last:", "- turn 1: edits: no match"]


def test_many_programs_keep_the_newest(ledger: Ledger) -> None:
    for number in range(MAX_PROGRAM_LINES + 7):
        program = ledger.add_program(new_program(number))
        evaluate(ledger, candidate(program, turn=number), scored(3.0, 3.5))
    lines = ledger_digest(ledger).split("\n")
    assert "- 7 older ones left out" in lines
    assert not any("program 6 " in line for line in lines)
    assert any(f"program {MAX_PROGRAM_LINES + 6} " in line for line in lines)


def test_what_a_run_left_unsaid_is_left_out(ledger: Ledger) -> None:
    program = ledger.add_program(new_program(1))
    evaluate(ledger, candidate(program, turn=1), scored(3.0, 3.5, effective_bits=None))
    ledger.reserve_evaluation(candidate(ledger.add_program(new_program(2)), turn=2))
    crashed = ledger.add_program(new_program(3))
    evaluate(ledger, candidate(crashed, turn=3), Settlement(outcome="crashed", reason="r"))
    lines = ledger_digest(ledger).split("\n")
    assert lines[3].endswith(": 3.2500 nats/token")
    assert lines[4].endswith(": crashed")
    assert len(lines) == 5, "a run that goes on is no result"


def test_refusals_show_five_first_lines_and_explanations_none(ledger: Ledger) -> None:
    for turn in range(1, 8):
        ledger.record_proposal(
            NewProposal(turn=turn, attempt=0, status="refused", stage="smoke", reason=f"reason {turn}\nmore \x1b[2J")
        )
    ledger.record_proposal(
        NewProposal(turn=9, attempt=0, kind="explanation", status="refused", stage="explanation", reason="rivals")
    )
    ledger.record_proposal(NewProposal(turn=10, attempt=0, status="refused", stage="format", reason="\n"))
    lines = ledger_digest(ledger).split("\n")
    assert lines[-5:] == [*(f"- turn {turn}: smoke: reason {turn}" for turn in range(4, 8)), "- turn 10: format: "]
