"""Formats as data: code books written out, bits counted."""

from __future__ import annotations

import pytest

from forge_kernels.formats import E2M1, E8M0, MXFP4, BlockFormat, ElementFormat


def test_e2m1_codebook_is_the_one_of_the_format() -> None:
    assert E2M1.magnitudes == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1.codebook == (*E2M1.magnitudes, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    assert (E2M1.bits, E2M1.max_value) == (4, 6.0)


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits", "bias", "smallest", "largest"),
    [(2, 3, 1, 0.125, 7.5), (3, 2, 3, 0.0625, 28.0)],
    ids=["e2m3", "e3m2"],
)
def test_other_small_floats_are_described_by_the_same_data(
    exponent_bits: int, mantissa_bits: int, bias: int, smallest: float, largest: float
) -> None:
    element = ElementFormat(name="x", exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, exponent_bias=bias)
    assert element.bits == 6
    assert element.magnitudes[1] == smallest
    assert element.max_value == largest
    assert list(element.magnitudes) == sorted(set(element.magnitudes))


def test_scale_bytes_are_powers_of_two_and_255_is_refused() -> None:
    assert [E8M0.value(byte) for byte in (0, 126, 127, 128, 254)] == [2.0**-127, 0.5, 1.0, 2.0, 2.0**127]
    for byte in (-1, 255):
        with pytest.raises(ValueError, match=rf"scale byte {byte} .* use 0\.\.254"):
            E8M0.value(byte)


def test_effective_bits_count_the_scale() -> None:
    assert MXFP4.effective_bits == 4.25
    assert BlockFormat(name="x", element=E2M1, scale=E8M0, block=16).effective_bits == 4.5
