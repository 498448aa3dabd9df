"""What a code of an element stands for: small floats and small integers, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class FloatElement:
    """A sign-magnitude float: sign in the top bit, then exponent, then mantissa.

    Magnitude code c with exponent field E and mantissa field M stands for ``(1 + M / 2^m) 2^(E - bias)``, or for
    ``(M / 2^m) 2^(1 - bias)`` where E is 0. `m` is `mantissa_bits`.

    num_special: how many of the largest magnitude codes stand for no finite number; they are never written.
    has_infinity: the first of these is an infinity, as in IEEE 754; all others are NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    exponent_bias: int
    num_special: int = 0
    has_infinity: bool = False

    @property
    def bits(self) -> int:
        """Bits per code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """The finite value of every code without its sign bit, ascending."""
        unit = 2**self.mantissa_bits
        values = []
        for code in range(2 ** (self.bits - 1) - self.num_special):
            exponent, mantissa = divmod(code, unit)
            significand = mantissa / unit if exponent == 0 else 1 + mantissa / unit
            values.append(significand * 2.0 ** (max(exponent, 1) - self.exponent_bias))
        return tuple(values)

    @cached_property
    def codebook(self) -> tuple[float, ...]:
        """The value of every code; codes with the sign bit set stand for the negated magnitude (minus zero for 0)."""
        special = (math.inf if self.has_infinity else math.nan, *([math.nan] * (self.num_special - 1)))
        values = self.magnitudes + special[: self.num_special]
        return values + tuple(-value for value in values)

    @property
    def max_value(self) -> float:
        """The largest finite value; larger ones saturate here."""
        return self.magnitudes[-1]

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal."""
        return 2.0 ** (1 - self.exponent_bias - self.mantissa_bits)

    @property
    def max_exponent(self) -> int:
        """The exponent f of the largest value ``m 2^f`` with m in [1, 2)."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def max_significand(self) -> float:
        """The significand m of the largest value ``m 2^f`` with m in [1, 2)."""
        return math.ldexp(self.max_value, -self.max_exponent)


@dataclass(frozen=True, kw_only=True)
class IntegerElement:
    """A two's complement integer; the lowest code, which has no positive counterpart, is never written."""

    name: str
    bits: int

    @cached_property
    def codebook(self) -> tuple[float, ...]:
        """The value of every code."""
        half = 2 ** (self.bits - 1)
        return tuple(float(code if code < half else code - 2 * half) for code in range(2 * half))

    @property
    def max_value(self) -> float:
        """The largest value, and the negative of the smallest that is written."""
        return float(2 ** (self.bits - 1) - 1)


Element = FloatElement | IntegerElement

E2M1 = FloatElement(name="e2m1", exponent_bits=2, mantissa_bits=1, exponent_bias=1)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

E2M3 = FloatElement(name="e2m3", exponent_bits=2, mantissa_bits=3, exponent_bias=1)
"""Eighths up to 2, then quarters to 4 and halves to 7.5."""

E3M2 = FloatElement(name="e3m2", exponent_bits=3, mantissa_bits=2, exponent_bias=3)
"""From 0.0625 to 28."""

E4M3 = FloatElement(name="e4m3", exponent_bits=4, mantissa_bits=3, exponent_bias=7, num_special=1)
"""From 2^-9 to 448; no infinity, the largest magnitude code is NaN."""

E5M2 = FloatElement(name="e5m2", exponent_bits=5, mantissa_bits=2, exponent_bias=15, num_special=4, has_infinity=True)
"""From 2^-16 to 57344, as in IEEE 754."""

BF16 = FloatElement(
    name="bf16", exponent_bits=8, mantissa_bits=7, exponent_bias=127, num_special=128, has_infinity=True
)
"""The upper half of a float32."""

INT8 = IntegerElement(name="int8", bits=8)
INT4 = IntegerElement(name="int4", bits=4)
INT3 = IntegerElement(name="int3", bits=3)
