"""What the loop makes of a world: trigger, confirmation, design, controls, verdicts; and what two other ways make of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from forge.measured_effects import control_effect, effect_on, effect_on_reference, planned_width
from forge.recipe import Statistics
from forge.worlds.generate import World
from hypotheses.design import SHARE, ControlOption, Design, plan_controls
from hypotheses.effects import PairedEffect, family_level
from hypotheses.verdicts import ControlMeasurement, Verdict, VerdictStatus, decide

Way = Literal["cheapest set", "every control", "one at random"]
WAYS: Final[tuple[Way, ...]] = ("cheapest set", "every control", "one at random")
BUDGET: Final = 20
"""Calls that may be spent on the controls of a world; every control together costs at most 12."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one way found.

    calls: spent on controls. is_separated: whether the controls that ran separate the true cause from every rival; False where it
    is no hypothesis.
    """

    calls: int
    is_separated: bool
    statuses: Mapping[str, VerdictStatus]


def observe(world: World, statistics: Statistics) -> PairedEffect | None:
    """Return the confirmed effect; None where the gain is not clear enough to be confirmed, or does not hold then."""
    if not is_triggered(world, statistics):
        return None
    confirmed = effect_on_reference(world.confirmation, world.search_parent, world.noise)
    return confirmed if confirmed.z >= statistics.confirm_sigma else None


def is_triggered(world: World, statistics: Statistics) -> bool:
    """Return whether the gain on the search split asks for a confirmation."""
    search = effect_on(world.search_parent, world.search_child, world.noise)
    return search.mean > statistics.trigger_sigma * search.standard_error


def judge(world: World, confirmed: PairedEffect, statistics: Statistics, number: int) -> dict[Way, Judgement]:
    """Return what each way makes of an observation; `number` picks the control of the way that takes one at random."""
    explanation = world.explanation
    options = [
        ControlOption(key=control.key, cost=control.cost, content_hash=f"{number}/{control.key}")
        for control in explanation.controls
    ]

    def width_of(num_controls: int) -> float:
        level = family_level(len(explanation.hypotheses), num_controls, alpha=statistics.error_rate)
        return planned_width(confirmed, world.search_parent, world.noise, level=level)

    design = plan_controls(explanation.predictions, options, width_of=width_of, budget_calls=BUDGET)
    at_random = random.Random(f"one at random/{number}").choice(sorted(option.key for option in options))
    chosen: dict[Way, tuple[str, ...]] = {
        "cheapest set": design.chosen if design.feasible else (),
        "every control": tuple(sorted(option.key for option in options)),
        "one at random": (at_random,),
    }
    costs = {option.key: option.cost for option in options}
    return {
        way: Judgement(
            calls=sum(costs[key] for key in keys),
            is_separated=_is_separated(world, design, keys),
            statuses={
                verdict.hypothesis: verdict.status for verdict in _decide(world, confirmed, design, keys, statistics)
            },
        )
        for way, keys in chosen.items()
    }


def _decide(
    world: World, confirmed: PairedEffect, design: Design, keys: tuple[str, ...], statistics: Statistics
) -> tuple[Verdict, ...]:
    measurements = []
    for key in keys:
        effect, covariance = control_effect(world.controls[key], world.confirmation, world.search_parent, world.noise)
        measurements.append(ControlMeasurement(control=key, effect=effect, covariance=covariance, executed=True))
    return decide(world.explanation, confirmed, measurements, design, alpha=statistics.error_rate)


def _is_separated(world: World, design: Design, keys: tuple[str, ...]) -> bool:
    if world.truth is None:
        return False
    predictions = {(p.hypothesis, p.control): p.interval for p in world.explanation.predictions}
    return all(
        any(
            predictions[world.truth, key].is_disjoint(predictions[rival.key, key], SHARE * design.widths[key])
            for key in keys
        )
        for rival in world.explanation.hypotheses
        if rival.key != world.truth
    )
