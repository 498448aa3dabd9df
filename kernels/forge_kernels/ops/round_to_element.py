"""Round to the nearest value of any element format, and turn such values into codes and back.

Nearest with ties to the even code, saturation at the largest value, plus zero for both zeros; NaN stays NaN. The quantum is a
power of two, so that every step but the rounding is exact:

    float:    q = 2^(max(floor(log2 |y|), 1 - bias) - m),    rounded = round(y / q) q,    m mantissa bits
    integer:  rounded = round(y)

The E2M1 special case on the scoring path, with the same bits, is `forge_kernels.ops._arithmetic.round_to_e2m1_`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.formats import Element, FloatElement, IntegerElement

_MANTISSA_BITS = 23
_FLOAT32_BIAS = 127


def round_to_element(y: Tensor, element: Element) -> Tensor:
    """Return float32 `y` rounded to the nearest value of `element`, in a new tensor."""
    y = y.clamp(-element.max_value, element.max_value)
    if isinstance(element, IntegerElement):
        return y.round_().add_(0.0)
    exponent = ((y.view(torch.int32) >> _MANTISSA_BITS) & 0xFF) - _FLOAT32_BIAS
    exponent.clamp_(min=1 - element.exponent_bias).sub_(element.mantissa_bits)
    quantum = _power_of_two(exponent)
    rounded: Tensor = (y / quantum).round_().mul_(quantum)
    return rounded.to(torch.float32).add_(0.0)


def codes_of_element(rounded: Tensor, element: Element) -> Tensor:
    """Return the int32 codes of float32 values that `element` has; zero of either sign gives code 0."""
    if isinstance(element, IntegerElement):
        return torch.bitwise_and(rounded.to(torch.int32), 2**element.bits - 1)
    return _magnitude_codes(rounded.abs(), element) + ((rounded < 0).to(torch.int32) << (element.bits - 1))


def values_of_codes(codes: Tensor, element: Element) -> Tensor:
    """Return the float32 values of integer codes in 0..2^bits - 1."""
    codebook = torch.tensor(element.codebook, dtype=torch.float32, device=codes.device)
    return codebook[codes.to(torch.int32)]


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` in float64, exactly: the smallest quantum of bf16 is below the normal range of float32."""
    return (exponent.to(torch.int64).add_(1023) << 52).view(torch.float64)


def _magnitude_codes(magnitude: Tensor, element: FloatElement) -> Tensor:
    # From the smallest normal value on, exponent and leading mantissa bits of the float32 are the code, up to an offset.
    shift = _MANTISSA_BITS - element.mantissa_bits
    offset = (_FLOAT32_BIAS - element.exponent_bias) << element.mantissa_bits
    normal = (magnitude.view(torch.int32) >> shift) - offset
    if element.exponent_bias == _FLOAT32_BIAS:
        return normal
    subnormal = magnitude.mul(1 / element.smallest).to(torch.int32)
    return torch.where(magnitude < 2.0 ** (1 - element.exponent_bias), subnormal, normal)
