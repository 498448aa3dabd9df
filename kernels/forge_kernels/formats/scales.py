"""What the scale of a block stands for, as data."""

from __future__ import annotations

from dataclasses import dataclass

from forge_kernels.formats.elements import BF16, E4M3, FloatElement


@dataclass(frozen=True, kw_only=True)
class PowerOfTwoScale:
    """A power of two: byte b stands for ``2 ** (b - bias)`` for b in 0..max_byte; the byte above it is NaN."""

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
class FloatScale:
    """A positive small float, never written with its sign bit.

    has_tensor_scale: one further float32 per tensor multiplies all of them, so that the largest fits the element.
    """

    name: str
    element: FloatElement
    has_tensor_scale: bool = False

    @property
    def bits(self) -> int:
        """Bits per scale."""
        return self.element.bits


Scale = PowerOfTwoScale | FloatScale

E8M0 = PowerOfTwoScale(name="e8m0", bits=8, bias=127, max_byte=254)
"""Powers of two from 2^-127 to 2^127; byte 255 is NaN."""

E4M3_SCALE = FloatScale(name="e4m3", element=E4M3, has_tensor_scale=True)
"""NVFP4's: E4M3 under one float32 per tensor."""

BF16_SCALE = FloatScale(name="bf16", element=BF16)
"""Of integer groups."""
