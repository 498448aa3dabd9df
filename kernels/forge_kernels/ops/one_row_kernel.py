"""Triton kernel: one row of an activation, encoded, times a packed MXFP4 weight that is read as it is stored.

Reading the weight, 4.25 bits per element, is what such a product costs; everything else has to hide behind it. Every program
encodes the row for itself and keeps it in registers, one block per thread, as integers: E2M1 values are halves of integers of at
most 12, so a block's sum of products is an integer, exact on the integer units (dp4a), and only the sums over blocks, each times
the two scales of its block, are rounded:

    y_n = sum_b 2^(s_b + s_nb - 256) sum_j (2 x_bj) (2 w_nbj),    s the scale bytes, in float32

Legend: N output features of a tile, B blocks of a row, W = 4 words of 8 codes of a block.
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
    is_interpreted,
    load_blocks,
    on_device_of,
    rounded,
    scale_bytes,
)
from forge_kernels.ops.encode_kernel import hadamard_arguments, tile_arguments
from forge_kernels.rules import SCALE_RULES, ScaleRule

MOST_BLOCKS = 1024
"""Longest row, in blocks: one thread each."""


@triton.jit
def _power_of_two_bytes(byte):
    """Return ``2^(byte - 128)`` in float32 for bytes in 1..254, and 0 for byte 0, whose blocks hold nothing but tiny values."""
    return tl.where(byte > 0, (byte - 1) << 23, 0).to(tl.float32, bitcast=True)


@triton.jit
def _bytes_of_codes(words, IS_INTERPRETED: tl.constexpr):
    """Return two int32 tensors, each of four unsigned bytes ``128 + 2 value``: codes 0 to 3, and codes 4 to 7, of each word."""
    if IS_INTERPRETED:
        low = words ^ words
        high = words ^ words
        for place in tl.static_range(8):
            code = (words >> (4 * place)) & 15
            exponent = (code >> 1) & 3
            magnitude = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
            byte = 128 + tl.where(code > 7, -magnitude, magnitude)
            if place < 4:
                low = low | (byte << (8 * place))
            else:
                high = high | (byte << (8 * place - 32))
        return low, high
    else:
        # prmt looks up the byte of a nibble's low three bits, and gives 0 for nibbles with the high bit set, since no byte of
        # the table has its own high bit set. Positive and negative codes are looked up apart and joined without a borrow.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 flipped, upper, upper_flipped, plus, minus;
            xor.b32 flipped, $2, 0x88888888;
            shr.u32 upper, $2, 16;
            shr.u32 upper_flipped, flipped, 16;
            prmt.b32 plus, 0x03020100, 0x0C080604, $2;
            prmt.b32 minus, 0x03020100, 0x0C080604, flipped;
            add.u32 plus, plus, 0x80808080;
            sub.u32 $0, plus, minus;
            prmt.b32 plus, 0x03020100, 0x0C080604, upper;
            prmt.b32 minus, 0x03020100, 0x0C080604, upper_flipped;
            add.u32 plus, plus, 0x80808080;
            sub.u32 $1, plus, minus;
            }
            """,
            "=r,=r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _dot_of_bytes(left, right, total, IS_INTERPRETED: tl.constexpr):
    """Return `total` plus the int32 sum of four products, of unsigned bytes on the left and signed bytes on the right."""
    if IS_INTERPRETED:
        for place in tl.static_range(4):
            total += ((left >> (8 * place)) & 255) * ((right << (24 - 8 * place)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [left, right, total], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _row_of_integers(
    x_ptr, diagonal_ptr, block_B, blocks_per_row,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Return a row as words of four signed bytes, low and high (B, 4), -128 times the sum of each block, and scales (B,)."""
    x_BJ = load_blocks(x_ptr, diagonal_ptr, block_B, blocks_per_row, blocks_per_row, 0, HAS_DIAGONAL, B, C, E)
    if SIZE > 1:
        x_BJ = hadamard_tile(x_BJ, SIZE, NORM, B)
    bits_B = amax_bits(x_BJ, B, SIZE)
    byte_B = scale_bytes(x_BJ, bits_B, RULE, B)
    value_BJ = rounded(x_BJ * inverse_scale_of_bytes(byte_B)[:, None])
    # 2 value + 1.5 2^23 holds the integer in its low bits.
    integer_BJ = tl.fma(value_BJ, 2.0, 12582912.0).to(tl.int32, bitcast=True) & 255
    even, odd = tl.split(tl.reshape(integer_BJ, (B, 16, 2)))
    low, high = tl.split(tl.reshape(even | (odd << 8), (B, 8, 2)))
    low_BW, high_BW = tl.split(tl.reshape(low | (high << 16), (B, 4, 2)))
    correction_B = (tl.sum(value_BJ, axis=1) * -256.0).to(tl.int32)
    scale_B = tl.where(bits_B < 0x7F800000, _power_of_two_bytes(byte_B), float("nan"))
    return low_BW, high_BW, correction_B, scale_B


@triton.jit
def _one_row_kernel(
    x_ptr, diagonal_ptr, weight_ptr, weight_scales_ptr, y_ptr, num_outputs, blocks_per_row,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    TILES: tl.constexpr, N: tl.constexpr, B: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    block_B = tl.arange(0, B)
    is_block_B = block_B < blocks_per_row
    x_low_BW, x_high_BW, correction_B, x_scale_B = _row_of_integers(
        x_ptr, diagonal_ptr, block_B, blocks_per_row, RULE, HAS_DIAGONAL, SIZE, NORM, B, C, E
    )
    word_W = tl.arange(0, 4)
    for tile in tl.static_range(TILES):
        output_N = (tl.program_id(0) * TILES + tile) * N + tl.arange(0, N)
        is_output_N = output_N < num_outputs
        inside_BN = is_block_B[:, None] & is_output_N[None, :]
        # Blocks come first: the axis that is dealt out to threads, so that a warp reads a row's neighbours.
        block_BN = output_N.to(tl.int64)[None, :] * blocks_per_row + block_B[:, None]
        place_BNW = block_BN[:, :, None] * 4 + word_W[None, None, :]
        words_BNW = tl.load(weight_ptr + place_BNW, mask=inside_BN[:, :, None], other=0)
        scale_BN = _power_of_two_bytes(tl.load(weight_scales_ptr + block_BN, mask=inside_BN, other=0).to(tl.int32))
        low_BNW, high_BNW = _bytes_of_codes(words_BNW, IS_INTERPRETED)
        products_BNW = _dot_of_bytes(low_BNW, tl.broadcast_to(x_low_BW[:, None, :], (B, N, 4)), 0, IS_INTERPRETED)
        products_BNW = _dot_of_bytes(
            high_BNW, tl.broadcast_to(x_high_BW[:, None, :], (B, N, 4)), products_BNW, IS_INTERPRETED
        )
        sums_BN = (tl.sum(products_BNW, axis=2) + correction_B[:, None]).to(tl.float32)
        y_N = tl.sum(sums_BN * x_scale_B[:, None] * scale_BN, axis=0)
        tl.store(y_ptr + output_N, y_N.to(y_ptr.dtype.element_ty), mask=is_output_N)


@on_device_of
def one_row_triton(
    x_1K: Tensor,
    packed_NH: Tensor,
    scales_NB: Tensor,
    scale_rule: ScaleRule,
    *,
    diagonal_K: Tensor | None = None,
    hadamard_size: int = 1,
    dtype: torch.dtype = torch.float32,
    outputs: int = 16,
    tiles: int = 2,
) -> Tensor:
    """Return ``decode(encode(T x)) decode(weight)^T``, (1, N) of `dtype`, for one row; T as in `encode_packed_triton`.

    packed_NH, scales_NB: contiguous uint8. A row with a NaN or an infinity becomes NaN.

    Raises:
        ValueError: another number of rows, or a row of more than `MOST_BLOCKS` blocks.
    """
    num_blocks = x_1K.shape[1] // 32
    if len(x_1K) != 1 or num_blocks > MOST_BLOCKS:
        raise ValueError(
            f"{len(x_1K)} rows of {num_blocks} blocks; this product takes one row of at most {MOST_BLOCKS}"
        )
    num_outputs = len(packed_NH)
    y = torch.empty(1, num_outputs, dtype=dtype, device=x_1K.device)
    blocks = max(32, triton.next_power_of_2(num_blocks))
    if num_outputs:
        _one_row_kernel[(triton.cdiv(num_outputs, outputs * tiles),)](
            x_1K, x_1K if diagonal_K is None else diagonal_K, packed_NH.view(torch.int32), scales_NB, y,
            num_outputs, num_blocks,
            RULE=SCALE_RULES.index(scale_rule), HAS_DIAGONAL=diagonal_K is not None, **hadamard_arguments(hadamard_size),
            **(tile_arguments(x_1K) | {"N": outputs}), B=blocks, TILES=tiles,
            IS_INTERPRETED=is_interpreted(_one_row_kernel), num_warps=blocks // 32, enable_fp_fusion=False,
        )  # fmt: skip
    return y
