"""Verdicts by rule: what the executed controls say about each rival, and nothing else does.

Rule ``verdict/1``, for one observation with its confirmed effect and its registered explanation:

1. A measurement is evidence when its run was scored, its probe says that the change executed, and its result was not known
   when the predictions were registered. Everything else is void.
2. For every hypothesis and every control with evidence: the p-value at which Fieller's set of the retained effect becomes
   disjoint from the prediction. Holm over all of them at `alpha` decides which predictions failed.
3. A knockout and a knockin of the same mechanism should share the child's effect between them. Where they do not
   (interaction), a failed prediction for one of the two counts only when the hypothesis failed on the other as well.
4. *Refuted*: some prediction failed and counts. *Supported*: every rival is refuted, against every rival some executed
   control separated the two by design, and every measured interval of its own lies inside its prediction widened by half
   the design width. Otherwise *inconclusive*. Without any evidence: *not executed* where a scored run's probe found no
   change, *invalid* where every run failed, *inconclusive* where none was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hypotheses.design import Design, Pair
from hypotheses.effects import Interval, PairedEffect
from hypotheses.predictions import Explanation

RULE = "verdict/1"
ALPHA = 0.02
"""Error rate per observation, over its hypotheses and controls together."""


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
    executed: answer of the control's own probe; None when undetermined, which is no evidence either.
    outcome: ``scored``, or how the run failed (also ``unequal_bits`` for a substitute that spends other bits).
    reason: of the outcome or of the probe's answer.
    known_at_registration: the result was there before the predictions were; shown, never evidence.
    """

    control: str
    effect: PairedEffect | None
    executed: bool | None
    outcome: str = "scored"
    reason: str = ""
    known_at_registration: bool = False


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """One prediction against one measurement.

    measured: Fieller's interval at `level`; None when unbounded.
    failed: rejected by Holm. counts: whether that refutes by itself (see interaction).
    fits: `measured` lies inside `predicted` widened by half of `design_width`.
    separates: rivals whose predictions for this control are disjoint from this one by more than the design width.
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

    excess: ``1 - r(knockout) - r(knockin)``, 0 when the effects of the mechanism and of the rest simply add; positive when
        they need each other. p_value: of excess = 0, whatever the correlation of the two effects.
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
