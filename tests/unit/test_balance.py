"""Smoothing scales: the rule, its limits, and channels about which nothing is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_kernels.solvers.balance import smooth_scales

magnitudes = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=32, max_size=32)


def test_at_one_half_both_sides_end_at_the_geometric_mean() -> None:
    activation_K, weight_K = torch.tensor([100.0, 1.0, 4.0]), torch.tensor([0.01, 1.0, 0.25])
    scale_K = smooth_scales(activation_K, weight_K)
    torch.testing.assert_close(activation_K * scale_K, (activation_K * weight_K).sqrt())
    torch.testing.assert_close(weight_K / scale_K, (activation_K * weight_K).sqrt())


def test_exponents_zero_and_one_flatten_one_side() -> None:
    activation_K, weight_K = torch.tensor([8.0, 1.0, 0.5]), torch.tensor([3.0, 1.0, 7.0])
    torch.testing.assert_close(activation_K * smooth_scales(activation_K, weight_K, exponent=1.0), torch.ones(3))
    torch.testing.assert_close(weight_K / smooth_scales(activation_K, weight_K, exponent=0.0), torch.ones(3))


@given(activation=magnitudes, weight=magnitudes, exponent=st.floats(0, 1), power_of_two=st.booleans())
@settings(max_examples=150, deadline=None)
def test_scales_are_positive_finite_and_within_the_ratio(
    activation: list[float], weight: list[float], exponent: float, power_of_two: bool
) -> None:
    activation_K, weight_K = (torch.tensor(v, dtype=torch.float64) for v in (activation, weight))
    scale_K = smooth_scales(activation_K, weight_K, exponent=exponent, max_ratio=1e4, power_of_two=power_of_two)
    assert scale_K.dtype == torch.float32
    assert torch.isfinite(scale_K).all()
    assert (scale_K > 0).all()
    assert float(scale_K.double().max() / scale_K.double().min()) <= 1e4
    if power_of_two:
        assert torch.frexp(scale_K).mantissa.eq(0.5).all()


def test_unknown_channels_get_the_geometric_mean_of_the_others() -> None:
    scale_K = smooth_scales(torch.tensor([4.0, 0.0, 1.0, 9.0]), torch.tensor([1.0, 5.0, 1.0, 0.0]))
    torch.testing.assert_close(scale_K, torch.tensor([0.5, 0.5**0.5, 1.0, 0.5**0.5]))
    assert smooth_scales(torch.zeros(3), torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_refusals() -> None:
    ones = torch.ones(4)
    with pytest.raises(ValueError, match=r"\(4,\) and weight maxima \(3,\)"):
        smooth_scales(ones, torch.ones(3))
    with pytest.raises(ValueError, match="exponent is 1.5"):
        smooth_scales(ones, ones, exponent=1.5)
    with pytest.raises(ValueError, match="max_ratio is 0.5"):
        smooth_scales(ones, ones, max_ratio=0.5)
    with pytest.raises(ValueError, match="activation maximum of channel 2 is nan"):
        smooth_scales(torch.tensor([1, 1, torch.nan, 1]), ones)
    with pytest.raises(ValueError, match="weight maximum of channel 0 is -1"):
        smooth_scales(ones, -ones)
