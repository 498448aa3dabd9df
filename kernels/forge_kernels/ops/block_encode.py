"""Encode and decode tensors in any `BlockFormat`: the reference that other implementations are compared with.

Scales, for a block with largest magnitude a = m 2^f, m in [1, 2), and an element whose largest value is M 2^E:

    power of two    floor   2^(f - E)                                   may clip
                    even    2^(f - E + [m >= M + half a unit of M])     clips by less than the element rounds anyway
                    rceil   2^ceil(log2(a / (M 2^E)))                   never clips
                    search  floor or twice that, whichever has the lower squared error; floor where they are equal
    float           a / (M 2^E), rounded to the scale's own element; under a tensor scale t = (largest a) / (M 2^E S), S the
                    largest scale, it is a / (M 2^E t)
    none            1

Codes are nearest-even of x / scale, saturating. A zero block has scale bits 0 and codes 0. For MXFP4 it gives the bits of
`forge_kernels.encode`, which is what campaigns use; but "search" adds its errors in float64 here and in float32 there, so that
errors equal to the last bits of a float32 may be told apart here alone.

Legend: M rows (all leading axes), K elements per row, B = K / block blocks, J elements of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_kernels.formats import BlockFormat, FloatElement, FloatScale, PowerOfTwoScale
from forge_kernels.ops._arithmetic import split_runs
from forge_kernels.ops.encode import require_finite, require_known_rule
from forge_kernels.ops.round_to_element import codes_of_element, round_to_element, values_of_codes
from forge_kernels.rules import ScaleRule

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class BlockEncoded:
    """A tensor in a `BlockFormat`.

    codes_MK: (..., K) int32 in 0..2^bits - 1 of the element. scales_MB: (..., K / block) int32 bits of the scale's own format;
        None where the format has no scale. tensor_scale: float32 scalar that multiplies everything; 1 where there is none.
    """

    format: BlockFormat
    codes_MK: Tensor
    scales_MB: Tensor | None
    tensor_scale: Tensor


def encode_blocks(x_MK: Tensor, format: BlockFormat, *, scale_rule: ScaleRule = "even") -> BlockEncoded:
    """Encode `x_MK` in blocks along its last axis.

    Args:
        x_MK: (..., K) float32, bfloat16 or float16, finite; K divisible by the format's block.
        format: see `forge_kernels.formats.FORMATS`.
        scale_rule: for power-of-two scales; others ignore it.

    Raises:
        ValueError: wrong dtype, K not divisible by the block, unknown rule, or a non-finite element (its index is named).
    """
    require_known_rule(scale_rule)
    if x_MK.dtype not in _DTYPES:
        raise ValueError(f"cannot encode {x_MK.dtype}; give float32, bfloat16 or float16")
    if x_MK.dim() == 0 or x_MK.shape[-1] == 0 or x_MK.shape[-1] % format.block:
        raise ValueError(f"shape {tuple(x_MK.shape)} has no whole blocks of {format.block} along its last axis")
    x_MK = x_MK.detach().to(torch.float32)
    require_finite(x_MK)
    x_MBJ = split_runs(x_MK, format.block)
    amax_MB1 = x_MBJ.abs().amax(dim=-1, keepdim=True) if x_MBJ.numel() else x_MBJ[..., :1]
    tensor_scale = torch.ones((), device=x_MK.device)
    scales_MB1 = None
    if isinstance(format.scale, PowerOfTwoScale):
        assert isinstance(format.element, FloatElement)
        scales_MB1 = _power_of_two_bytes(x_MBJ, amax_MB1, format.element, format.scale, scale_rule)
    elif isinstance(format.scale, FloatScale):
        if format.scale.has_tensor_scale:
            tensor_scale = _tensor_scale(amax_MB1, format)
        wanted_MB1 = amax_MB1 / (format.element.max_value * tensor_scale)
        rounded_MB1 = round_to_element(wanted_MB1, format.scale.element)
        # Rounded up, the scale of the largest float32 values would take them beyond float32: the one below it does not.
        overflows_MB1 = (rounded_MB1 * tensor_scale * format.element.max_value).isinf()
        scales_MB1 = codes_of_element(rounded_MB1, format.scale.element) - overflows_MB1.to(torch.int32)
    y_MBJ = _divided(x_MBJ, _scale_values(scales_MB1, tensor_scale, format, x_MBJ))
    codes_MBJ = codes_of_element(round_to_element(y_MBJ, format.element), format.element)
    return BlockEncoded(
        format=format,
        codes_MK=codes_MBJ.flatten(-2),
        scales_MB=None if scales_MB1 is None else scales_MB1.squeeze(-1),
        tensor_scale=tensor_scale,
    )


def decode_blocks(encoded: BlockEncoded) -> Tensor:
    """Return the values, (..., K) float32: ``value(code) * (value(scale) * tensor_scale)``."""
    format = encoded.format
    values_MBJ = split_runs(values_of_codes(encoded.codes_MK, format.element), format.block)
    scales_MB1 = None if encoded.scales_MB is None else encoded.scales_MB.unsqueeze(-1)
    return (values_MBJ * _scale_values(scales_MB1, encoded.tensor_scale, format, values_MBJ)).flatten(-2)


def _power_of_two_bytes(
    x_MBJ: Tensor, amax_MB1: Tensor, element: FloatElement, scale: PowerOfTwoScale, scale_rule: ScaleRule
) -> Tensor:
    significand, exponent = torch.frexp(amax_MB1.double())  # in [0.5, 1)
    significand, floor = significand * 2, exponent.to(torch.int32) - 1 - element.max_exponent
    half_unit = 2.0 ** -(element.mantissa_bits + 1)
    raised = {
        "floor": torch.zeros_like(significand, dtype=torch.bool),
        "even": significand >= element.max_significand + half_unit,
        "rceil": significand > element.max_significand,
    }
    # So that every element stays finite in float32, whose largest exponent is 127.
    largest_byte = min(scale.max_byte, scale.bias + 127 - element.max_exponent)
    low = (floor + scale.bias).clamp(0, largest_byte)
    if scale_rule != "search":
        return torch.where(amax_MB1 > 0, (floor + raised[scale_rule] + scale.bias).clamp(0, largest_byte), 0)
    high = (floor + scale.bias + 1).clamp(0, largest_byte)
    errors = []
    for byte in (low, high):
        unit = 2.0 ** (byte.double() - scale.bias)
        rounded = round_to_element((x_MBJ / unit).to(torch.float32), element).double()
        errors.append((rounded * unit - x_MBJ).square().sum(dim=-1, keepdim=True))
    return torch.where(amax_MB1 > 0, torch.where(errors[1] < errors[0], high, low), 0)


def _tensor_scale(amax_MB1: Tensor, format: BlockFormat) -> Tensor:
    assert isinstance(format.scale, FloatScale)
    largest = amax_MB1.amax() if amax_MB1.numel() else torch.zeros((), device=amax_MB1.device)
    scale = largest / (format.element.max_value * format.scale.element.max_value)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _scale_values(scales_MB1: Tensor | None, tensor_scale: Tensor, format: BlockFormat, like: Tensor) -> Tensor:
    if scales_MB1 is None or format.scale is None:
        return torch.ones((), device=like.device)
    if isinstance(format.scale, PowerOfTwoScale):
        return torch.ldexp(torch.ones_like(scales_MB1, dtype=torch.float32), scales_MB1 - format.scale.bias)
    return values_of_codes(scales_MB1, format.scale.element) * tensor_scale


def _divided(x_MBJ: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale``, and 0 where the scale is 0: of zero blocks, and of blocks too small for their scale's format."""
    return torch.where(scale > 0, x_MBJ / torch.where(scale > 0, scale, torch.ones_like(scale)), 0.0)
