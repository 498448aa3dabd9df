"""Formats as data: code books written out, bits counted, ml_dtypes as a second opinion."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from forge_kernels.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    INT3,
    INT4,
    INT8,
    MXFP4,
    BlockFormat,
    FloatElement,
)
from tests.ml_dtypes_oracle import ML_DTYPES

FLOATS = (E2M1, E2M3, E3M2, E4M3, E5M2, BF16)


def test_e2m1_codebook_is_the_one_of_the_format() -> None:
    assert E2M1.magnitudes == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1.codebook == (*E2M1.magnitudes, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    assert (E2M1.bits, E2M1.max_value) == (4, 6.0)


@pytest.mark.parametrize("element", FLOATS, ids=lambda element: element.name)
def test_every_code_of_a_small_float_means_what_ml_dtypes_says(element: FloatElement) -> None:
    codes = np.arange(2**element.bits, dtype=np.uint8 if element.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        theirs = codes.view(ML_DTYPES[element.name]).astype(np.float64)
    ours = np.array(element.codebook)
    np.testing.assert_array_equal(ours, theirs)
    finite = np.isfinite(theirs)
    assert np.array_equal(np.signbit(ours)[finite], np.signbit(theirs)[finite])
    assert element.max_value == theirs[finite].max()
    assert element.smallest == theirs[finite & (theirs > 0)].min()
    assert element.max_significand * 2.0**element.max_exponent == element.max_value


@pytest.mark.parametrize("element", FLOATS, ids=lambda element: element.name)
def test_magnitudes_ascend_and_are_distinct(element: FloatElement) -> None:
    assert list(element.magnitudes) == sorted(set(element.magnitudes))


@pytest.mark.parametrize(
    ("element", "largest"), [(INT3, 3.0), (INT4, 7.0), (INT8, 127.0)], ids=lambda value: getattr(value, "name", "")
)
def test_integers_are_two_s_complement_and_symmetric(element: object, largest: float) -> None:
    assert element.max_value == largest  # type: ignore[attr-defined]
    codebook = element.codebook  # type: ignore[attr-defined]
    assert codebook[: int(largest) + 1] == tuple(float(value) for value in range(int(largest) + 1))
    assert codebook[-1] == -1.0
    assert min(codebook) == -largest - 1


def test_scale_bytes_are_powers_of_two_and_255_is_refused() -> None:
    theirs = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert [E8M0.value(byte) for byte in range(255)] == theirs.tolist()
    for byte in (-1, 255):
        with pytest.raises(ValueError, match=rf"scale byte {byte} .* use 0\.\.254"):
            E8M0.value(byte)


def test_effective_bits_count_the_scale() -> None:
    assert BlockFormat(name="x", element=E2M1, scale=E8M0, block=16).effective_bits == 4.5
    assert {name: known.effective_bits for name, known in FORMATS.items()} == {
        "mxfp4": 4.25,
        "mxfp6_e2m3": 6.25,
        "mxfp6_e3m2": 6.25,
        "mxfp8_e4m3": 8.25,
        "mxfp8_e5m2": 8.25,
        "nvfp4": 4.5,
        "int8_g64": 8.25,
        "int8_g128": 8.125,
        "int4_g64": 4.25,
        "int4_g128": 4.125,
        "int3_g64": 3.25,
        "int3_g128": 3.125,
        "bf16": 16.0,
    }
    assert FORMATS["mxfp4"] is MXFP4


def test_special_codes_are_no_numbers() -> None:
    assert math.isnan(E4M3.codebook[0x7F])
    assert E5M2.codebook[0x7C] == math.inf
    assert all(math.isnan(E5M2.codebook[code]) for code in (0x7D, 0x7E, 0x7F))
