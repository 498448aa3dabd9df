"""Triton kernel beside `forge_kernels.ops.block_swap`: encode an activation and move one code per block, in one pass.

The bits are those of the reference: the pull of a block's errors is added up from its first element to its last, each product
rounded before it is added. A program takes one block of many rows, so that all of its threads read the same Gram matrix.

Legend: N rows of a tile, one block of each, in C chunks of E elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.ops._device import (
    amax_bits,
    hadamard_tile,
    inverse_scale_of_bytes,
    on_device_of,
    packed_codes,
    rounded,
    scale_bytes,
    stored_bytes,
    widen,
)
from forge_kernels.ops.encode_kernel import hadamard_arguments, tile_arguments
from forge_kernels.rules import SCALE_RULES, ScaleRule

_ROWS = 128


@triton.jit
def _half_power_of_two(magnitude):
    """Return half the power of two at or below each magnitude, at least 0.5: the spacing of E2M1 values from there on."""
    return tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True) * 0.5


@triton.jit
def _moved(y_NCE, gram_ptr, place_1CE):
    """Return rounded values after the best move of each block; `gram_ptr` is the first entry of the blocks' Gram matrix."""
    value_NCE = rounded(y_NCE)
    error_NCE = value_NCE - y_NCE
    pull_NCE = y_NCE * 0.0
    for j in tl.static_range(32):
        # One entry of the block for all its elements; in integers, because adding zeros there costs nothing.
        own_NCE = tl.where(place_1CE == j, error_NCE.to(tl.int32, bitcast=True), 0)
        error_N = tl.sum(tl.sum(own_NCE, axis=2), axis=1).to(tl.float32, bitcast=True)
        pull_NCE += error_N[:, None, None] * tl.load(gram_ptr + j * 32 + place_1CE)
    pull_NCE *= 2
    curvature_1CE = tl.load(gram_ptr + place_1CE * 33)
    magnitude_NCE = tl.abs(value_NCE)
    outward_NCE = tl.where(magnitude_NCE == 6.0, 0.0, _half_power_of_two(magnitude_NCE))
    inward_NCE = _half_power_of_two(magnitude_NCE * 0.99)
    is_negative_NCE = value_NCE < 0
    down_NCE = -tl.where(is_negative_NCE, outward_NCE, inward_NCE)
    up_NCE = tl.where(is_negative_NCE, inward_NCE, outward_NCE)
    down_change_NCE = down_NCE * (pull_NCE + down_NCE * curvature_1CE)
    up_change_NCE = up_NCE * (pull_NCE + up_NCE * curvature_1CE)
    is_up_NCE = up_change_NCE < down_change_NCE
    change_NCE = tl.where(is_up_NCE, up_change_NCE, down_change_NCE)
    least_N = tl.min(tl.min(change_NCE, axis=2), axis=1)
    place_NCE = tl.where(change_NCE == least_N[:, None, None], place_1CE, 32)
    first_N = tl.min(tl.min(place_NCE, axis=2), axis=1)
    is_moved_NCE = (place_1CE == first_N[:, None, None]) & (least_N < 0)[:, None, None]
    return value_NCE + tl.where(is_moved_NCE, tl.where(is_up_NCE, up_NCE, down_NCE), 0.0)


@triton.jit
def _encode_with_swap_kernel(
    x_ptr, diagonal_ptr, gram_ptr, packed_ptr, scales_ptr, num_rows, blocks_per_row, row_stride,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row_N = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    is_inside_N = row_N < num_rows
    place_1CE = tl.arange(0, C)[None, :, None] * E + tl.arange(0, E)[None, None, :]
    start_N11 = (row_N * row_stride + block * 32)[:, None, None]
    x_NCE = widen(tl.load(x_ptr + (start_N11 + place_1CE), mask=is_inside_N[:, None, None], other=0.0))
    if HAS_DIAGONAL:
        x_NCE *= tl.load(diagonal_ptr + block * 32 + place_1CE)
    if SIZE > 1:
        x_NCE = tl.reshape(hadamard_tile(tl.reshape(x_NCE, (N, 32)), SIZE, NORM, N), (N, C, E))
    x_NJ = tl.reshape(x_NCE, (N, 32))
    bits_N = amax_bits(x_NJ, N, SIZE)
    bytes_N = scale_bytes(x_NJ, bits_N, RULE, N)
    moved_NCE = _moved(x_NCE * inverse_scale_of_bytes(bytes_N)[:, None, None], gram_ptr + block * 1024, place_1CE)
    block_N = row_N * blocks_per_row + block
    place_NH = block_N[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(packed_ptr + place_NH, packed_codes(tl.reshape(moved_NCE, (N, 32)), N), mask=is_inside_N[:, None])
    tl.store(scales_ptr + block_N, stored_bytes(bytes_N, bits_N), mask=is_inside_N)


@on_device_of
def encode_with_swap_triton(
    x_MK: Tensor,
    gram_Bij: Tensor,
    scale_rule: ScaleRule,
    *,
    diagonal_K: Tensor | None = None,
    hadamard_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return packed codes (M, K / 2) and scale bytes (M, K / 32) of a 2-D tensor with contiguous rows.

    Blocks with a NaN or an infinity get scale byte 255, which is NaN. gram_Bij: (B, 32, 32) float32, contiguous.

    Raises:
        ValueError: a Hadamard transform over more than one block.
    """
    if hadamard_size > 32:
        raise ValueError(
            f"a Hadamard transform of size {hadamard_size} crosses blocks; rotate before this, or use at most 32"
        )
    num_rows, num_columns = x_MK.shape
    packed = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=x_MK.device)
    scales = torch.empty(num_rows, num_columns // 32, dtype=torch.uint8, device=x_MK.device)
    if x_MK.numel():
        grid = (num_columns // 32, triton.cdiv(num_rows, _ROWS))
        _encode_with_swap_kernel[grid](
            x_MK, x_MK if diagonal_K is None else diagonal_K, gram_Bij, packed, scales, num_rows, num_columns // 32,
            x_MK.stride(0), RULE=SCALE_RULES.index(scale_rule), HAS_DIAGONAL=diagonal_K is not None,
            **hadamard_arguments(hadamard_size), **tile_arguments(x_MK, _ROWS),
            num_warps=_ROWS // 32, enable_fp_fusion=False,
        )  # fmt: skip
    return packed, scales
