"""Rule ``verdict/2``, frozen as it was when runs were judged by it: verdicts that it gave are recomputed by it.

For one observation with its confirmed effect and its registered explanation:

1. A measurement is evidence when its run was scored, its probe says that the change executed, and its result was not
   known when the predictions were registered. Everything else is void.
2. For every hypothesis and every control with evidence: the p-value at which Fieller's set of the retained effect
   becomes disjoint from the prediction. Holm over all of them at `alpha` decides which predictions failed. A control is
   measured on the chunks of the confirmation, so the set takes the covariance of the two effects into account.
3. A knockout and a knockin of the same mechanism should share the child's effect between them. Where they do not
   (interaction), a failed prediction for one of the two counts only when the hypothesis failed on the other as well.
4. *Refuted*: some prediction failed and counts. *Supported*: every rival is refuted, against every rival some executed
   control separated the two by design, and every measured interval of its own lies inside its prediction widened by
   half the design width. Otherwise *inconclusive*. Without any evidence: *not executed* where a scored run's probe
   found no change, *invalid* where every run failed, *inconclusive* where none was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hypotheses.effects import Covariance, PairedEffect, retained_effect
from hypotheses.prediction_checks import (
    Answer,
    Checks,
    RuleVersion,
    fits_widened,
    never_separated,
    support,
    tell,
    withheld_failure,
    worst_failure,
)
from hypotheses.verdict_records import VerdictStatus

RULE = "verdict/2"
_EXPECTED_CORRELATION = 0.5


def plan_width(child: PairedEffect, *, shared_variance: float, level: float) -> float:
    """Return the width that designs of this rule expected of a control's retained effect.

    The wider of the intervals at 0 and at 1, for a control as noisy as the child and correlated with it by half of the
    chunks' part of its variance and the parent's whole luck. Infinite where no bounded set exists.
    """
    covariance = Covariance(
        chunks=_EXPECTED_CORRELATION * child.chunk_variance / child.num_chunks, programs=shared_variance
    )
    widths = []
    for mean in (0.0, child.mean):
        interval = retained_effect(replace(child, mean=mean), child, level=level, covariance=covariance).interval
        widths.append(math.inf if interval is None else interval.width)
    return max(widths)


def _judge(checks: Checks, alpha: float) -> tuple[Mapping[str, Answer], tuple[str, ...]]:
    standing = tuple(key for key in sorted(checks) if not any(check.counts for check in checks[key]))
    return {key: _answer(key, checks, standing, alpha) for key in checks}, standing


def _answer(key: str, checks: Checks, standing: tuple[str, ...], alpha: float) -> Answer:
    """Return status and reason of one hypothesis; standing: those that are not refuted."""
    mine = checks[key]
    num_tests = sum(len(row) for row in checks.values())
    failure = worst_failure(mine, num_tests, alpha)
    if failure is not None:
        return VerdictStatus.REFUTED, failure
    withheld = withheld_failure(mine, num_tests, alpha)
    if withheld is not None:
        return VerdictStatus.INCONCLUSIVE, withheld
    rivals = [rival for rival in standing if rival != key]
    if rivals:
        return VerdictStatus.INCONCLUSIVE, f"not refuted, and neither is {', '.join(rivals)}"
    apart = never_separated(key, checks)
    if apart is not None:
        return VerdictStatus.INCONCLUSIVE, apart
    misfit = next((check for check in mine if not check.fits), None)
    if misfit is not None:
        return VerdictStatus.INCONCLUSIVE, (
            f"every rival is refuted, but {tell(misfit)}, not inside its own prediction {misfit.predicted} "
            f"widened by {misfit.design_width / 2:.3f}"
        )
    return support(mine)


decide = RuleVersion(name=RULE, share=1.0, fits=fits_widened, judge=_judge).decide
