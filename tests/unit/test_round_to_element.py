"""Rounding to every element format: all codes, all ties and their neighbours, every bfloat16, against ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forge_kernels.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    INT3,
    INT4,
    INT8,
    Element,
    FloatElement,
    IntegerElement,
)
from forge_kernels.ops._arithmetic import codes_of_e2m1, round_to_e2m1_
from forge_kernels.ops.round_to_element import codes_of_element, round_to_element, values_of_codes
from tests.ml_dtypes_oracle import codes_by_ml_dtypes, rounded_by_ml_dtypes
from tests.mxfp4_oracle import assert_same_bits

FLOATS = (E2M1, E2M3, E3M2, E4M3, E5M2, BF16)
INTEGERS = (INT3, INT4, INT8)


def every_bfloat16() -> Tensor:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values.isfinite()]


def ties_and_neighbours(element: FloatElement) -> Tensor:
    magnitudes = torch.tensor(element.magnitudes, dtype=torch.float64)
    ties = ((magnitudes[1:] + magnitudes[:-1]) / 2).float()
    inf = torch.tensor(math.inf)
    points = torch.cat([magnitudes.float(), ties, torch.nextafter(ties, inf), torch.nextafter(ties, -inf)])
    return torch.cat([points, -points])


@pytest.mark.parametrize("element", FLOATS, ids=lambda element: element.name)
def test_small_floats_round_as_ml_dtypes_rounds_them(element: FloatElement) -> None:
    y = torch.cat([ties_and_neighbours(element), every_bfloat16().clamp(-element.max_value, element.max_value)])
    rounded = round_to_element(y, element)
    assert_same_bits(rounded, rounded_by_ml_dtypes(y, element.name) + 0.0)
    codes = codes_of_element(rounded, element)
    assert torch.equal(codes, codes_by_ml_dtypes(rounded, element.name))
    assert_same_bits(values_of_codes(codes, element), rounded)


@pytest.mark.parametrize("element", [*FLOATS, *INTEGERS], ids=lambda element: element.name)
def test_beyond_the_largest_value_it_saturates(element: Element) -> None:
    y = torch.tensor([1.01, 1.5, 3.0]) * element.max_value if element is not BF16 else torch.tensor([3.39e38] * 3)
    assert round_to_element(y, element).tolist() == [element.max_value] * 3
    assert round_to_element(-y, element).tolist() == [-element.max_value] * 3


def test_e2m1_has_the_bits_of_the_scoring_path() -> None:
    y = torch.cat([ties_and_neighbours(E2M1), every_bfloat16()])
    rounded = round_to_element(y, E2M1)
    assert_same_bits(rounded, round_to_e2m1_(y.clone()) + 0.0)
    assert torch.equal(codes_of_element(rounded, E2M1), codes_of_e2m1(rounded).to(torch.int32))


@pytest.mark.parametrize("element", INTEGERS, ids=lambda element: element.name)
def test_integers_round_half_to_even(element: IntegerElement) -> None:
    largest = int(element.max_value)
    halves = torch.arange(-2 * largest, 2 * largest + 1) / 2
    rounded = round_to_element(halves, element)
    assert rounded.tolist() == [float(round(Fraction(float(half)))) for half in halves]
    codes = codes_of_element(rounded, element)
    assert codes.min() >= 0
    assert codes.max() < 2**element.bits
    assert 2 ** (element.bits - 1) not in codes.tolist(), (
        "the lowest code, which has no positive counterpart, is written"
    )
    assert_same_bits(values_of_codes(codes, element), rounded)


@pytest.mark.parametrize("element", [*FLOATS, *INTEGERS], ids=lambda element: element.name)
def test_nan_stays_nan_and_minus_zero_becomes_zero(element: Element) -> None:
    rounded = round_to_element(torch.tensor([math.nan, -0.0, -1e-40]), element)
    assert rounded[0].isnan()
    if element is not BF16:
        assert_same_bits(rounded[1:], torch.zeros(2))


@given(st.sampled_from((E2M1, E2M3, E3M2, E4M3, E5M2)), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_no_value_of_the_format_is_nearer(element: FloatElement, y: float) -> None:
    rounded = Fraction(float(round_to_element(torch.tensor([y]), element)))
    values = [Fraction(value) for value in element.magnitudes] + [-Fraction(value) for value in element.magnitudes]
    assert abs(rounded - Fraction(y)) == min(abs(value - Fraction(y)) for value in values)
