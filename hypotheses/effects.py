"""Effects on the loss, their noise, and the ratio of two of them.

An effect is NLL(parent) - NLL(program) in nats per token, so a gain is positive. It is measured on paired chunks; its
variance has two parts: the chunks drawn, and the program's own luck with its calibration text. A control is judged by
the share of the child's effect that it retains, ``r = effect(control) / effect(child)``, with Fieller's confidence set.
Both effects are against one parent on the same chunks, so that what they share, the chunks and the parent's own luck,
cancels from the ratio as far as it is the same in both: their covariance says how far.

Student's t is used throughout. The degrees of freedom of one effect are Welch and Satterthwaite's for its two variance
parts: chunks - 1, and draws - 1 where the number of calibration draws behind the program variance is known. A ratio
takes the smallest of its two effects' and of their difference's, of which mostly the chunks' part cancels and the few
draws' part is left. For independent effects that is never more than Welch and Satterthwaite's for any ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from scipy.special import stdtr, stdtrit  # scipy.stats, which calls them, takes seconds to import

from hypotheses.interval import Interval

__all__ = [
    "Covariance",
    "Interval",
    "PairedEffect",
    "RetainedEffect",
    "expected_covariance",
    "expected_width",
    "family_level",
    "holm",
    "noise_floor",
    "paired_covariance",
    "paired_effect",
    "program_variance",
    "retained_effect",
    "retained_p_value",
    "tail_probability",
]

_EXPECTED_CORRELATION = 0.5


@dataclass(frozen=True, kw_only=True)
class PairedEffect:
    """NLL(parent) - NLL(program), nats per token, paired by chunk.

    standard_error: ``sqrt(chunk_variance / num_chunks + program_variance)``.
    chunk_variance: sample variance of the paired differences of the chunks.
    program_variance: variance of the effect over calibration draws (see `program_variance`).
    program_draws: calibration draws behind `program_variance`; None takes it as known exactly.
    """

    mean: float
    standard_error: float
    num_chunks: int
    chunk_variance: float
    program_variance: float
    program_draws: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.mean, self.standard_error, self.chunk_variance, self.program_variance)
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(
                f"a paired effect must be finite, got mean {self.mean}, standard error {self.standard_error}"
            )
        if min(numbers[1:]) < 0:
            raise ValueError("standard error and variances of a paired effect must not be negative")
        if self.num_chunks < 2:
            raise ValueError(f"a paired effect needs at least 2 chunks, got {self.num_chunks}")
        if self.program_draws is not None and self.program_draws < 2:
            raise ValueError(f"a program variance needs at least 2 calibration draws, got {self.program_draws}")

    @property
    def z(self) -> float:
        """The effect in standard errors; infinite for a difference without any noise, 0 for none."""
        if self.standard_error > 0:
            return self.mean / self.standard_error
        return math.copysign(math.inf, self.mean) if self.mean else 0.0

    @property
    def degrees_of_freedom(self) -> float:
        """Welch and Satterthwaite's, from the chunks and (where known) the calibration draws; at least 1."""
        chunk_part = self.chunk_variance / self.num_chunks
        uncertainty = chunk_part**2 / (self.num_chunks - 1)
        if self.program_draws is not None:
            uncertainty += self.program_variance**2 / (self.program_draws - 1)
        total = (chunk_part + self.program_variance) ** 2
        return max(1.0, total / uncertainty) if uncertainty > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Covariance:
    """Covariance of two effects on one parent, by its two sources, (nats per token)^2.

    chunks: of the means over the chunks that both were scored on. programs: the parent's own luck, which both contain.
    """

    chunks: float = 0.0
    programs: float = 0.0

    @property
    def total(self) -> float:
        return self.chunks + self.programs

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


INDEPENDENT = Covariance()


@dataclass(frozen=True, kw_only=True)
class RetainedEffect:
    """``r = effect(control) / effect(child)``; below 0 and above 1 are legal.

    estimate: the ratio of the means; None when the child's effect is exactly 0.
    interval: Fieller's set at `level`; None when it is unbounded, which says nothing about r.
    """

    estimate: float | None
    interval: Interval | None
    level: float


