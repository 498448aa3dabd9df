"""What an older rule said stays what it says, whatever becomes of the rule in force."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forge.measured_effects import parent_luck, planned_width
from forge.noise import NoiseModel
from forge.verdict_rules import VERDICT_RULES
from hypotheses import verdict_2
from hypotheses.design import Design
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Settlement
from hypotheses.predictions import Explanation
from hypotheses.verdicts import RULE, ControlMeasurement

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "verdict_2.json").read_text(encoding="utf-8"))


def rounded(value: Any) -> Any:
    """Return plain data with numbers to ten digits: the arithmetic of another library may move the last ones."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_verdict_2_says_what_it_said(case: dict[str, Any]) -> None:
    given = VERDICT_RULES["verdict/2"].verdicts(
        Explanation.parse(case["explanation"]),
        PairedEffect.from_json(case["child"]),
        [ControlMeasurement.from_json(row) for row in case["measurements"]],
        Design.from_json(case["design"]),
        case["alpha"],
    )
    assert rounded(json.loads(json.dumps(given))) == rounded(case["verdicts"])


def test_the_golden_cases_have_every_outcome_an_interaction_and_a_void_control() -> None:
    verdicts = [verdict for case in GOLDEN for verdict in case["verdicts"].values()]
    assert {v["status"] for v in verdicts} == {"supported", "refuted", "inconclusive", "not_executed", "invalid"}
    assert any(interaction["significant"] for v in verdicts for interaction in v["interactions"])
    assert any(v["void"] and v["checks"] for v in verdicts)
    assert any(row["covariance"]["chunks"] for case in GOLDEN for row in case["measurements"])


def test_the_rule_in_force_can_be_recomputed() -> None:
    assert RULE in VERDICT_RULES


def test_the_width_of_verdict_2_is_that_of_its_designs() -> None:
    confirmed = PairedEffect(
        mean=0.2, standard_error=0.01, num_chunks=24, chunk_variance=0.001, program_variance=5e-5, program_draws=5
    )
    noise = NoiseModel(draw_variance=2e-5, num_draws=5, floor=0.01, full_precision=2.5, reference_damage=0.4)
    calibrated = Settlement(outcome="scored", chunk_nll=(3.0, 3.1), evidence={"events": [{"op": "inputs"}]})
    for parent in (calibrated, Settlement(outcome="scored", chunk_nll=(3.0, 3.1))):
        width = VERDICT_RULES["verdict/2"].width(confirmed, parent, noise, 0.996)
        assert width == verdict_2.plan_width(confirmed, shared_variance=parent_luck(parent, noise), level=0.996)
        if RULE == verdict_2.RULE:
            assert width == planned_width(confirmed, parent, noise, level=0.996)
    faint = PairedEffect(mean=0.01, standard_error=0.01, num_chunks=24, chunk_variance=0.0024, program_variance=0.0)
    assert verdict_2.plan_width(faint, shared_variance=0.0, level=0.98) == math.inf
