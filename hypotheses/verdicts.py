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

import math
from collections.abc import Iterable, Mapping, Sequence

from hypotheses.design import SHARE, Design
from hypotheses.effects import (
    Covariance,
    Interval,
    PairedEffect,
    RetainedEffect,
    family_level,
    holm,
    retained_effect,
    retained_p_value,
    tail_probability,
)
from hypotheses.predictions import NONE_OF_THESE, Explanation, Hypothesis
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
    measured = _by_control(explanation, measurements, design)
    void = tuple(reason for control in sorted(measured) if (reason := measured[control].void_reason) is not None)
    effects = {
        control: measurement.effect
        for control, measurement in sorted(measured.items())
        if measurement.void_reason is None and measurement.effect is not None
    }
    hypotheses = sorted(explanation.hypotheses, key=lambda hypothesis: hypothesis.key)
    if not effects:
        status, reason = _without_evidence(measured.values(), void)
        everyone = (*(hypothesis.key for hypothesis in hypotheses), NONE_OF_THESE)
        return tuple(_verdict(hypothesis, status, reason, alpha, (), everyone, (), void) for hypothesis in hypotheses)

    covariances = {control: measured[control].covariance for control in effects}
    interactions = _find_interactions(explanation, effects, covariances, child_effect, alpha)
    checks = _check_predictions(explanation, effects, covariances, child_effect, design, interactions, alpha)
    refuted = {
        key: winners
        for key, mine in checks.items()
        if any(check.counts for check in mine) and (winners := _winners(key, checks))
    }
    answers = {hypothesis.key: _judge(hypothesis.key, checks, refuted, alpha) for hypothesis in hypotheses}
    supported = tuple(key for key, (status, _) in answers.items() if status is VerdictStatus.SUPPORTED)
    standing = tuple(key for key in sorted(checks) if key not in refuted and not any(c.counts for c in checks[key]))
    survivors = supported or (*standing, NONE_OF_THESE)
    ending = f"; survivors: {', '.join(survivors)}"
    return tuple(
        _verdict(
            hypothesis,
            answers[hypothesis.key][0],
            answers[hypothesis.key][1] + ending,
            alpha,
            checks[hypothesis.key],
            survivors,
            interactions,
            void,
        )
        for hypothesis in hypotheses
    )


def _verdict(
    hypothesis: Hypothesis,
    status: VerdictStatus,
    reason: str,
    alpha: float,
    checks: tuple[PredictionCheck, ...],
    survivors: tuple[str, ...],
    interactions: tuple[Interaction, ...],
    void: tuple[str, ...],
) -> Verdict:
    return Verdict(
        rule=RULE,
        hypothesis=hypothesis.key,
        mechanism=hypothesis.mechanism,
        cause=hypothesis.cause,
        status=status,
        reason=reason,
        alpha=alpha,
        checks=checks,
        survivors=survivors,
        interactions=interactions,
        void=void,
    )


def _by_control(
    explanation: Explanation, measurements: Sequence[ControlMeasurement], design: Design
) -> dict[str, ControlMeasurement]:
    known = {control.key for control in explanation.controls}
    measured: dict[str, ControlMeasurement] = {}
    for measurement in measurements:
        key = measurement.control
        if key not in known or key not in design.widths:
            raise ValueError(f"measurement of {key!r}, which is no control of this explanation and its design")
        if key in measured:
            raise ValueError(f"two measurements of control {key!r}; an observation uses each control once")
        measured[key] = measurement
    return measured


def _without_evidence(measurements: Iterable[ControlMeasurement], void: tuple[str, ...]) -> tuple[VerdictStatus, str]:
    blind = [measurement for measurement in measurements if not measurement.known_at_registration]
    if not blind:
        return VerdictStatus.INCONCLUSIVE, "no control was run" + "".join(f"; {reason}" for reason in void)
    if any(measurement.outcome == SCORED and not measurement.executed for measurement in blind):
        return VerdictStatus.NOT_EXECUTED, "no control is known to have executed; " + "; ".join(void)
    return VerdictStatus.INVALID, "no control gave a valid result; " + "; ".join(void)


def _find_interactions(
    explanation: Explanation,
    effects: Mapping[str, PairedEffect],
    covariances: Mapping[str, Covariance],
    child: PairedEffect,
    alpha: float,
) -> tuple[Interaction, ...]:
    """Compare every knockout with every knockin of the same mechanisms; Holm over these pairs at `alpha`."""
    run = [explanation.control(key) for key in effects]
    pairs = [
        (out.key, within.key)
        for out in run
        for within in run
        if out.kind == "knockout" and within.kind == "knockin" and set(out.removes) == set(within.keeps)
    ]
    tests = [
        _excess(effects[out], effects[within], child, covariances[out].total + covariances[within].total)
        for out, within in pairs
    ]
    significant = holm([p_value for _, p_value in tests], alpha)
    return tuple(
        Interaction(knockout=out, knockin=within, excess=excess, p_value=p_value, significant=flag)
        for (out, within), (excess, p_value), flag in zip(pairs, tests, significant, strict=True)
    )


def _excess(
    knockout: PairedEffect, knockin: PairedEffect, child: PairedEffect, covariance: float
) -> tuple[float, float]:
    """Return what the two leave of the child's effect, as a share of it, and the p-value of its being nothing.

    covariance: of the child's effect with the sum of the two.
    """
    left = child.mean - knockout.mean - knockin.mean
    # How the errors of the two go together is not recorded; the sum of their standard errors bounds that of their sum.
    both = knockout.standard_error + knockin.standard_error
    error = math.sqrt(max(0.0, both**2 + child.standard_error**2 - 2 * covariance))
    statistic = abs(left) / error if error > 0 else (math.inf if left else 0.0)
    degrees = min(effect.degrees_of_freedom for effect in (knockout, knockin, child))
    return (left / child.mean if child.mean else 0.0), tail_probability(statistic, degrees)