def paired_effect(
    parent_nll: Sequence[float],
    child_nll: Sequence[float],
    *,
    program_variance: float,
    program_draws: int | None = None,
) -> PairedEffect:
    """Return the effect of the child on the parent from per-chunk mean losses, the same chunks in the same order.

    mean = mean(parent - child); variance = sample variance of (parent - child) / n + program_variance.

    Args:
        parent_nll: (n,) nats per token, n >= 2.
        child_nll: (n,) the same chunks.
        program_variance: variance of the effect's mean over calibration draws. Where parent and child were calibrated
            on different draws, both add theirs.
        program_draws: number of draws it was estimated from; None treats it as exact.

    Raises:
        ValueError: lengths differ, fewer than 2 chunks, a non-finite loss, or a negative program variance.
    """
    if len(parent_nll) != len(child_nll):
        raise ValueError(f"chunks do not pair: {len(parent_nll)} of the parent, {len(child_nll)} of the child")
    n = len(parent_nll)
    if n < 2:
        raise ValueError(f"a paired effect needs at least 2 chunks, got {n}")
    for name, losses in (("parent", parent_nll), ("child", child_nll)):
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise ValueError(f"loss of chunk {index} of the {name} is {loss}; only scored runs can be compared")
    if not (math.isfinite(program_variance) and program_variance >= 0):
        raise ValueError(f"program variance must be finite and not negative, got {program_variance}")
    mean, variance = _mean_and_variance([parent - child for parent, child in zip(parent_nll, child_nll, strict=True)])
    return PairedEffect(
        mean=mean,
        standard_error=math.sqrt(variance / n + program_variance),
        num_chunks=n,
        chunk_variance=variance,
        program_variance=program_variance,
        program_draws=program_draws,
    )


def paired_covariance(
    parent_nll: Sequence[float], first_nll: Sequence[float], second_nll: Sequence[float], *, shared_variance: float
) -> Covariance:
    """Return the covariance of the effects of two programs on one parent.

    chunks = sample covariance of (parent - first, parent - second) / n; programs = shared_variance.

    Args:
        parent_nll: (n,) nats per token, n >= 2.
        first_nll: (n,) the same chunks in the same order.
        second_nll: (n,) likewise.
        shared_variance: what both effects have of the parent's variance over calibration draws; 0 for a parent that
            measured on no calibration text. What the two programs share with each other is not counted: for a positive
            ratio that errs on the wide side.

    Raises:
        ValueError: as `paired_effect`.
    """
    pairs = [
        paired_effect(parent_nll, child_nll, program_variance=shared_variance) for child_nll in (first_nll, second_nll)
    ]
    n = len(parent_nll)
    products = (
        (parent - first - pairs[0].mean) * (parent - second - pairs[1].mean)
        for parent, first, second in zip(parent_nll, first_nll, second_nll, strict=True)
    )
    return Covariance(chunks=math.fsum(products) / (n - 1) / n, programs=shared_variance)


def retained_effect(
    control: PairedEffect, child: PairedEffect, *, level: float, covariance: Covariance = INDEPENDENT
) -> RetainedEffect:
    """Return the retained effect with Fieller's confidence set.

    The set is ``{r : (c - r b)^2 <= q^2 (s_c^2 - 2 r s_cb + r^2 s_b^2)}`` with c, b the effects of control and child,
    s their standard errors and q Student's quantile. It is bounded exactly when ``|b| > q s_b``.

    Args:
        control: effect of the control on the observation's parent.
        child: effect of the child on the same parent, from the confirmation.
        level: coverage, such as 0.98.
        covariance: of the two, see `paired_covariance`; none for effects measured on different splits.
    """
    _check_level(level)
    q = _quantile(level, _ratio_degrees(control, child, covariance))
    return _fieller(control, child, q, level, covariance.total)


