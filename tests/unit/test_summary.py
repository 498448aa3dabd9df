"""The summary says what the ledger says, on a finished campaign, a young one and one that is being written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.summary import summarize
from hypotheses.ledger import (
    Ledger,
    NewIncumbent,
    NewNote,
    NewVerdict,
)
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, observe, play, register, scored


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        yield ledger


def test_a_campaign_in_figures(ledger: Ledger) -> None:
    play(ledger)
    summary = summarize(ledger)
    full, seed, best = summary.figures
    assert (full.name, seed.name, best.name) == ("full precision", "program 0 (seed)", "best: program 1")
    assert summary.best == best
    assert (full.nll, seed.nll, best.nll) == (2.05, 3.25, 2.5)
    assert best.perplexity == math.exp(2.5)
    assert seed.damage == pytest.approx(1.2)
    assert seed.recovery == pytest.approx(0.0)
    assert best.damage == pytest.approx(0.45)
    assert best.recovery == pytest.approx(1 - 0.45 / 1.2)
    assert (full.effective_bits, best.effective_bits, best.contract_class) == (4.25, 4.25, "online")
    budget = summary.budget
    assert budget.used + budget.reserved + budget.free == budget.total == 10
    assert summary.noise_floor == 0.01
    assert summary.violations == ()
    assert summary.content_hash == ledger.content_hash()


def test_observations_edits_refusals_and_calls(ledger: Ledger) -> None:
    play(ledger)
    summary = summarize(ledger)
    (observation,) = summary.observations
    assert [(rival.cause, rival.status) for rival in observation.rivals] == [
        ("outlier_spreading", "refuted"),
        ("error_averaging", "supported"),
    ]
    assert [(row.control, row.chosen, row.measured) for row in observation.rivals[0].predictions] == [
        ("without-rotation", True, None)
    ]
    assert observation.calls_for_controls == 1
    (edit,) = summary.required_edits
    assert (edit.state, edit.closed_turn, edit.kind) == ("discharged", 2, "extend")
    assert edit.probes[0].startswith("paid run of prog-")
    (refusal,) = summary.refusals
    assert (refusal.turn, refusal.stage, refusal.reason) == (1, "edits", "no match")
    assert sum(call.promoted for call in summary.calls) == 2
    assert [call.outcome for call in summary.calls].count("crashed") == 1
    crashed = next(call for call in summary.calls if call.outcome == "crashed")
    assert (crashed.nll, crashed.effective_bits) == (None, None)
    assert (summary.llm_calls, summary.llm_tokens, summary.llm_cost) == (1, 1, None)


def test_predictions_beside_measurements(ledger: Ledger) -> None:
    observation = observe(ledger)
    registration = register(ledger, observation)
    check = {"control": "without-rotation", "estimate": 0.1, "measured": {"low": 0.05, "high": 0.15}, "failed": False}
    ledger.record_verdicts(
        [
            NewVerdict(
                hypothesis_id=hypothesis.id,
                status=status,
                rule="verdict/1",
                reason="r",
                evidence={"verdict": {"checks": [check | {"failed": status == "refuted"}]}},
            )
            for hypothesis, status in zip(registration.hypotheses, ("supported", "refuted"), strict=True)
        ]
    )
    summary = summarize(ledger)
    rows = [rival.predictions[0] for rival in summary.observations[0].rivals]
    assert [(row.low, row.high, row.measured, row.measured_low, row.measured_high, row.failed) for row in rows] == [
        (0.0, 0.2, 0.1, 0.05, 0.15, False),
        (0.4, 0.6000000000000001, 0.1, 0.05, 0.15, True),
    ]
    (author,) = summary.honesty.authors
    everyone = author.coverage[0]
    assert (everyone.inside.count, everyone.inside.of, everyone.undecided, everyone.refuted) == (1, 2, 0, 1)


def test_an_unbounded_measurement_has_no_interval(ledger: Ledger) -> None:
    registration = register(ledger, observe(ledger))
    check = {"control": "without-rotation", "estimate": 0.1, "measured": None, "failed": False}
    ledger.record_verdicts(
        [
            NewVerdict(
                hypothesis_id=registration.hypotheses[0].id,
                status="inconclusive",
                rule="verdict/1",
                reason="r",
                evidence={"verdict": {"checks": [check]}},
            )
        ]
    )
    rivals = summarize(ledger).observations[0].rivals
    assert (rivals[0].predictions[0].measured, rivals[0].predictions[0].measured_low) == (0.1, None)
    assert rivals[1].status == "no verdict"


def test_a_campaign_that_has_only_begun(ledger: Ledger) -> None:
    summary = summarize(ledger)
    assert summary.figures == ()
    assert summary.noise_floor is None
    assert summary.calls == ()
    seed = ledger.add_program(new_program(0))
    ledger.reserve_evaluation(candidate(seed, kind="setup"))
    (call,) = summarize(ledger).calls
    assert (call.outcome, call.nll, call.turn) == ("reserved", None, None)


def test_without_full_precision_there_is_no_damage(ledger: Ledger) -> None:
    seed = ledger.add_program(new_program(0))
    base = evaluate(ledger, candidate(seed, turn=0), scored(3.0, 3.5))
    ledger.set_incumbent(NewIncumbent(turn=0, program_id=seed.id, evaluation_id=base.id, reason="the seed"))
    summary = summarize(ledger)
    assert [(figure.damage, figure.recovery) for figure in summary.figures] == [(None, None), (None, None)]


def test_it_is_json_without_odd_numbers(ledger: Ledger) -> None:
    play(ledger)
    data = json.loads(json.dumps(summarize(ledger).to_json(), allow_nan=False))
    assert data["budget"]["free"] == 0
    assert data["figures"][-1]["name"] == "best: program 1"


def test_a_pinned_reader_sees_one_moment_beside_the_writer(ledger: Ledger) -> None:
    observation = observe(ledger)
    ledger.reserve_evaluation(candidate(ledger.add_program(new_program(7)), turn=7))
    with Ledger.open(ledger.path, read_only=True) as reader:
        reader.pin()
        before = summarize(reader)
        register(ledger, observation)
        ledger.add_note(NewNote(turn=1, topic="late", text="after the pin"))
        evaluation = ledger.evaluations()[-1]
        ledger.settle_evaluation(evaluation.id, scored(2.0, 2.1))
        after = summarize(reader)
        assert after.observations == before.observations
        assert after.notes == before.notes == ()
        assert after.calls == before.calls
        assert after.calls[-1].outcome == "reserved"
        assert after.budget == before.budget
    with Ledger.open(ledger.path, read_only=True) as reader:
        assert summarize(reader).notes == ((1, "late", "after the pin"),)
        assert summarize(reader).calls[-1].outcome == "scored"
