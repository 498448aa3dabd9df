from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student_t

from hypotheses.effects import (
    Covariance,
    Interval,
    PairedEffect,
    expected_width,
    family_level,
    holm,
    noise_floor,
    paired_covariance,
    paired_effect,
    program_variance,
    retained_effect,
    retained_p_value,
)

numbers = st.floats(-5, 5)
errors = st.floats(0.001, 2)


def effect(mean: float, error: float, num_chunks: int = 40) -> PairedEffect:
    return PairedEffect(
        mean=mean,
        standard_error=error,
        num_chunks=num_chunks,
        chunk_variance=error**2 * num_chunks,
        program_variance=0.0,
    )


def test_paired_effect_by_hand() -> None:
    found = paired_effect([3.0, 4.0, 5.0], [2.0, 3.5, 4.5], program_variance=0.01)
    assert found.mean == pytest.approx(2 / 3)
    assert found.chunk_variance == pytest.approx(1 / 12)
    assert found.standard_error == pytest.approx(math.sqrt(1 / 36 + 0.01))
    assert found.z == pytest.approx(found.mean / found.standard_error)
    assert found.num_chunks == 3
    assert PairedEffect.from_json(found.to_json()) == found


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=30), st.randoms())
def test_paired_effect_does_not_depend_on_chunk_order(pairs: list[tuple[float, float]], rng: random.Random) -> None:
    shuffled = list(pairs)
    rng.shuffle(shuffled)
    before = paired_effect([a for a, _ in pairs], [b for _, b in pairs], program_variance=0.5)
    after = paired_effect([a for a, _ in shuffled], [b for _, b in shuffled], program_variance=0.5)
    assert before == after


@pytest.mark.parametrize(
    ("parent", "child", "variance", "message"),
    [
        ([1.0], [1.0], 0.0, "at least 2 chunks, got 1"),
        ([1.0, 2.0], [1.0], 0.0, "do not pair: 2 of the parent, 1 of the child"),
        ([1.0, math.nan], [1.0, 1.0], 0.0, "chunk 1 of the parent is nan"),
        ([1.0, 2.0], [math.inf, 1.0], 0.0, "chunk 0 of the child is inf"),
        ([1.0, 2.0], [1.0, 1.0], -0.1, "program variance must be finite and not negative"),
        ([1.0, 2.0], [1.0, 1.0], math.nan, "program variance must be finite and not negative"),
    ],
)
def test_paired_effect_refuses(parent: list[float], child: list[float], variance: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_effect(parent, child, program_variance=variance)


def test_z_without_noise() -> None:
    assert paired_effect([1.0, 1.0], [1.0, 1.0], program_variance=0).z == 0
    assert paired_effect([2.0, 2.0], [1.0, 1.0], program_variance=0).z == math.inf
    assert paired_effect([1.0, 1.0], [2.0, 2.0], program_variance=0).z == -math.inf


def test_degrees_of_freedom_count_the_calibration_draws() -> None:
    known = paired_effect([3.0, 4.0, 5.0, 7.0], [2.0, 3.5, 4.5, 5.0], program_variance=10.0)
    assert known.degrees_of_freedom > 1000  # a known variance dominates, and it has no uncertainty
    drawn = paired_effect([3.0, 4.0, 5.0, 7.0], [2.0, 3.5, 4.5, 5.0], program_variance=10.0, program_draws=5)
    assert drawn.degrees_of_freedom == pytest.approx(4, rel=0.1)
    chunks_only = paired_effect([3.0, 4.0, 5.0, 7.0], [2.0, 3.5, 4.5, 5.0], program_variance=0.0, program_draws=5)
    assert chunks_only.degrees_of_freedom == pytest.approx(3)


def test_interval_methods() -> None:
    a, b = Interval(low=0.0, high=0.4), Interval(low=0.5, high=0.9)
    assert not a.overlaps(b)
    assert a.is_disjoint(b, 0.09)
    assert not a.is_disjoint(b, 0.11)
    assert a.widened(0.1).overlaps(b)
    assert a.contains(0.4)
    assert a.contains(Interval(low=0.1, high=0.4))
    assert not a.contains(Interval(low=0.1, high=0.41))
    with pytest.raises(ValueError, match="reversed"):
        Interval(low=1, high=0)
    with pytest.raises(ValueError, match="not finite"):
        Interval(low=math.nan, high=0)
    with pytest.raises(ValueError, match="0 or more"):
        a.widened(-0.1)


def test_fieller_reduces_to_t_interval_when_the_child_is_exact() -> None:
    child, control = effect(2.0, 0.0), effect(1.0, 0.1)
    found = retained_effect(control, child, level=0.95).interval
    assert found is not None
    half = 0.1 * float(student_t.isf(0.025, 39)) / 2
    assert (found.low, found.high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))


