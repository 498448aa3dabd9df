"""A verdict follows from what was measured, and not from the order in which anything was written down or scored."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import count

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hypotheses.design import ControlOption, design_controls
from hypotheses.effects import paired_covariance, paired_effect
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.verdicts import ControlMeasurement, decide

MECHANISMS = ("branch", "fold")
NUM_CHUNKS = 20


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One control: what it is, the share of the gain that it keeps, how its run ended."""

    control: Control
    share: float
    executed: bool | None
    outcome: str
    known: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """An observation with everything that enters its verdict, its losses by a seed."""

    hypotheses: tuple[str, ...]
    measured: tuple[Measured, ...]
    centres: tuple[tuple[float, ...], ...]
    half: float
    width: float
    gain: float
    noise: float
    luck: float
    shared: float
    draws: int | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_controls = draw(st.integers(1, 5))
    measured = []
    for number in range(num_controls):
        mechanism = draw(st.sampled_from(MECHANISMS))
        kind = draw(st.sampled_from(("knockout", "knockin", "substitute")))
        measured.append(
            Measured(
                control=Control(
                    key=f"c{number}",
                    kind=kind,
                    removes=() if kind == "knockin" else (mechanism,),
                    keeps=(mechanism,) if kind == "knockin" else (),
                    edits="text" if kind == "substitute" else None,
                ),
                share=draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0, 1.3, -0.3))),
                executed=draw(st.sampled_from((True, True, True, False, None))),
                outcome=draw(st.sampled_from(("scored", "scored", "scored", "crashed", "unequal_bits"))),
                known=draw(st.sampled_from((False, False, False, True))),
            )
        )
    num_hypotheses = draw(st.integers(2, 4))
    centre = st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0))
    centres = [tuple(draw(centre) for _ in range(num_controls)) for _ in range(num_hypotheses)]
    if draw(st.booleans()):  # one that stands, without which none falls
        centres[0] = tuple(row.share for row in measured)
    return Case(
        hypotheses=tuple(f"h{number}" for number in range(num_hypotheses)),
        measured=tuple(measured),
        centres=tuple(centres),
        half=draw(st.sampled_from((0.05, 0.1, 0.2))),
        width=draw(st.sampled_from((0.02, 0.1, 0.4, math.inf))),
        gain=draw(st.sampled_from((0.4, 0.05, -0.2))),
        noise=draw(st.sampled_from((0.0, 0.005, 0.03))),
        luck=draw(st.sampled_from((0.0, 1e-5))),
        shared=draw(st.sampled_from((0.0, 5e-6))),
        draws=draw(st.sampled_from((None, 5))),
        seed=draw(st.integers(0, 2**16)),
    )


def verdicts_of(case: Case, order: random.Random) -> list[dict[str, object]]:
    """Decide with hypotheses, controls, predictions, measurements and chunks in an order of their own."""
    rng = np.random.default_rng(case.seed)
    parent = rng.normal(3, 0.3, NUM_CHUNKS)
    child = parent - case.gain + case.noise * rng.normal(size=NUM_CHUNKS)
    losses = [parent - row.share * case.gain + case.noise * rng.normal(size=NUM_CHUNKS) for row in case.measured]
    chunks = order.sample(range(NUM_CHUNKS), NUM_CHUNKS)

    def of(values: np.ndarray) -> list[float]:
        return [float(values[index]) for index in chunks]

    program = {"program_variance": case.luck, "program_draws": case.draws}
    measurements = [
        ControlMeasurement(
            control=row.control.key,
            effect=paired_effect(of(parent), of(own), **program) if row.outcome != "crashed" else None,  # type: ignore[arg-type]
            covariance=paired_covariance(of(parent), of(own), of(child), shared_variance=min(case.shared, case.luck)),
            executed=row.executed,
            outcome=row.outcome,
            known_at_registration=row.known,
        )
        for row, own in zip(case.measured, losses, strict=True)
    ]
    predictions = [
        Prediction(hypothesis=name, control=row.control.key, low=middle - case.half, high=middle + case.half)
        for name, middles in zip(case.hypotheses, case.centres, strict=True)
        for row, middle in zip(case.measured, middles, strict=True)
    ]
    hypotheses = [Hypothesis(key=name, cause=name, mechanism="branch", statement=name) for name in case.hypotheses]
    controls = [row.control for row in case.measured]
    for items in (measurements, predictions, hypotheses, controls):
        order.shuffle(items)  # type: ignore[arg-type]
    explanation = Explanation.model_construct(
        hypotheses=tuple(hypotheses), controls=tuple(controls), predictions=tuple(predictions)
    )
    design = design_controls(
        predictions,
        [ControlOption(key=control.key, cost=control.cost, content_hash=control.key) for control in controls],
        widths={control.key: case.width for control in controls},
        budget_calls=10,
    )
    effect = paired_effect(of(parent), of(child), **program)  # type: ignore[arg-type]
    return [verdict.to_json() for verdict in decide(explanation, effect, measurements, design)]


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**16))
def test_invariant_under_every_order(case: Case, seed: int) -> None:
    first, second = (verdicts_of(case, random.Random(seed + number)) for number in range(2))
    assert first == second
    for verdict in first:
        event(str(verdict["status"]))
        event(f"interactions: {bool(verdict['interactions'])}, void: {bool(verdict['void'])}")


def test_the_cases_reach_what_the_property_is_about() -> None:
    """Every outcome, voids, and clear interactions occur among the drawn cases, else the property is empty."""
    seen: set[str] = set()
    numbers = count()

    @settings(max_examples=250, deadline=None, database=None, derandomize=True)
    @given(cases())
    def look(case: Case) -> None:
        for verdict in verdicts_of(case, random.Random(next(numbers))):
            seen.add(str(verdict["status"]))
            seen.update("interaction" for row in verdict["interactions"] if row["significant"])  # type: ignore[attr-defined]
            seen.update("void beside evidence" for _ in verdict["void"] if verdict["checks"])  # type: ignore[attr-defined]

    look()
    assert {
        "supported",
        "refuted",
        "inconclusive",
        "not_executed",
        "invalid",
        "interaction",
        "void beside evidence",
    } <= seen
