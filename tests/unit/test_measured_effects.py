from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.measured_effects import control_effect, effect_on, effect_on_reference, planned_width
from forge.noise import NoiseModel
from hypotheses.effects import retained_effect
from tests.ledger_builders import scored

EVEN = NoiseModel(draw_variance=1e-4, num_draws=5, floor=0.02, full_precision=2.0, reference_damage=0.0)
"""Luck that is the same for every program: the damage of the noise program is not clear."""
SCALED = NoiseModel(draw_variance=1e-4, num_draws=5, floor=0.02, full_precision=2.0, reference_damage=1.0)
PLAIN = {"events": [{"op": "install"}]}
CALIBRATED = {"events": [{"op": "second_moment"}]}


def test_each_calibrated_run_adds_the_variance_of_its_draw_once() -> None:
    plain = scored(3.0, 3.5, evidence=PLAIN)
    calibrated = scored(2.9, 3.3, evidence=CALIBRATED)
    assert effect_on(plain, plain, EVEN).program_variance == 0.0
    assert effect_on(plain, plain, EVEN).program_draws is None
    assert effect_on(plain, calibrated, EVEN).program_variance == pytest.approx(1e-4)
    both = effect_on(calibrated, calibrated, EVEN)
    assert (both.program_variance, both.program_draws) == (pytest.approx(2e-4), 5)
    assert effect_on(plain, calibrated, EVEN).mean == pytest.approx(0.15)
    beside = scored(2.9, 3.3, reference_chunk_nll=(3.1, 3.3), evidence={"events": [{"op": "inputs"}]})
    assert effect_on_reference(beside, plain, EVEN).mean == pytest.approx(0.1)
    assert effect_on_reference(beside, plain, EVEN).program_variance == pytest.approx(1e-4)


def test_luck_is_in_proportion_to_damage() -> None:
    parent, child = scored(2.9, 3.1, evidence=CALIBRATED), scored(2.7, 2.7, evidence=CALIBRATED)
    assert effect_on(parent, child, SCALED).program_variance == pytest.approx(1e-4 * (1.0**2 + 0.7**2))
    # On another split the child's damage is the parent's, less what the child wins there.
    beside = scored(3.5, 3.7, reference_chunk_nll=(3.7, 3.9), evidence=CALIBRATED)
    assert effect_on_reference(beside, parent, SCALED).program_variance == pytest.approx(1e-4 * (1.0**2 + 0.8**2))


@given(st.floats(-3, 12))
def test_luck_is_never_scaled_beyond_what_was_seen(nll: float) -> None:
    assert 0.25e-4 * (1 - 1e-12) <= SCALED.luck(nll) <= 4e-4 * (1 + 1e-12)
    assert EVEN.luck(nll) == 1e-4


def test_a_control_is_paired_with_the_confirmation() -> None:
    rng = np.random.default_rng(2)
    parent_nll = rng.gamma(4, 0.5, 48)
    gain = 0.3 + 0.1 * rng.standard_normal(48)
    child_nll, control_nll = parent_nll - gain, parent_nll - gain + 0.01 * rng.standard_normal(48)
    parent = scored(2.9, 3.1, evidence=CALIBRATED)
    confirmation = scored(*child_nll, reference_chunk_nll=tuple(parent_nll), evidence=CALIBRATED)
    control = scored(*control_nll, evidence=CALIBRATED)
    effect, covariance = control_effect(control, confirmation, parent, EVEN)
    assert effect.mean == pytest.approx(float(np.mean(parent_nll - control_nll)))
    assert covariance.chunks == pytest.approx(np.cov(parent_nll - control_nll, gain)[0, 1] / 48)
    assert covariance.programs == 1e-4
    confirmed = effect_on_reference(confirmation, parent, EVEN)
    interval = retained_effect(effect, confirmed, level=0.98, covariance=covariance).interval
    assert interval is not None
    planned = planned_width(confirmed, parent, EVEN, level=0.98)
    assert interval.width == pytest.approx(planned, rel=0.1)


def test_a_parent_without_calibration_shares_no_luck() -> None:
    parent = scored(2.9, 3.1, evidence=PLAIN)
    confirmation = scored(2.7, 2.8, reference_chunk_nll=(3.0, 3.2), evidence=CALIBRATED)
    _, covariance = control_effect(scored(2.7, 2.9, evidence=CALIBRATED), confirmation, parent, EVEN)
    assert covariance.programs == 0.0