def test_fieller_is_unbounded_when_the_child_is_uncertain() -> None:
    found = retained_effect(effect(0.5, 0.1), effect(0.2, 0.1), level=0.98)
    assert found.interval is None
    assert found.estimate == pytest.approx(2.5)
    assert retained_effect(effect(0.5, 0.1), effect(0.0, 0.0), level=0.98).estimate is None


@given(numbers, errors, numbers, errors, st.floats(-0.9, 0.9), st.floats(-3, 3))
def test_fieller_set_is_where_t_is_small(
    c: float, s_c: float, b: float, s_b: float, correlation: float, ratio: float
) -> None:
    """The closed form agrees with the definition at any ratio."""
    control, child, covariance = effect(c, s_c), effect(b, s_b), Covariance(chunks=correlation * s_c * s_b)
    found = retained_effect(control, child, level=0.9, covariance=covariance)
    if found.interval is None:
        return
    q = float(student_t.isf(0.05, 39))
    t = abs(c - ratio * b) / math.sqrt(s_c**2 - 2 * ratio * covariance.total + ratio**2 * s_b**2)
    if abs(t - q) > 1e-6 * (1 + t):
        assert found.interval.contains(ratio) == (t < q)


@pytest.mark.parametrize("true_ratio", [-0.3, 0.0, 0.5, 1.0, 1.4])
def test_fieller_coverage_by_simulation(true_ratio: float) -> None:
    """Skewed chunk losses, the split sizes of a small campaign: coverage at least nominal, up to simulation error."""
    rng = np.random.default_rng(7)
    covered, worlds, level = 0, 1500, 0.95
    for _ in range(worlds):
        child = paired_effect(0.3 + 0.1 * (rng.gamma(2, 1, 32) - 2), np.zeros(32), program_variance=0.0)
        control = paired_effect(true_ratio * 0.3 + 0.1 * (rng.gamma(2, 1, 96) - 2), np.zeros(96), program_variance=0.0)
        found = retained_effect(control, child, level=level).interval
        covered += found is None or found.contains(true_ratio)
    assert covered / worlds > level - 0.025  # five standard errors of the simulation, and the skew


def test_program_variance_with_few_draws_keeps_coverage() -> None:
    rng = np.random.default_rng(11)
    covered = {True: 0, False: 0}
    worlds = 600
    for _ in range(worlds):
        variance = program_variance(list(0.02 * rng.standard_normal(5)))
        for counted in covered:
            draws = 5 if counted else None
            runs = [
                paired_effect(mean + 0.02 * rng.standard_normal(64) + 0.02 * rng.standard_normal(), np.zeros(64),
                              program_variance=variance, program_draws=draws)
                for mean in (0.15, 0.3)
            ]  # fmt: skip
            found = retained_effect(*runs, level=0.98).interval
            covered[counted] += found is None or found.contains(0.5)
    assert covered[True] / worlds >= 0.975
    assert covered[False] < covered[True]  # taking five draws for the truth is what costs coverage


def test_paired_covariance_is_that_of_the_differences() -> None:
    rng = np.random.default_rng(5)
    parent, first, second = rng.gamma(3, 1, (3, 24))
    found = paired_covariance(list(parent), list(first), list(second), shared_variance=0.25)
    assert found.chunks == pytest.approx(np.cov(parent - first, parent - second)[0, 1] / 24, rel=1e-12)
    assert found.programs == 0.25
    with pytest.raises(ValueError, match="do not pair"):
        paired_covariance([1.0, 2.0], [1.0, 2.0], [1.0], shared_variance=0.0)


