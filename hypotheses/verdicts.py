"""Verdicts by rule: what the executed controls say about each rival, and nothing else does.

Rule ``verdict/3``, for one observation with its confirmed effect and its registered explanation:

1. A measurement is evidence when its run was scored, its probe says that the change executed, and its result was not
   known when the predictions were registered. Everything else is void.
2. For every hypothesis and every control with evidence: the p-value at which Fieller's set of the retained effect
   becomes disjoint from the prediction. Holm over all of them at `alpha` decides which predictions failed. A control is
   measured on the chunks of the confirmation, so the set takes the covariance of the two effects into account.
3. A knockout and a knockin of the same mechanism should share the child's effect between them. Where they do not
   (interaction), a failed prediction for one of the two counts only when the hypothesis failed on the other as well.
4. A hypothesis *fits* when none of its predictions failed, every measured interval lies inside its prediction widened by half the
   expected width, and every estimate lies inside its prediction to within `EXACTNESS`. Where a prediction fails, either the cause
   is wrong or the number was, and the control cannot say which. So a hypothesis falls only where another one stands: *refuted*
   when a prediction failed and counts, and a rival fits that some executed control was to separate from it. *Supported*: it fits,
   every rival is refuted, and from each of them some executed control was to separate it. Otherwise *inconclusive*. Without any
   evidence: *not executed* where a scored run's probe found no change, *invalid* where every run failed, *inconclusive* where
   none was run.

Where every prediction fails, "none of these" survives. How often this errs is counted in worlds whose truth is known, see
`forge.worlds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypotheses.design import SHARE, Design
from hypotheses.effects import Interval, PairedEffect, RetainedEffect
from hypotheses.prediction_checks import (
    Answer,
    Checks,
    RuleVersion,
    fits_widened,
    never_separated,
    tell,
    withheld_failure,
    worst_failure,
)
from hypotheses.predictions import Explanation
from hypotheses.verdict_records import (
    ALPHA,
    RULE,
    SCORED,
    ControlMeasurement,
    Interaction,
    PredictionCheck,
    Verdict,
    VerdictStatus,
)

__all__ = [
    "ALPHA",
    "RULE",
    "SCORED",
    "ControlMeasurement",
    "Interaction",
    "PredictionCheck",
    "Verdict",
    "VerdictStatus",
    "decide",
]


EXACTNESS = 0.05
"""How exact the ends of a predicted interval are meant, as a share of the child's effect."""


def decide(
    explanation: Explanation,
    child_effect: PairedEffect,
    measurements: Sequence[ControlMeasurement],
    design: Design,
    *,
    alpha: float = ALPHA,
) -> tuple[Verdict, ...]:
    """Return the verdict on every hypothesis, in the order of their keys, by rule `RULE`.

    Depends on nothing but the arguments, and not on the order of hypotheses, controls, measurements or chunks.

    Args:
        explanation: as registered before any of these controls ran.
        child_effect: of the child on the parent, from the confirmation.
        measurements: of the controls that were run, each at most once.
        design: the plan that chose them; its widths say what separates.
        alpha: error rate over all hypotheses and controls of this observation.

    Raises:
        ValueError: a measurement of a control that the explanation or the design does not know, or two of one control.
    """
    return _RULE_3.decide(explanation, child_effect, measurements, design, alpha=alpha)


def _fits(retained: RetainedEffect, predicted: Interval, width: float) -> bool:
    is_near = retained.estimate is not None and predicted.widened(EXACTNESS).contains(retained.estimate)
    return is_near and fits_widened(retained, predicted, width)


def _stands(mine: tuple[PredictionCheck, ...]) -> bool:
    return all(check.fits and not check.failed for check in mine)


def _winners(key: str, checks: Checks) -> tuple[str, ...]:
    """Return the rivals that fit and that some executed control was to separate from this hypothesis."""
    apart = {rival for check in checks[key] for rival in check.separates}
    return tuple(rival for rival in sorted(apart) if _stands(checks[rival]))


def _judge(checks: Checks, alpha: float) -> tuple[Mapping[str, Answer], tuple[str, ...]]:
    unharmed = tuple(key for key in sorted(checks) if not any(check.counts for check in checks[key]))
    return {key: _answer(key, checks, unharmed, alpha) for key in checks}, unharmed


def _answer(key: str, checks: Checks, unharmed: tuple[str, ...], alpha: float) -> Answer:
    """Return status and reason of one hypothesis; unharmed: those of which no prediction failed, or none that counts."""
    mine = checks[key]
    num_tests = sum(len(row) for row in checks.values())
    failure = worst_failure(mine, num_tests, alpha)
    if failure is not None:
        winners = _winners(key, checks)
        if winners:
            return VerdictStatus.REFUTED, f"{failure}, while {' and '.join(winners)} fits every measurement"
        return VerdictStatus.INCONCLUSIVE, (
            f"{failure}, but no rival that was to be separated from it fits all that was measured: cause or number is wrong"
        )
    withheld = withheld_failure(mine, num_tests, alpha)
    if withheld is not None:
        return VerdictStatus.INCONCLUSIVE, withheld
    rivals = [rival for rival in unharmed if rival != key]
    if rivals:
        return VerdictStatus.INCONCLUSIVE, f"not refuted, and neither is {', '.join(rivals)}"
    misfit = next((check for check in mine if not check.fits), None)
    if misfit is not None:
        return VerdictStatus.INCONCLUSIVE, f"not refuted, but {tell(misfit)}, and {_why_not(misfit)}"
    apart = never_separated(key, checks)
    if apart is not None:
        return VerdictStatus.INCONCLUSIVE, apart
    inside = "; ".join(
        f"{tell(check)}: the estimate lies in the prediction {check.predicted} to {EXACTNESS}, and the interval within half the "
        f"expected width ({check.design_width / 2:.3f}) of it"
        for check in mine
    )
    return VerdictStatus.SUPPORTED, f"every rival is refuted, and {inside}"


def _why_not(misfit: PredictionCheck) -> str:
    """Say which of the two parts of fitting does not hold."""
    if misfit.estimate is not None and misfit.predicted.widened(EXACTNESS).contains(misfit.estimate):
        return (
            f"that interval reaches further than half the expected width ({misfit.design_width / 2:.3f}) beyond its prediction "
            f"{misfit.predicted}"
        )
    return f"that estimate does not lie in its prediction {misfit.predicted} to {EXACTNESS}"


_RULE_3 = RuleVersion(name=RULE, share=SHARE, fits=_fits, judge=_judge)
