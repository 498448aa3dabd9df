"""The rules that verdicts were given by, by version: each stays callable, so that what it said can be recomputed.

A verdict names its rule. A new version takes the place of the one in force; the old one keeps its decision and its expected
width in a module of its own, and what they gave stays as it was (`tests/golden/verdict_2.json`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.measured_effects import parent_luck, planned_width
from forge.noise import NoiseModel
from hypotheses import verdict_2
from hypotheses.design import ControlOption, Design, design_controls, plan_controls
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Settlement
from hypotheses.predictions import Explanation, Prediction
from hypotheses.verdicts import RULE, ControlMeasurement, Verdict, decide


@dataclass(frozen=True, kw_only=True)
class VerdictRule:
    """One version of the rule.

    width: expected width of a control's retained effect, from the confirmed effect, the parent's result, the noise and the
        level. plan: the design, from predictions, options, the expected width by number of controls, and the calls that may be
        spent, and the rivals. decide: the verdicts, from explanation, confirmed effect, measurements, design and error rate.
    """

    width: Callable[[PairedEffect, Settlement, NoiseModel, float], float]
    plan: Callable[
        [Sequence[Prediction], Sequence[ControlOption], Callable[[int], float], int, Collection[str]], Design
    ]
    decide: Callable[[Explanation, PairedEffect, Sequence[ControlMeasurement], Design, float], tuple[Verdict, ...]]

    def verdicts(
        self,
        explanation: Explanation,
        child: PairedEffect,
        measurements: Sequence[ControlMeasurement],
        design: Design,
        alpha: float,
    ) -> dict[str, dict[str, Any]]:
        """Return the JSON of every verdict by hypothesis key."""
        given = self.decide(explanation, child, measurements, design, alpha)
        return {verdict.hypothesis: verdict.to_json() for verdict in given}


def _width_2(confirmed: PairedEffect, parent: Settlement, noise: NoiseModel, level: float) -> float:
    return verdict_2.plan_width(confirmed, shared_variance=parent_luck(parent, noise), level=level)


def _plan_2(
    predictions: Sequence[Prediction],
    options: Sequence[ControlOption],
    width_of: Callable[[int], float],
    budget_calls: int,
    hypotheses: Collection[str],
) -> Design:
    width = width_of(max(1, len(options)))
    return design_controls(
        predictions,
        options,
        widths={option.key: width for option in options},
        budget_calls=budget_calls,
        hypotheses=hypotheses,
        share=1.0,
        at_odds=0,
        least=0,
    )


VERDICT_RULES: Mapping[str, VerdictRule] = {
    verdict_2.RULE: VerdictRule(
        width=_width_2,
        plan=_plan_2,
        decide=lambda explanation, child, rows, design, alpha: verdict_2.decide(
            explanation, child, rows, design, alpha=alpha
        ),
    ),
    RULE: VerdictRule(
        width=lambda confirmed, parent, noise, level: planned_width(confirmed, parent, noise, level=level),
        plan=lambda predictions, options, width_of, budget_calls, hypotheses: plan_controls(
            predictions, options, width_of=width_of, budget_calls=budget_calls, hypotheses=hypotheses
        ),
        decide=lambda explanation, child, rows, design, alpha: decide(explanation, child, rows, design, alpha=alpha),
    ),
}
"""By version; the one in force is `hypotheses.verdicts.RULE`."""
