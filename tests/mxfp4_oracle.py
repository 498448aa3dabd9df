"""MXFP4 in exact rational arithmetic, one value at a time, written from the format's text and not from our code.

Also the comparisons that explain themselves: worst index, both values, both codes in binary.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

MAGNITUDES = tuple(Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6"))
ALL_CODES = tuple(code for code in range(16) if code != 8)


def exponent_of_block(values: list[float], rule: str) -> int | None:
    """Return the scale exponent of the rule before clamping; None for a zero block."""
    largest = max(abs(value) for value in values)
    if largest == 0:
        return None
    mantissa, exponent = math.frexp(largest)  # largest = mantissa 2^exponent, mantissa in [0.5, 1)
    m, f = 2 * mantissa, exponent - 1
    if rule == "floor":
        return f - 2
    if rule == "even":
        return f - 2 + (m >= 1.75)
    if rule == "rceil":
        e = f - 4
        while Fraction(largest) > 6 * Fraction(2) ** e:
            e += 1
        return e
    raise AssertionError(rule)


def byte_of_block(values: list[float], rule: str) -> int:
    exponent = exponent_of_block(values, rule)
    return 0 if exponent is None else min(max(exponent + 127, 0), 252)


def code_of_value(value: float, byte: int) -> int:
    y = Fraction(value) / Fraction(2) ** (byte - 127)
    magnitude = min(abs(y), MAGNITUDES[-1])
    code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - magnitude), c % 2))
    return code + 8 if y < 0 and code else code


def value_of_code(code: int, byte: int) -> Fraction:
    magnitude = MAGNITUDES[code % 8] * Fraction(2) ** (byte - 127)
    return -magnitude if code >= 8 else magnitude


def squared_error(values: list[float], byte: int) -> Fraction:
    return sum(((Fraction(v) - value_of_code(code_of_value(v, byte), byte)) ** 2 for v in values), Fraction(0))


def assert_same_bits(actual: Tensor, expected: Tensor, *, source: Tensor | None = None) -> None:
    """Compare float32 tensors bit for bit."""
    assert actual.dtype == expected.dtype == torch.float32
    assert actual.shape == expected.shape
    differs = actual.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    if bool(differs.any()):
        gap = torch.where(differs, (actual.double() - expected.double()).abs(), -1.0)
        worst = tuple(int(i) for i in torch.unravel_index(gap.nan_to_num(nan=math.inf).argmax(), gap.shape))
        given = "" if source is None else f", from {float(source[worst])!r}"
        raise AssertionError(
            f"{int(differs.sum())} of {actual.numel()} differ; worst at {worst}:"
            f" {float(actual[worst])!r} instead of {float(expected[worst])!r}{given}"
        )


def assert_same_codes(actual: Tensor, expected: Tensor, *, source: Tensor | None = None) -> None:
    """Compare uint8 code tensors."""
    assert actual.dtype == expected.dtype == torch.uint8
    assert actual.shape == expected.shape
    wrong = (actual != expected).nonzero()
    if len(wrong):
        first = tuple(int(i) for i in wrong[0])
        given = "" if source is None else f" for {float(source[first])!r}"
        raise AssertionError(
            f"{len(wrong)} of {actual.numel()} codes differ; first at {first}:"
            f" {int(actual[first]):04b} instead of {int(expected[first]):04b}{given}"
        )
