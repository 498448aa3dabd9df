"""What the versions of the verdict rule have in common: what is evidence, and how predictions are held to it.

A version adds two things: when a measurement fits a prediction, and what the checks of all rivals say about each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hypotheses.design import Design
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
from hypotheses.predictions import NONE_OF_THESE, Explanation
from hypotheses.verdict_records import (
    SCORED,
    ControlMeasurement,
    Interaction,
    PredictionCheck,
    Verdict,
    VerdictStatus,
)

Checks = Mapping[str, tuple[PredictionCheck, ...]]
"""Every hypothesis' checks, by its key, in the order of the control keys."""
Answer = tuple[VerdictStatus, str]
"""Status of one hypothesis, and the reason."""


@dataclass(frozen=True, kw_only=True)
class RuleVersion:
    """One version of the rule.

    name: as verdicts name it. share: of the expected width, by which predictions must be apart to be separated. fits: whether a
    measured retained effect fits a prediction at an expected width. judge: answers of all hypotheses, and the keys of those that
    nothing speaks against, from their checks and the error rate.
    """

    name: str
    share: float
    fits: Callable[[RetainedEffect, Interval, float], bool]
    judge: Callable[[Checks, float], tuple[Mapping[str, Answer], tuple[str, ...]]]

    def decide(
        self,
        explanation: Explanation,
        child_effect: PairedEffect,
        measurements: Sequence[ControlMeasurement],
        design: Design,
        *,
        alpha: float,
    ) -> tuple[Verdict, ...]:
        """Return the verdict on every hypothesis, in the order of their keys; see `hypotheses.verdicts.decide`."""
        measured = _by_control(explanation, measurements, design)
        void = tuple(reason for control in sorted(measured) if (reason := measured[control].void_reason) is not None)
        effects = {
            control: measurement.effect
            for control, measurement in sorted(measured.items())
            if measurement.void_reason is None and measurement.effect is not None
        }
        hypotheses = sorted(explanation.hypotheses, key=lambda hypothesis: hypothesis.key)
        checks: Checks = {hypothesis.key: () for hypothesis in hypotheses}
        interactions: tuple[Interaction, ...] = ()
        if effects:
            covariances = {control: measured[control].covariance for control in effects}
            interactions = _find_interactions(explanation, effects, covariances, child_effect, alpha)
            checks = self._check_predictions(
                explanation, effects, covariances, child_effect, design, interactions, alpha
            )
            answers, standing = self.judge(checks, alpha)
            supported = tuple(key for key, (status, _) in answers.items() if status is VerdictStatus.SUPPORTED)
            survivors = supported or (*standing, NONE_OF_THESE)
            ending = f"; survivors: {', '.join(survivors)}"
        else:
            answers = dict.fromkeys(checks, _without_evidence(measured.values(), void))
            survivors, ending = (*checks, NONE_OF_THESE), ""
        return tuple(
            Verdict(
                rule=self.name,
                hypothesis=hypothesis.key,
                mechanism=hypothesis.mechanism,
                cause=hypothesis.cause,
                status=answers[hypothesis.key][0],
                reason=answers[hypothesis.key][1] + ending,
                alpha=alpha,
                checks=checks[hypothesis.key],
                survivors=survivors,
                interactions=interactions,
                void=void,
            )
            for hypothesis in hypotheses
        )

    def _check_predictions(
        self,
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
                fits=self.fits(retained[control], mine, width),
                design_width=width,
                separates=tuple(
                    k for k in keys if k != key and mine.is_disjoint(predicted[k, control], self.share * width)
                ),
            )

        rows = [(key, check(key, control, p)) for (key, control), p in zip(cells, p_values, strict=True)]
        return {key: tuple(row for owner, row in rows if owner == key) for key in keys}


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


def _without_evidence(measurements: Iterable[ControlMeasurement], void: tuple[str, ...]) -> Answer:
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


def worst_failure(mine: Sequence[PredictionCheck], num_tests: int, alpha: float) -> str | None:
    """Say which failure that counts is the clearest; None where none counts."""
    counting = [check for check in mine if check.counts]
    if not counting:
        return None
    worst = min(counting, key=lambda check: (check.p_value, check.control))
    return f"{tell(worst)}, and {tell_failure(worst, num_tests, alpha)}"


def withheld_failure(mine: Sequence[PredictionCheck], num_tests: int, alpha: float) -> str | None:
    """Say which failure interaction excuses; None where there is none."""
    check = next((check for check in mine if check.failed), None)
    if check is None:
        return None
    return (
        f"{tell(check)}, and {tell_failure(check, num_tests, alpha)}, but knockout and knockin disagree "
        "(interaction), which does not refute by itself"
    )


def never_separated(key: str, checks: Checks) -> str | None:
    """Say from which rivals no executed control was to separate a hypothesis; None where each was."""
    separated = {rival for check in checks[key] for rival in check.separates}
    together = [rival for rival in checks if rival != key and rival not in separated]
    return f"no control that ran was to separate it from {', '.join(together)}" if together else None


def support(mine: Sequence[PredictionCheck]) -> Answer:
    """Return the answer for a hypothesis that every measurement is inside of."""
    inside = "; ".join(f"{tell(check)}, inside its prediction {check.predicted}" for check in mine)
    return VerdictStatus.SUPPORTED, f"every rival is refuted, and {inside}"


def fits_widened(retained: RetainedEffect, predicted: Interval, width: float) -> bool:
    """Whether a measured interval lies inside a prediction widened by half of the expected width."""
    if retained.interval is None or not math.isfinite(width):
        return False
    return predicted.widened(width / 2).contains(retained.interval)


def tell(check: PredictionCheck) -> str:
    if check.estimate is None or check.measured is None:
        return f"the retained effect of {check.control!r} cannot be bounded (the child's own effect is too uncertain)"
    return f"the retained effect of {check.control!r} is {check.estimate:.3f} {check.measured}"


def tell_failure(check: PredictionCheck, num_tests: int, alpha: float) -> str:
    return (
        f"its prediction {check.predicted} fails with p = {check.p_value:.2g} "
        f"(Holm over {num_tests} predictions at {alpha:.0%})"
    )