def retained_p_value(
    control: PairedEffect, child: PairedEffect, predicted: Interval, *, covariance: Covariance = INDEPENDENT
) -> float:
    """Return the p-value at which Fieller's set, bounded, becomes disjoint from the predicted interval.

    ``t(r) = (c - r b) / sqrt(s_c^2 - 2 r s_cb + r^2 s_b^2)`` has, in r, one zero and one extremum of ``|t|``: over an
    interval that misses the zero, ``|t|`` is smallest at an end. An unbounded set refutes nothing, so the p-value is
    never below that of the child's own effect, ``|b| / s_b``. The value is 1 when the estimate lies inside, and falls
    as the prediction moves away from it. ``p <= alpha`` exactly when the set at level 1 - alpha is bounded and
    disjoint.
    """
    if child.mean == 0 or predicted.contains(control.mean / child.mean):
        return 1.0
    degrees = _ratio_degrees(control, child, covariance)
    ends = (_abs_t(control, child, end, covariance.total) for end in (predicted.low, predicted.high))
    return tail_probability(min(*ends, abs(child.z)), degrees)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Return which of the hypotheses are rejected by Holm's step-down rule at family-wise error rate `alpha`.

    The k-th smallest of m p-values (k from 0) is rejected when it and all smaller ones are at most ``alpha / (m - k)``.
    Valid under any dependence.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    for p_value in p_values:
        if not 0 <= p_value <= 1:
            raise ValueError(f"a p-value must lie in [0, 1], got {p_value}")
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def noise_floor(chunk_variance_of_mean: float, program_variance: float) -> float:
    """Return one standard error of an effect, nats per token: the square root of the sum of its two variances."""
    if not (chunk_variance_of_mean >= 0 and program_variance >= 0):
        raise ValueError(f"variances must not be negative, got {chunk_variance_of_mean} and {program_variance}")
    return math.sqrt(chunk_variance_of_mean + program_variance)


def program_variance(draw_means: Sequence[float]) -> float:
    """Return the sample variance of one program's mean loss over its calibration draws, all scored on the same chunks.

    Because the chunks are the same, their own variance cancels and only the draws are left.

    Raises:
        ValueError: fewer than 2 draws, or a loss that is not finite.
    """
    if len(draw_means) < 2:
        raise ValueError(f"program variance needs at least 2 calibration draws, got {len(draw_means)}")
    for index, mean in enumerate(draw_means):
        if not math.isfinite(mean):
            raise ValueError(f"mean loss of calibration draw {index} is {mean}; only scored runs can be compared")
    return _mean_and_variance(draw_means)[1]


def expected_width(
    child: PairedEffect, control_standard_error: float, *, level: float, covariance: Covariance = INDEPENDENT
) -> float:
    """Return the width of the interval to expect for a control between parent and child, the wider of the two ends.

    Infinite when the child's effect is too small for a bounded set at this level.

    Args:
        child: the confirmed effect.
        control_standard_error: guess of the control's standard error, usually the child's.
        level: coverage of the interval that the verdict will use, see `family_level`.
        covariance: guess of the covariance of the two effects, see `expected_covariance`.

    Raises:
        ValueError: a level or standard error out of range, or a covariance beyond the product of the standard errors.
    """
    _check_level(level)
    if not (math.isfinite(control_standard_error) and control_standard_error >= 0):
        raise ValueError(f"standard error must be finite and not negative, got {control_standard_error}")
    scale = (control_standard_error / child.standard_error) ** 2 if child.standard_error > 0 else 1.0
    widths = []
    for retained in (0.0, 1.0):
        control = PairedEffect(
            mean=retained * child.mean,
            standard_error=control_standard_error,
            num_chunks=child.num_chunks,
            chunk_variance=child.chunk_variance * scale,
            program_variance=child.program_variance * scale,
            program_draws=child.program_draws,
        )
        interval = retained_effect(control, child, level=level, covariance=covariance).interval
        widths.append(math.inf if interval is None else interval.width)
    return max(widths)