def _check_predictions(
    explanation: Explanation,
    effects: Mapping[str, PairedEffect],
    covariances: Mapping[str, Covariance],
    child: PairedEffect,
    design: Design,
    interactions: tuple[Interaction, ...],
    alpha: float,
) -> dict[str, tuple[PredictionCheck, ...]]:
    """Return the checks of every hypothesis, by key, in the order of the control keys."""
    keys = sorted(hypothesis.key for hypothesis in explanation.hypotheses)
    cells = [(key, control) for key in keys for control in effects]
    predicted = {cell: explanation.prediction(*cell).interval for cell in cells}
    level = family_level(len(keys), len(effects), alpha=alpha)
    retained = {
        control: retained_effect(effect, child, level=level, covariance=covariances[control])
        for control, effect in effects.items()
    }
    p_values = [
        retained_p_value(effects[control], child, predicted[key, control], covariance=covariances[control])
        for key, control in cells
    ]
    failed = dict(zip(cells, holm(p_values, alpha), strict=True))
    partners: dict[str, list[str]] = {control: [] for control in effects}
    for interaction in interactions:
        if interaction.significant:
            partners[interaction.knockout].append(interaction.knockin)
            partners[interaction.knockin].append(interaction.knockout)

    def check(key: str, control: str, p_value: float) -> PredictionCheck:
        mine, width = predicted[key, control], design.widths[control]
        return PredictionCheck(
            control=control,
            predicted=mine,
            estimate=retained[control].estimate,
            measured=retained[control].interval,
            level=level,
            p_value=p_value,
            failed=failed[key, control],
            counts=failed[key, control] and all(failed[key, partner] for partner in partners[control]),
            fits=_fits(retained[control], mine, width),
            design_width=width,
            separates=tuple(k for k in keys if k != key and mine.is_disjoint(predicted[k, control], SHARE * width)),
        )

    rows = [(key, check(key, control, p)) for (key, control), p in zip(cells, p_values, strict=True)]
    return {key: tuple(row for owner, row in rows if owner == key) for key in keys}


def _fits(retained: RetainedEffect, predicted: Interval, width: float) -> bool:
    if retained.interval is None or not math.isfinite(width):
        return False
    is_near = retained.estimate is not None and predicted.widened(EXACTNESS).contains(retained.estimate)
    return is_near and predicted.widened(width / 2).contains(retained.interval)


def _stands(mine: tuple[PredictionCheck, ...]) -> bool:
    return all(check.fits and not check.failed for check in mine)


def _winners(key: str, checks: Mapping[str, tuple[PredictionCheck, ...]]) -> tuple[str, ...]:
    """Return the rivals that fit and that some executed control was to separate from this hypothesis."""
    apart = {rival for check in checks[key] for rival in check.separates}
    return tuple(rival for rival in sorted(apart) if _stands(checks[rival]))


def _judge(
    key: str, checks: Mapping[str, tuple[PredictionCheck, ...]], refuted: Mapping[str, tuple[str, ...]], alpha: float
) -> tuple[VerdictStatus, str]:
    """Return status and reason of one hypothesis; refuted: by key, in favour of which rivals."""
    mine = checks[key]
    num_tests = sum(len(row) for row in checks.values())
    if any(check.counts for check in mine):
        worst = min((check for check in mine if check.counts), key=lambda check: (check.p_value, check.control))
        failure = f"{_tell(worst)}, and {_tell_failure(worst, num_tests, alpha)}"
        if key in refuted:
            return VerdictStatus.REFUTED, f"{failure}, while {' and '.join(refuted[key])} fits every measurement"
        return VerdictStatus.INCONCLUSIVE, (
            f"{failure}, but no rival that was to be separated from it fits all that was measured: cause or number is wrong"
        )
    withheld = [check for check in mine if check.failed]
    if withheld:
        check = withheld[0]
        return VerdictStatus.INCONCLUSIVE, (
            f"{_tell(check)}, and {_tell_failure(check, num_tests, alpha)}, but knockout and knockin disagree "
            "(interaction), which does not refute by itself"
        )
    unharmed = [rival for rival in checks if rival != key and not any(check.counts for check in checks[rival])]
    if unharmed:
        return VerdictStatus.INCONCLUSIVE, f"not refuted, and neither is {', '.join(unharmed)}"
    misfit = [check for check in mine if not check.fits]
    if misfit:
        check = misfit[0]
        return VerdictStatus.INCONCLUSIVE, (
            f"not refuted, but {_tell(check)}, not inside its own prediction {check.predicted} "
            f"widened by {check.design_width / 2:.3f} with the estimate inside to {EXACTNESS}"
        )
    separated = {rival for check in mine for rival in check.separates}
    together = [rival for rival in checks if rival != key and rival not in separated]
    if together:
        return VerdictStatus.INCONCLUSIVE, f"no control that ran was to separate it from {', '.join(together)}"
    inside = "; ".join(f"{_tell(check)}, inside its prediction {check.predicted}" for check in mine)
    return VerdictStatus.SUPPORTED, f"every rival is refuted, and {inside}"


def _tell(check: PredictionCheck) -> str:
    if check.estimate is None or check.measured is None:
        return f"the retained effect of {check.control!r} cannot be bounded (the child's own effect is too uncertain)"
    return f"the retained effect of {check.control!r} is {check.estimate:.3f} {check.measured}"


def _tell_failure(check: PredictionCheck, num_tests: int, alpha: float) -> str:
    return (
        f"its prediction {check.predicted} fails with p = {check.p_value:.2g} "
        f"(Holm over {num_tests} predictions at {alpha:.0%})"
    )
