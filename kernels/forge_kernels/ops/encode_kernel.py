"""Triton kernel beside `forge_kernels.ops.encode`: from the input, transformed on the way, to codes or to values in one pass.

Reads the input once; writes half a byte per element and one byte per block, or the decoded values. The bits are those of the
reference: all arithmetic is elementwise IEEE, Hadamard transforms are butterflies in the order of
`forge_kernels.ops.hadamard.hadamard_butterflies`, and the sums that the rule "search" compares are taken over the same tree.

Legend: M rows, K elements per row, tile (N, J) of C chunks of E elements as in `forge_kernels.ops._device`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.ops._device import (
    amax_bits,
    hadamard_tile,
    inverse_scale_of_bytes,
    load_blocks,
    narrow,
    on_device_of,
    packed_codes,
    rounded,
    rounded_up_to_8,
    scale_bytes,
    scale_of_bytes,
    stored_bytes,
)
from forge_kernels.rules import SCALE_RULES, ScaleRule

BLOCKS = 128
"""Blocks of a tile, one per thread."""


@triton.jit
def _encode_kernel(
    x_ptr, diagonal_ptr, packed_ptr, scales_ptr, num_blocks, blocks_per_row, row_stride,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block_N = tl.program_id(0) * N + tl.arange(0, N)
    is_inside_N = block_N < num_blocks
    x_NJ = load_blocks(x_ptr, diagonal_ptr, block_N, num_blocks, blocks_per_row, row_stride, HAS_DIAGONAL, N, C, E)
    if SIZE > 1:
        x_NJ = hadamard_tile(x_NJ, SIZE, NORM, N)
    bits_N = amax_bits(x_NJ, N, SIZE)
    bytes_N = scale_bytes(x_NJ, bits_N, RULE, N)
    packed_NH = packed_codes(rounded_up_to_8(x_NJ * inverse_scale_of_bytes(bytes_N)[:, None]), N)
    place_NH = block_N.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(packed_ptr + place_NH, packed_NH, mask=is_inside_N[:, None])
    tl.store(scales_ptr + block_N, stored_bytes(bytes_N, bits_N), mask=is_inside_N)


@triton.jit
def _fake_quantize_kernel(
    x_ptr, diagonal_ptr, values_ptr, num_blocks, blocks_per_row, row_stride,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block_N = tl.program_id(0) * N + tl.arange(0, N)
    x_NJ = load_blocks(x_ptr, diagonal_ptr, block_N, num_blocks, blocks_per_row, row_stride, HAS_DIAGONAL, N, C, E)
    if SIZE > 1:
        x_NJ = hadamard_tile(x_NJ, SIZE, NORM, N)
    bits_N = amax_bits(x_NJ, N, SIZE)
    bytes_N = scale_bytes(x_NJ, bits_N, RULE, N)
    value_NJ = rounded(x_NJ * inverse_scale_of_bytes(bytes_N)[:, None])
    scale_N = tl.where(bits_N < 0x7F800000, scale_of_bytes(bytes_N), float("nan"))
    value_NCE = tl.reshape(value_NJ * scale_N[:, None], (N, C, E))
    place_1CE = tl.arange(0, C)[None, :, None] * E + tl.arange(0, E)[None, None, :]
    place_NCE = (block_N.to(tl.int64) * 32)[:, None, None] + place_1CE
    is_inside_N11 = (block_N < num_blocks)[:, None, None]
    tl.store(values_ptr + place_NCE, narrow(value_NCE, values_ptr.dtype.element_ty), mask=is_inside_N11)


@on_device_of
def encode_packed_triton(
    x_MK: Tensor, scale_rule: ScaleRule, *, diagonal_K: Tensor | None = None, hadamard_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Return packed codes (M, K / 2) and scale bytes (M, K / 32), both uint8, of a 2-D tensor with contiguous rows.

    Each row is multiplied by the float32 `diagonal_K`, then its runs of `hadamard_size` are rotated; 1 leaves them.
    Nothing is checked: blocks with a NaN or an infinity get scale byte 255, which is NaN. `forge_kernels.ops.encode` checks.
    """
    num_rows, num_columns = x_MK.shape
    packed = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=x_MK.device)
    scales = torch.empty(num_rows, num_columns // 32, dtype=torch.uint8, device=x_MK.device)
    if x_MK.numel():
        _encode_kernel[grid_of(x_MK)](
            x_MK, x_MK if diagonal_K is None else diagonal_K, packed, scales, *shape_arguments(x_MK),
            RULE=SCALE_RULES.index(scale_rule), HAS_DIAGONAL=diagonal_K is not None, **hadamard_arguments(hadamard_size),
            **tile_arguments(x_MK), num_warps=BLOCKS // 32, enable_fp_fusion=False,
        )  # fmt: skip
    return packed, scales


@on_device_of
def fake_quantize_triton(
    x_MK: Tensor,
    scale_rule: ScaleRule,
    *,
    diagonal_K: Tensor | None = None,
    hadamard_size: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the decoded values (M, K), float32 or bfloat16, of what `encode_packed_triton` would return.

    A block with a NaN or an infinity becomes NaN as a whole. In bfloat16 values below 2^-133 are cut off towards zero.
    """
    values = torch.empty(x_MK.shape, dtype=dtype, device=x_MK.device)
    if x_MK.numel():
        _fake_quantize_kernel[grid_of(x_MK)](
            x_MK, x_MK if diagonal_K is None else diagonal_K, values, *shape_arguments(x_MK),
            RULE=SCALE_RULES.index(scale_rule), HAS_DIAGONAL=diagonal_K is not None, **hadamard_arguments(hadamard_size),
            **tile_arguments(x_MK), num_warps=BLOCKS // 32, enable_fp_fusion=False,
        )  # fmt: skip
    return values


def grid_of(x_MK: Tensor) -> tuple[int]:
    """Return how many tiles the blocks of `x_MK` fill."""
    return (triton.cdiv(x_MK.numel() // 32, BLOCKS),)


def shape_arguments(x_MK: Tensor) -> tuple[int, int, int]:
    """Return what a kernel wants to know of a matrix: blocks in all, blocks per row, elements from row to row."""
    return x_MK.numel() // 32, x_MK.shape[1] // 32, x_MK.stride(0)


def tile_arguments(x_MK: Tensor, blocks: int = BLOCKS) -> dict[str, int]:
    """Return the shape of a tile for the input's dtype: a chunk is 16 bytes."""
    elements = 16 // x_MK.element_size()
    return {"N": blocks, "C": 32 // elements, "E": elements}


def hadamard_arguments(size: int) -> dict[str, float]:
    """Return size and normalization; 1 for no transform."""
    return {"SIZE": size, "NORM": 1 / math.sqrt(size)}
