"""Number formats as data: what an element code stands for, what a block shares, what both cost in bits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A small sign-magnitude float: sign in the top bit, then exponent, then mantissa; no infinity and no NaN.

    Magnitude code c with exponent field E and mantissa field M stands for ``(1 + M / 2^m) 2^(E - bias)``, or for
    ``(M / 2^m) 2^(1 - bias)`` where E is 0. `m` is `mantissa_bits`.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    exponent_bias: int

    @property
    def bits(self) -> int:
        """Bits per code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """The value of every code without its sign bit, ascending."""
        unit = 2**self.mantissa_bits
        values = []
        for code in range(2 ** (self.bits - 1)):
            exponent, mantissa = divmod(code, unit)
            significand = mantissa / unit if exponent == 0 else 1 + mantissa / unit
            values.append(significand * 2.0 ** (max(exponent, 1) - self.exponent_bias))
        return tuple(values)

    @property
    def codebook(self) -> tuple[float, ...]:
        """The value of every code; codes with the sign bit set stand for the negated magnitude (minus zero for 0)."""
        return self.magnitudes + tuple(-value for value in self.magnitudes)

    @property
    def max_value(self) -> float:
        """The largest representable value; larger ones saturate here."""
        return self.magnitudes[-1]


@dataclass(frozen=True, kw_only=True)
class ScaleFormat:
    """A power-of-two scale: byte b stands for ``2 ** (b - bias)`` for b in 0..max_byte; the byte above it is NaN."""

    name: str
    bits: int
    bias: int
    max_byte: int

    def value(self, byte: int) -> float:
        """Return the scale that `byte` stands for.

        Raises:
            ValueError: the byte is not in 0..max_byte.
        """
        if not 0 <= byte <= self.max_byte:
            raise ValueError(f"scale byte {byte} of format {self.name!r} has no value; use 0..{self.max_byte}")
        return 2.0 ** (byte - self.bias)


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements in runs of `block` along the last axis, each run with one shared scale."""

    name: str
    element: ElementFormat
    scale: ScaleFormat
    block: int

    @property
    def effective_bits(self) -> float:
        """Bits per element, its share of the scale included."""
        return self.element.bits + self.scale.bits / self.block