def test_the_covariance_of_an_effect_with_itself_is_its_variance() -> None:
    parent, child = [3.0, 4.5, 5.0, 4.0, 3.5], [2.0, 3.6, 4.2, 3.1, 2.4]
    one = paired_effect(parent, child, program_variance=0.001)
    covariance = paired_covariance(parent, child, child, shared_variance=0.001)
    assert covariance.total == pytest.approx(one.standard_error**2, rel=1e-12)
    found = retained_effect(one, one, level=0.98, covariance=covariance)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(1.0, abs=1e-6)
    assert found.interval.high == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("true_ratio", [-0.5, 0.0, 0.5, 1.0, 1.3])
@pytest.mark.parametrize("parent_luck", [0.0, 0.01])
def test_coverage_on_shared_chunks_with_few_draws(true_ratio: float, parent_luck: float) -> None:
    """Control and child beside one parent: skewed chunk losses in common, some of their own, every program's own luck."""
    rng = np.random.default_rng(13)
    covered, worlds, n, luck = 0, 1200, 64, 0.01
    widths: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(worlds):
        variance = program_variance(list(luck * rng.standard_normal(8)))
        shared = 0.12 * (rng.gamma(2, 1, n) / 2 - 1) / math.sqrt(0.5)
        parent = rng.gamma(4, 0.5, n)
        fluke = parent_luck * rng.standard_normal()

        gains = (size * (1 + shared) + fluke + luck * rng.standard_normal() for size in (0.2, 0.2 * true_ratio))
        child_nll, control_nll = (list(parent - gain - 0.06 * rng.standard_normal(n)) for gain in gains)
        lucky = 1 + (parent_luck > 0)
        child, control = (
            paired_effect(list(parent), losses, program_variance=lucky * variance, program_draws=8)
            for losses in (child_nll, control_nll)
        )
        covariance = paired_covariance(
            list(parent), control_nll, child_nll, shared_variance=variance if parent_luck else 0.0
        )
        found = retained_effect(control, child, level=0.98, covariance=covariance).interval
        apart = retained_effect(control, child, level=0.98).interval
        covered += found is None or found.contains(true_ratio)
        for paired, interval in ((True, found), (False, apart)):
            widths[paired].append(math.inf if interval is None else interval.width)
    assert covered / worlds >= 0.97
    if true_ratio >= 0.5:
        assert np.median(widths[True]) < np.median(widths[False])


@given(
    numbers,
    errors,
    st.floats(0.5, 5),
    st.floats(0.01, 0.3),
    st.floats(-2, 2),
    st.floats(0, 1),
    st.floats(0.001, 0.5),
    st.floats(-0.9, 0.9),
)
def test_p_value_and_interval_agree(
    c: float, s_c: float, b: float, s_b: float, low: float, width: float, alpha: float, correlation: float
) -> None:
    control, child, predicted = effect(c, s_c), effect(b, s_b), Interval(low=low, high=low + width)
    covariance = Covariance(chunks=correlation * s_c * s_b)
    p_value = retained_p_value(control, child, predicted, covariance=covariance)
    assert 0 <= p_value <= 1
    if abs(p_value - alpha) < 1e-9:
        return
    measured = retained_effect(control, child, level=1 - alpha, covariance=covariance).interval
    assert (p_value < alpha) == (measured is not None and measured.is_disjoint(predicted))


@given(
    numbers, errors, st.floats(-5, 5).filter(lambda b: abs(b) > 0.01), errors, st.lists(st.floats(0, 50), min_size=2)
)
def test_p_value_falls_as_the_prediction_moves_away(
    c: float, s_c: float, b: float, s_b: float, distances: list[float]
) -> None:
    control, child = effect(c, s_c), effect(b, s_b)
    for sign in (1, -1):
        previous = 1.0
        for distance in sorted(distances):
            at = c / b + sign * distance
            p_value = retained_p_value(
                control, child, Interval(low=min(at, c / b + sign * 60), high=max(at, c / b + sign * 60))
            )
            assert p_value <= previous + 1e-12
            previous = p_value
    assert retained_p_value(control, child, Interval(low=c / b - 0.1, high=c / b + 0.1)) == 1.0


def test_p_value_of_a_prediction_when_the_child_has_no_effect() -> None:
    assert retained_p_value(effect(1, 0.1), effect(0, 0.1), Interval(low=0, high=1)) == 1.0
    weak = effect(0.2, 0.1)  # two standard errors: no prediction can be refuted at 2%
    assert retained_p_value(effect(50, 0.1), weak, Interval(low=0, high=0.1)) > 0.02


