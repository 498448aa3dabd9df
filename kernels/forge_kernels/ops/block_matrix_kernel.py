"""Triton kernel: one 32 x 32 matrix per block (or one for all), then encoding, from the input to packed codes in one pass.

The product of a block runs on the matrix units with sums in float32, in an order that the hardware chooses. So the codes are not
those of a reference bit for bit: a transformed value is within `PRODUCT_ERROR` times ``sum_j |T_ij x_j|`` of the exact one, and
scale and codes are right for some value that close. bfloat16 inputs under bfloat16 matrices multiply exactly; any other pair is
widened to float32 and multiplied as three products of TF32 halves.

Legend: R rows of a tile, G blocks of a tile, i and j channels of a block, H = 16 bytes of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.ops._device import (
    amax_bits,
    inverse_scale_of_bytes,
    is_interpreted,
    on_device_of,
    packed_codes,
    rounded_up_to_8,
    scale_bytes,
    side_by_side,
    stored_bytes,
    widen,
)
from forge_kernels.rules import SCALE_RULES, ScaleRule

PRODUCT_ERROR = 2.0**-18
"""32 additions in float32 that may cut off what they lose, each 2^-23 of the largest partial sum."""
_ROWS = 64
_BLOCKS = 4


@triton.jit
def _encode_block(
    x_ptr, diagonal_ptr, matrix_ptr, row_R, is_inside_R, block, blocks_per_row, row_stride, matrix_stride,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, IS_BF16: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Return packed codes (R, 16) uint8 and scale bytes (R,) uint8 of one block of some rows."""
    channel = tl.arange(0, 32)
    column_j = block * 32 + channel
    is_column_j = column_j < blocks_per_row * 32
    inside_Rj = is_inside_R[:, None] & is_column_j[None, :]
    x_Rj = tl.load(x_ptr + row_R[:, None] * row_stride + column_j[None, :], mask=inside_Rj, other=0.0)
    # Read transposed, so that it multiplies from the right.
    place_ji = channel[None, :] * 32 + channel[:, None]
    matrix_ji = tl.load(matrix_ptr + block * matrix_stride + place_ji, mask=is_column_j[:, None], other=0.0)
    if IS_BF16:
        y_Ri = tl.dot(x_Rj, matrix_ji)
    else:
        wide_Rj = widen(x_Rj)
        if HAS_DIAGONAL:
            wide_Rj *= tl.load(diagonal_ptr + column_j, mask=is_column_j, other=1.0)[None, :]
        y_Ri = tl.dot(wide_Rj, widen(matrix_ji), input_precision="tf32x3")
    bits_R = amax_bits(y_Ri, R, 128)
    bytes_R = scale_bytes(y_Ri, bits_R, RULE, R)
    packed_RH = packed_codes(rounded_up_to_8(y_Ri * inverse_scale_of_bytes(bytes_R)[:, None]), R)
    return packed_RH, stored_bytes(bytes_R, bits_R)


@triton.jit
def _encode_block_matrix_kernel(
    x_ptr, diagonal_ptr, matrix_ptr, packed_ptr, scales_ptr, num_rows, blocks_per_row, row_stride, matrix_stride,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, IS_BF16: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * 4
    row_R = tl.program_id(1).to(tl.int64) * R + tl.arange(0, R)
    is_inside_R = row_R < num_rows
    packed_a, bytes_a = _encode_block(
        x_ptr, diagonal_ptr, matrix_ptr, row_R, is_inside_R, first, blocks_per_row, row_stride, matrix_stride,
        RULE, HAS_DIAGONAL, IS_BF16, R,
    )  # fmt: skip
    packed_b, bytes_b = _encode_block(
        x_ptr, diagonal_ptr, matrix_ptr, row_R, is_inside_R, first + 1, blocks_per_row, row_stride, matrix_stride,
        RULE, HAS_DIAGONAL, IS_BF16, R,
    )  # fmt: skip
    packed_c, bytes_c = _encode_block(
        x_ptr, diagonal_ptr, matrix_ptr, row_R, is_inside_R, first + 2, blocks_per_row, row_stride, matrix_stride,
        RULE, HAS_DIAGONAL, IS_BF16, R,
    )  # fmt: skip
    packed_d, bytes_d = _encode_block(
        x_ptr, diagonal_ptr, matrix_ptr, row_R, is_inside_R, first + 3, blocks_per_row, row_stride, matrix_stride,
        RULE, HAS_DIAGONAL, IS_BF16, R,
    )  # fmt: skip
    packed_RH = side_by_side(side_by_side(packed_a, packed_b, R, 16), side_by_side(packed_c, packed_d, R, 16), R, 32)
    byte_H = tl.arange(0, 64)
    inside_RH = is_inside_R[:, None] & (first * 16 + byte_H < blocks_per_row * 16)[None, :]
    tl.store(
        packed_ptr + row_R[:, None] * (blocks_per_row * 16) + (first * 16 + byte_H)[None, :], packed_RH, mask=inside_RH
    )
    low_R2 = tl.join(bytes_a, bytes_b)
    high_R2 = tl.join(bytes_c, bytes_d)
    bytes_RG = side_by_side(low_R2, high_R2, R, 2)
    block_G = first + tl.arange(0, 4)
    inside_RG = is_inside_R[:, None] & (block_G < blocks_per_row)[None, :]
    tl.store(scales_ptr + row_R[:, None] * blocks_per_row + block_G[None, :], bytes_RG, mask=inside_RG)


@on_device_of
def encode_block_matrix_triton(
    x_MK: Tensor, matrix_Bij: Tensor, scale_rule: ScaleRule, *, diagonal_K: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return packed codes (M, K / 2) and scale bytes (M, K / 32) of ``matrix[b] (diagonal x)_b``, block by block.

    x_MK: 2-D with contiguous rows. matrix_Bij: (B, 32, 32), or (1, 32, 32) for all blocks, contiguous.
    """
    num_rows, num_columns = x_MK.shape
    packed = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=x_MK.device)
    scales = torch.empty(num_rows, num_columns // 32, dtype=torch.uint8, device=x_MK.device)
    # The interpreter multiplies the bits of bfloat16 numbers.
    is_bf16 = x_MK.dtype == matrix_Bij.dtype == torch.bfloat16 and diagonal_K is None
    is_bf16 = is_bf16 and not is_interpreted(_encode_block_matrix_kernel)
    if x_MK.numel():
        grid = (triton.cdiv(num_columns // 32, _BLOCKS), triton.cdiv(num_rows, _ROWS))
        _encode_block_matrix_kernel[grid](
            x_MK, x_MK if diagonal_K is None else diagonal_K, matrix_Bij, packed, scales, num_rows, num_columns // 32,
            x_MK.stride(0), 0 if len(matrix_Bij) == 1 else 1024,
            RULE=SCALE_RULES.index(scale_rule), HAS_DIAGONAL=diagonal_K is not None, IS_BF16=is_bf16, R=_ROWS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return packed, scales
