"""The float32 arithmetic that every MXFP4 op shares, so that they agree to the last bit.

Everything here is elementwise IEEE arithmetic or integer arithmetic on the bits of a float32: the same bits on every
device, for every batch size and for every split into chunks. Nothing checks its input, nothing waits for the device.
It relies on gradual underflow, which torch has unless `torch.set_flush_denormal(True)` was called.

Legend: M rows (all leading axes), B = K / 32 blocks, J = 32 elements of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forge_kernels.formats import MXFP4
from forge_kernels.rules import ScaleRule

BLOCK = MXFP4.block
CHUNK_BLOCKS = 8192
"""Blocks per chunk and thread on the CPU: 1 MiB of values. Measured best between 4096 and 16384."""
MAX_CHOSEN_BYTE = 252
"""Largest scale byte that a scale rule returns: 6 * 2^125 is finite in float32, 4 * 2^126 is not."""

_MANTISSA_BITS = 23
_EXPONENT_MASK = 0x7F800000
_HALF_OF_MIN_NORMAL = 0x00400000  # the bits of 2^-127, the one scale below the normal range of float32
_ROUNDING = 1.5 * 2.0**22
"""Added, times p, to |y| < 2 p, it leaves a unit in the last place of p / 2: the hardware rounds to nearest even."""

_CARRY_AT: dict[ScaleRule, int] = {
    "floor": 0,
    "even": 0x00200000,  # carries into the exponent from m = 1.75 on
    "rceil": 0x003FFFFF,  # carries into the exponent above m = 1.5
}
"""Added to the bits of the largest magnitude m 2^f, it moves the exponent field to f + 1 where the rule says so."""


def split_runs(x_MK: Tensor, length: int = BLOCK) -> Tensor:
    """Return a view (..., K / length, length) of (..., K); K is divisible by `length`."""
    return x_MK.reshape(*x_MK.shape[:-1], x_MK.shape[-1] // length, length)


def scale_bytes_of_amax(amax: Tensor, scale_rule: ScaleRule, *, raised_by: int = 0) -> Tensor:
    """Return the scale byte for each block maximum, as int32 in 0..252: exponent f - 2 + carry + `raised_by`.

    amax: non-negative float32. Non-finite entries give some byte of the range; callers that allow them mask the result.
    """
    bits = amax.view(torch.int32)
    exponent = (bits + _CARRY_AT[scale_rule]) >> _MANTISSA_BITS
    return exponent.sub_(2 - raised_by).clamp_(0, MAX_CHOSEN_BYTE)


def scale_of_bytes(scales: Tensor) -> Tensor:
    """Return ``2^(b - 127)`` in float32, exactly, for int32 bytes b in 0..254."""
    return (scales << _MANTISSA_BITS).clamp_(min=_HALF_OF_MIN_NORMAL).view(torch.float32)


def inverse_scale_of_bytes(scales: Tensor) -> Tensor:
    """Return ``2^(127 - b)`` in float32, exactly, for int32 bytes b in 0..254."""
    return ((254 - scales) << _MANTISSA_BITS).clamp_(min=_HALF_OF_MIN_NORMAL).view(torch.float32)


def round_to_e2m1_(y: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Round float32 `y` in place to the nearest E2M1 value: ties to even mantissa, saturation at 6, no minus zero.

    Below 2 the values are 0.5 apart, from 2 to 4 they are 1 apart, from 4 on 2 apart: p / 2 for p the power of two at
    or below max(|y|, 1). NaN stays NaN. `scratch` is int32 of the same shape, and is overwritten.
    """
    y.clamp_(-MXFP4.element.max_value, MXFP4.element.max_value)
    power_bits = torch.bitwise_and(y.view(torch.int32), _EXPONENT_MASK, out=scratch)
    power = power_bits.view(torch.float32).clamp_(min=1.0)
    return y.add_(power, alpha=_ROUNDING).sub_(power, alpha=_ROUNDING)


def codes_of_e2m1(q: Tensor) -> Tensor:
    """Return the uint8 codes of float32 values that lie on the E2M1 grid; zero of either sign gives code 0."""
    return codes_of_e2m1_(q.clone()).to(torch.uint8)


def codes_of_e2m1_(q: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return the int32 codes of values on the E2M1 grid, in `scratch` if given; `q` is overwritten, and holds no minus zero."""
    magnitude = torch.abs(q, out=None if scratch is None else scratch.view(torch.float32))
    # From 1 on, exponent and first mantissa bit of the float32 are the code, up to an offset; 1.0 has code 2, and 0.5 comes to 0.
    codes = magnitude.view(torch.int32).bitwise_right_shift_(_MANTISSA_BITS - 1).sub_(2 * 127 - 2)
    is_half = codes == 0
    codes.clamp_(min=0).add_(is_half)
    return codes.bitwise_or_(q.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8))


def row_chunks(num_rows: int, blocks_per_row: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of rows that stay in the cache through all passes of an elementwise op; all rows at once off the CPU."""
    on_cpu = device.type == "cpu"
    chunk = max(1, CHUNK_BLOCKS * torch.get_num_threads() // max(blocks_per_row, 1)) if on_cpu else max(num_rows, 1)
    for start in range(0, num_rows, chunk):
        yield slice(start, min(start + chunk, num_rows))


def sum_of_block(values_MBJ: Tensor) -> Tensor:
    """Return the sum over the last axis (32 long) by a fixed tree of additions, the same on every device."""
    width = BLOCK
    while width > 1:
        width //= 2
        values_MBJ = values_MBJ[..., :width] + values_MBJ[..., width:]
    return values_MBJ[..., 0]
