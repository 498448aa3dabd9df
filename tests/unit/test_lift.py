"""The FP8 lift: exact over the whole range that it claims, and within its bound beyond it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.lift import LIFT_ELEMENTS, LiftElement, least_exact_shift, lift, lowered
from forge_kernels.rules import SCALE_RULES, Encoded, ScaleRule
from tests.mxfp4_oracle import assert_same_bits

ELEMENTS: tuple[LiftElement, ...] = ("e4m3", "e5m2")
SPAN = {"e4m3": 14, "e5m2": 28}
"""Difference between the largest and the smallest exponent of a row that is still exact."""


def every_code(exponents: list[int]) -> Encoded:
    """One row whose blocks hold every code, block b under the scale 2^exponents[b]."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2 * len(exponents))
    codes[codes == 8] = 0
    return Encoded(codes_NK=codes[None], scales_NB=torch.tensor([[127 + e for e in exponents]], dtype=torch.uint8))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("top", [-90, 0, 100])
def test_every_code_is_exact_over_the_whole_span(element: LiftElement, top: int) -> None:
    encoded = every_code([top - down for down in range(SPAN[element] + 1)])
    lifted = lift(encoded, element=element)
    assert lifted.is_exact_M.tolist() == [True]
    assert_same_bits(lowered(lifted) + 0.0, decode(encoded) + 0.0)


@pytest.mark.parametrize("element", ELEMENTS)
def test_one_octave_further_is_detected(element: LiftElement) -> None:
    encoded = every_code([0, -SPAN[element] - 1])
    assert lift(encoded, element=element).is_exact_M.tolist() == [False]
    without_codes = Encoded(codes_NK=encoded.codes_NK.clone(), scales_NB=encoded.scales_NB)
    without_codes.codes_NK[0, 32:] = 0
    assert lift(without_codes, element=element).is_exact_M.tolist() == [True]
    assert least_exact_shift(element) == LIFT_ELEMENTS[element][2] - SPAN[element]


def wide(rows: int, blocks: int, octaves: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, blocks, 32, generator=generator)
    return (x * 2 ** (octaves * torch.rand(rows, blocks, 1, generator=generator))).flatten(1)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_the_bound_holds_beyond_the_range(element: LiftElement, scale_rule: ScaleRule) -> None:
    encoded = encode(wide(64, 24, 60.0, seed=1), scale_rule=scale_rule)
    lifted = lift(encoded, element=element)
    exact = decode(encoded).double()
    error = (lowered(lifted).double() - exact).abs()
    small, _, largest_shift = LIFT_ELEMENTS[element]
    bound = small.smallest / 2 * lifted.scales_M.double()
    worst = (error / bound[:, None]).amax()
    assert worst <= 1, f"{float(worst)} times the bound"
    share = (error.amax(dim=1) / exact.abs().amax(dim=1)).amax()
    assert float(share) <= {"e4m3": 2.0**-17, "e5m2": 2.0**-31}[element]
    assert not lifted.is_exact_M.any()
    assert not (error > 0).any(dim=1)[lifted.is_exact_M].any()
    reference_M = encoded.scales_NB.amax(dim=1).double() - 127 - largest_shift
    assert torch.equal(lifted.scales_M.double(), 2.0**reference_M)


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_product_of_lifted_operands_is_the_mxfp4_product(element: LiftElement) -> None:
    x, w = encode(wide(9, 4, 6.0, seed=2)), encode(wide(17, 4, 3.0, seed=3))
    a, b = lift(x, element=element), lift(w)
    assert bool(a.is_exact_M.all() & b.is_exact_M.all())
    product = a.values_MK.double() @ b.values_MK.double().T
    scale = a.scales_M[:, None].double() * b.scales_M.double()
    wanted = decode(x).double() @ decode(w).double().T
    torch.testing.assert_close(product * scale, wanted, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("element", ELEMENTS)
def test_zero_rows_and_empty_matrices(element: LiftElement) -> None:
    zero = lift(encode(torch.zeros(2, 64)), element=element)
    assert bool(zero.is_exact_M.all())
    assert not lowered(zero).any()
    # A zero block's byte 0 does not drag the reference, nor does a block whose byte is large and whose codes are all zero.
    mixed = encode(torch.cat([torch.full((1, 32), 3.0), torch.zeros(1, 32)], dim=1))
    mixed.scales_NB[0, 1] = 250
    assert_same_bits(
        lowered(lift(mixed, element=element)), torch.cat([torch.full((1, 32), 3.0), torch.zeros(1, 32)], dim=1)
    )
    assert lift(encode(torch.zeros(0, 64)), element=element).values_MK.shape == (0, 64)
    mixed.scales_NB[0, 1] = 255
    with pytest.raises(ValueError, match=r"scale byte of block \(0, 1\) is 255"):
        lift(mixed, element=element)
    with pytest.raises(ValueError, match="cannot lift to 'e3m4'; known: e4m3, e5m2"):
        lift(encode(torch.zeros(1, 32)), element="e3m4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="can only lift matrices"):
        lift(encode(torch.zeros(64)), element=element)


def test_the_largest_shift_is_the_largest() -> None:
    for small, dtype, largest_shift in LIFT_ELEMENTS.values():
        assert 6 * 2.0**largest_shift <= small.max_value < 6 * 2.0 ** (largest_shift + 1)
        assert torch.finfo(dtype).max == small.max_value
        assert math.log2(small.smallest) == {"e4m3": -9, "e5m2": -16}[small.name]
