"""What a verdict is made of: measurements of controls, checks of predictions, and the verdict itself, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from hypotheses.effects import INDEPENDENT, Covariance, Interval, PairedEffect

RULE = "verdict/3"
ALPHA = 0.02
"""Error rate per observation, over its hypotheses and controls together."""
SCORED = "scored"


class VerdictStatus(StrEnum):
    """What the rule says about one hypothesis."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    NOT_EXECUTED = "not_executed"
    INVALID = "invalid"


@dataclass(frozen=True, kw_only=True)
class ControlMeasurement:
    """What one run of a control gave.

    effect: on the observation's parent; None unless the run was scored.
    covariance: of this effect with the child's confirmed one, see `effects.paired_covariance`; none for effects on
        different chunks.
    executed: answer of the control's own probe; None when undetermined, which is no evidence either.
    outcome: ``scored``, or how the run failed (also ``unequal_bits`` for a substitute that spends other bits).
    reason: of the outcome, or the probe's answer.
    known_at_registration: the result was there before the predictions were; shown, never evidence.
    """

    control: str
    effect: PairedEffect | None
    executed: bool | None
    covariance: Covariance = INDEPENDENT
    outcome: str = "scored"
    reason: str = ""
    known_at_registration: bool = False

    @property
    def void_reason(self) -> str | None:
        """Why this is no evidence; None when it is."""
        detail = f": {self.reason}" if self.reason else ""
        if self.known_at_registration:
            return f"{self.control}: its result was known when the predictions were registered"
        if self.outcome != SCORED:
            return f"{self.control}: {self.outcome}{detail}"
        if self.executed is None:
            return f"{self.control}: whether its change executed is undetermined{detail}"
        if not self.executed:
            return f"{self.control}: its change did not execute{detail}"
        return None if self.effect is not None else f"{self.control}: scored without an effect{detail}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        effect = data["effect"]
        read = {
            "effect": None if effect is None else PairedEffect.from_json(effect),
            "covariance": Covariance(**data.get("covariance", {})),
        }
        return cls(**{**data, **read})


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """One prediction against one measurement.

    measured: Fieller's interval at `level`; None when unbounded.
    failed: rejected by Holm. counts: whether that speaks against the hypothesis (see interaction).
    fits: `measured` lies inside `predicted` widened by half of `design_width`, and `estimate` nearly inside `predicted`.
    separates: rivals whose predictions for this control are disjoint from this one by more than `design.SHARE` of the design
        width.
    """

    control: str
    predicted: Interval
    estimate: float | None
    measured: Interval | None
    level: float
    p_value: float
    failed: bool
    counts: bool
    fits: bool
    design_width: float
    separates: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """Disagreement of a knockout and a knockin of the same mechanisms.

    excess: ``1 - r(knockout) - r(knockin)``; 0 when the effects of the mechanism and of the rest simply add, positive
        when they need each other.
    p_value: of excess = 0, whatever the correlation of the two effects.
    """

    knockout: str
    knockin: str
    excess: float
    p_value: float
    significant: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one hypothesis, with all that went into it."""

    rule: str
    hypothesis: str
    mechanism: str
    cause: str
    status: VerdictStatus
    reason: str
    alpha: float
    checks: tuple[PredictionCheck, ...]
    survivors: tuple[str, ...]
    interactions: tuple[Interaction, ...] = ()
    void: tuple[str, ...] = ()

    @property
    def claim(self) -> tuple[str, str]:
        """The pair (mechanism, cause) that the verdict is about."""
        return (self.mechanism, self.cause)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, equal exactly when two verdicts are; an infinite design width is null."""
        data = asdict(self)
        for check in data["checks"]:
            if not math.isfinite(check["design_width"]):
                check["design_width"] = None
        return data
