"""Triton kernel beside `forge_kernels.ops.encode`: scale bytes and codes of a whole tile in one pass, packed.

The same bits as the reference for every scale rule: the arithmetic is elementwise IEEE, and the sums that the rule "search"
compares are taken over the same tree. Per element it reads the input once and writes half a byte and a 32nd of a byte.

The code of a magnitude m, in units of the scale, comes out of the addition that rounds it. With p the power of two at or below
max(m, 1) and c = 1.5 2^22, the sum ``m + p c`` has p / 2 as the unit of its last place, so that the bits of the sum minus the
bits of ``p c`` are the rounded number n of such units, and ``n + 2 log2(p)`` is the code.

Legend: R rows and C columns of a tile, B = C / 32 blocks, J = 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.rules import SCALE_RULES, ScaleRule

_COLUMNS = 512
"""Columns of a tile: 16 blocks."""
_ROWS = 4


@triton.jit
def widen(x):
    """Return float32 values of float32, float16 or bfloat16 ones; the interpreter's own cast loses bfloat16 subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def scale_bytes_of_amax(amax, RULE: tl.constexpr, RAISED_BY: tl.constexpr):
    """Return the int32 scale byte for each float32 block maximum; RULE is an index of `SCALE_RULES`, "search" as "floor"."""
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == 0:  # even
        bits += 0x00200000
    if RULE == 2:  # rceil
        bits += 0x003FFFFF
    exponent = (bits >> 23) + (RAISED_BY - 2)
    return tl.minimum(tl.maximum(exponent, 0), 252)


@triton.jit
def inverse_scale_of_bytes(scales):
    """Return ``2^(127 - b)`` in float32 for int32 bytes in 0..254."""
    return tl.maximum((254 - scales) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_bytes(scales):
    """Return ``2^(b - 127)`` in float32 for int32 bytes in 0..254."""
    return tl.maximum(scales << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def rounding_steps(magnitude):
    """Return (n, log2 p) as int32 for float32 magnitudes of at most 6: the rounded magnitude is ``n p / 2``."""
    power_bits = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    offset = power_bits.to(tl.float32, bitcast=True) * 6291456.0
    steps = (magnitude + offset).to(tl.int32, bitcast=True) - offset.to(tl.int32, bitcast=True)
    return steps, (power_bits >> 23) - 127


@triton.jit
def codes_of(y):
    """Return the int32 E2M1 codes of float32 values in units of their scale; never minus zero."""
    magnitude = tl.minimum(tl.abs(y), 6.0)
    steps, exponent = rounding_steps(magnitude)
    sign = (y.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(steps == 0, 0, steps + 2 * exponent + sign)


@triton.jit
def rounded(y):
    """Return float32 values rounded to the E2M1 grid, in units of their scale."""
    magnitude = tl.minimum(tl.abs(y), 6.0)
    steps, exponent = rounding_steps(magnitude)
    half = ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    value = steps.to(tl.float32) * half
    return tl.where(y < 0, -value, value)


@triton.jit
def sum_of_block(values_RBJ, R: tl.constexpr, B: tl.constexpr):
    """Return the sum over the last axis, 32 long: halves added, the tree of the reference."""
    values = values_RBJ
    for level in tl.static_range(5):
        WIDTH: tl.constexpr = 16 >> level
        low, high = tl.split(tl.permute(tl.reshape(values, (R, B, 2, WIDTH)), (0, 1, 3, 2)))
        values = tl.reshape(low + high, (R, B, WIDTH))
    return tl.reshape(values, (R, B))


@triton.jit
def scale_bytes(x_RBJ, RULE: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """Return the int32 scale bytes (R, B) of float32 blocks."""
    amax_RB = tl.max(tl.abs(x_RBJ), axis=2)
    bytes_RB = scale_bytes_of_amax(amax_RB, RULE, 0)
    if RULE == 3:  # search
        high_RB = scale_bytes_of_amax(amax_RB, RULE, 1)
        y_RBJ = x_RBJ * inverse_scale_of_bytes(bytes_RB)[:, :, None]
        ratio_RB1 = (1 << (high_RB - bytes_RB)).to(tl.float32)[:, :, None]
        low_error = rounded(y_RBJ) - y_RBJ
        high_error = rounded(y_RBJ / ratio_RB1) * ratio_RB1 - y_RBJ
        is_raised = sum_of_block(high_error * high_error, R, B) < sum_of_block(low_error * low_error, R, B)
        bytes_RB = tl.where(is_raised, high_RB, bytes_RB)
    return bytes_RB


@triton.jit
def _encode_kernel(
    x_ptr, packed_ptr, scales_ptr, num_rows, num_columns, row_stride,
    RULE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = C // 32
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    first = tl.program_id(1) * C
    column_C = first + tl.arange(0, C)
    inside_RC = (row_R < num_rows)[:, None] & (column_C < num_columns)[None, :]
    x_RC = widen(tl.load(x_ptr + row_R[:, None] * row_stride + column_C[None, :], mask=inside_RC, other=0.0))
    x_RBJ = tl.reshape(x_RC, (R, B, 32))
    bytes_RB = scale_bytes(x_RBJ, RULE, R, B)
    codes_RBJ = codes_of(x_RBJ * inverse_scale_of_bytes(bytes_RB)[:, :, None])
    even_RH, odd_RH = tl.split(tl.reshape(codes_RBJ, (R, C // 2, 2)))
    half_H = first // 2 + tl.arange(0, C // 2)
    tl.store(
        packed_ptr + row_R[:, None] * (num_columns // 2) + half_H[None, :],
        (even_RH | (odd_RH << 4)).to(tl.uint8),
        mask=(row_R < num_rows)[:, None] & (half_H < num_columns // 2)[None, :],
    )
    block_B = first // 32 + tl.arange(0, B)
    tl.store(
        scales_ptr + row_R[:, None] * (num_columns // 32) + block_B[None, :],
        bytes_RB.to(tl.uint8),
        mask=(row_R < num_rows)[:, None] & (block_B < num_columns // 32)[None, :],
    )


def encode_packed_triton(x_MK: Tensor, scale_rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Return packed codes (M, K / 2) and scale bytes (M, K / 32), both uint8, of a 2-D tensor with contiguous rows.

    Nothing is checked: blocks with a NaN or an infinity give some codes. `forge_kernels.ops.encode` checks.
    """
    num_rows, num_columns = x_MK.shape
    packed = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=x_MK.device)
    scales = torch.empty(num_rows, num_columns // 32, dtype=torch.uint8, device=x_MK.device)
    if x_MK.numel():
        grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS))
        _encode_kernel[grid](
            x_MK, packed, scales, num_rows, num_columns, x_MK.stride(0),
            RULE=SCALE_RULES.index(scale_rule), R=_ROWS, C=_COLUMNS,
        )  # fmt: skip
    return packed, scales