def test_covariance_beyond_its_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the product"):
        retained_effect(effect(1, 0.1), effect(1, 0.1), level=0.9, covariance=Covariance(chunks=0.02))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([0.01, 0.02, 0.03], 0.06) == [True, True, True]
    assert holm([], 0.05) == []
    with pytest.raises(ValueError, match="p-value"):
        holm([1.5], 0.05)
    with pytest.raises(ValueError, match="alpha"):
        holm([0.5], 0.0)


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.001, 0.5), st.randoms())
def test_holm_properties(p_values: list[float], alpha: float, rng: random.Random) -> None:
    rejected = holm(p_values, alpha)
    m = len(p_values)
    for p_value, flag in zip(p_values, rejected, strict=True):
        assert flag or p_value > alpha / m  # at least Bonferroni
        assert not flag or p_value <= alpha  # at most no correction
    order = list(range(m))
    rng.shuffle(order)
    assert holm([p_values[i] for i in order], alpha) == [rejected[i] for i in order]
    lowest_kept = min((p for p, flag in zip(p_values, rejected, strict=True) if not flag), default=math.inf)
    assert all(p < lowest_kept for p, flag in zip(p_values, rejected, strict=True) if flag)


def test_holm_family_wise_error_by_simulation() -> None:
    rng = np.random.default_rng(3)
    errors_made = sum(any(holm(list(rng.random(6)), 0.05)) for _ in range(4000))
    assert 0.035 < errors_made / 4000 < 0.065


def test_noise_floor_and_program_variance() -> None:
    assert noise_floor(0.0009, 0.0016) == pytest.approx(0.05)
    assert program_variance([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert program_variance([2.5, 2.5]) == 0.0
    with pytest.raises(ValueError, match="at least 2 calibration draws, got 1"):
        program_variance([1.0])
    with pytest.raises(ValueError, match="draw 1 is nan"):
        program_variance([1.0, math.nan])
    with pytest.raises(ValueError, match="not be negative"):
        noise_floor(-1.0, 0.0)


@settings(max_examples=30)
@given(st.floats(0.2, 2), st.floats(0.001, 0.03), st.floats(0.001, 0.05))
def test_expected_width_is_what_a_control_then_measures(b: float, s_b: float, s_c: float) -> None:
    child = effect(b, s_b)
    measured = retained_effect(effect(b, s_c), child, level=0.99).interval
    assert measured is not None
    assert expected_width(child, s_c, level=0.99) == pytest.approx(measured.width)
    assert expected_width(child, s_c, level=0.999) > measured.width


@settings(max_examples=50)
@given(st.floats(0.2, 2), st.floats(0.001, 0.03), st.floats(0, 0.9), st.integers(2, 16), st.floats(0, 0.9))
def test_expected_width_bounds_every_control_between_parent_and_child(
    b: float, s_b: float, share_of_draws: float, draws: int, correlation: float
) -> None:
    child = PairedEffect(
        mean=b,
        standard_error=s_b,
        num_chunks=64,
        chunk_variance=(1 - share_of_draws) * s_b**2 * 64,
        program_variance=share_of_draws * s_b**2,
        program_draws=draws,
    )
    covariance = Covariance(
        chunks=correlation * (1 - share_of_draws) * s_b**2, programs=correlation * share_of_draws * s_b**2 / 2
    )
    bound = expected_width(child, s_b, level=0.98, covariance=covariance)
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
        control = PairedEffect(**(child.to_json() | {"mean": ratio * b}))
        measured = retained_effect(control, child, level=0.98, covariance=covariance).interval
        assert measured is None or measured.width <= bound * (1 + 1e-9), f"at {ratio}"


def test_expected_width_of_an_uncertain_child_is_infinite() -> None:
    assert expected_width(effect(0.1, 0.1), 0.01, level=0.98) == math.inf


def test_family_level() -> None:
    assert family_level(2, 3, alpha=0.02) == pytest.approx(1 - 0.02 / 6)
    with pytest.raises(ValueError, match="at least one test"):
        family_level(2, 0, alpha=0.02)