def expected_covariance(child: PairedEffect, *, shared_variance: float) -> Covariance:
    """Return a guess of the covariance of a control's effect with the child's, both on the child's chunks and parent.

    Half of the chunks' part of the child's variance, and the parent's whole. A low guess plans for wide intervals; on
    the shipped subjects the chunk differences of controls and children correlate at 0.7 to 0.8.
    """
    return Covariance(chunks=_EXPECTED_CORRELATION * child.chunk_variance / child.num_chunks, programs=shared_variance)


def family_level(num_hypotheses: int, num_controls: int, *, alpha: float) -> float:
    """Return the level of single intervals that together err at most `alpha`: ``1 - alpha / (their number)``."""
    if num_hypotheses < 1 or num_controls < 1:
        raise ValueError(f"a family needs at least one test, got {num_hypotheses} x {num_controls}")
    return 1 - alpha / (num_hypotheses * num_controls)


def tail_probability(statistic: float, degrees: float) -> float:
    """Return the two-sided p-value of ``|t| = statistic`` by Student's distribution (infinite degrees: normal)."""
    return min(1.0, 2 * float(stdtr(degrees, -statistic)))


def _fieller(control: PairedEffect, child: PairedEffect, q: float, level: float, covariance: float) -> RetainedEffect:
    b, c = child.mean, control.mean
    if b == 0:
        return RetainedEffect(estimate=None, interval=None, level=level)
    _check_covariance(control, child, covariance)
    # (b^2 - q^2 s_b^2) r^2 - 2 (b c - q^2 s_cb) r + (c^2 - q^2 s_c^2) <= 0
    square = b * b - (q * child.standard_error) ** 2
    if not square > 0:
        return RetainedEffect(estimate=c / b, interval=None, level=level)
    centre = (b * c - q * q * covariance) / square
    constant = (c * c - (q * control.standard_error) ** 2) / square
    # Rounding can push the radicand of a set that is a single point below zero.
    half = math.sqrt(max(0.0, centre * centre - constant))
    low, high = min(centre - half, c / b), max(centre + half, c / b)
    return RetainedEffect(estimate=c / b, interval=Interval(low=low, high=high), level=level)


def _abs_t(control: PairedEffect, child: PairedEffect, ratio: float, covariance: float) -> float:
    _check_covariance(control, child, covariance)
    distance = abs(control.mean - ratio * child.mean)
    variance = control.standard_error**2 - 2 * ratio * covariance + (ratio * child.standard_error) ** 2
    if variance > 0:
        return distance / math.sqrt(variance)
    return math.inf if distance > 0 else 0.0


def _ratio_degrees(control: PairedEffect, child: PairedEffect, covariance: Covariance) -> float:
    """Return the degrees of freedom for ``c - r b``: the fewest of r = 0, of large r, and of r = 1."""
    degrees = min(control.degrees_of_freedom, child.degrees_of_freedom)
    total = control.standard_error**2 - 2 * covariance.total + child.standard_error**2
    draws = min((e.program_draws for e in (control, child) if e.program_draws is not None), default=None)
    if draws is None or not total > 0:
        return degrees
    draw_part = min(total, max(0.0, control.program_variance + child.program_variance - 2 * covariance.programs))
    num_chunks = min(control.num_chunks, child.num_chunks)
    uncertainty = (total - draw_part) ** 2 / (num_chunks - 1) + draw_part**2 / (draws - 1)
    return min(degrees, max(1.0, total**2 / uncertainty))


def _quantile(level: float, degrees: float) -> float:
    return -float(stdtrit(degrees, (1 - level) / 2))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")


def _check_covariance(control: PairedEffect, child: PairedEffect, covariance: float) -> None:
    bound = control.standard_error * child.standard_error
    if not abs(covariance) <= bound * (1 + 1e-9):
        raise ValueError(f"covariance {covariance:g} is beyond the product of the standard errors, {bound:g}")


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample variance, independent of the order of the values (exactly rounded sums)."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
