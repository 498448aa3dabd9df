"""Triton kernels: activations of a few rows, encoded, times a packed MXFP4 weight that is read as it is stored.

Reading the weight, 4.25 bits per element, is what such a product costs; everything else has to hide behind it.

One row: every program encodes the row for itself and keeps it in registers, one block per thread, as integers: E2M1
values are halves of integers of at most 12, so a block's sum of products is an integer, exact on the integer units (dp4a), and
only the sums over blocks, each times the two scales of its block, are rounded:

    y_mn = sum_b 2^(s_mb + s_nb - 256) sum_j (2 x_mbj) (2 w_nbj),    s the scale bytes, in float32

Up to 16 rows: the rows are lifted to E4M3 (`forge_kernels.ops.lift`), and each tile of the weight to E5M2 on its way to the
matrix units, by a table per block: with the row's largest scale byte as reference, 27 octaves are exact. Blocks further down are
taken for blocks 26 octaves below, an error of at most 3 2^-26 of the row's largest magnitude. Inputs are cut into parts for more
programs to work on; the last one to finish adds them up, in order, so that the result repeats.

Legend: M rows, N output features of a tile, B blocks of a row, W = 4 words of 8 codes of a block, H bytes of a slice, P parts.
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
from forge_kernels.ops.lift import Lifted
from forge_kernels.rules import SCALE_RULES, ScaleRule

MOST_ROWS = 16
EXACT_OCTAVES = 26
"""Largest difference of exponents in a weight's row that the kernel for up to 16 rows holds."""
MOST_BLOCKS = 1024
"""Longest row of the first kernel, in blocks: one thread each."""


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


@triton.jit
def _lifted_codes(packed, shift, IS_INTERPRETED: tl.constexpr):
    """Return E5M2 values of codes 0 to 3 and of codes 4 to 7 of every four bytes, times ``2^(shift / 4 - 13)``.

    packed, shift: uint8 (N, H); `shift` is a multiple of four up to 104, the same for four neighbours.
    """
    if IS_INTERPRETED:
        N: tl.constexpr = packed.shape[0]
        H: tl.constexpr = packed.shape[1]
        both = tl.reshape(tl.join(packed & 15, packed >> 4), (N, 2 * H)).to(tl.uint32)
        bits = (((both & 7) << 22) | ((both & 8) << 28)).to(tl.float32, bitcast=True)
        value = tl.reshape(bits * 8.507059173023462e37, (N, H // 4, 2, 4))
        power = ((shift.to(tl.int32) // 4 + (127 - 13)) << 23).to(tl.float32, bitcast=True)
        low, high = tl.split(tl.permute(value, (0, 1, 3, 2)))
        low = tl.reshape(low, (N, H)) * power
        high = tl.reshape(high, (N, H)) * power
        return low.to(tl.float8e5), high.to(tl.float8e5)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second, magnitude, sign, value, bit;
            and.b32 first, $3, 0xFFFFFF00;
            add.u32 first, first, 0x0A080400;
            add.u32 second, $3, 0x12100E0C;
            and.b32 magnitude, $2, 0x77777777;
            shr.u32 sign, $2, 3;
            and.b32 sign, sign, 0x11111111;
            prmt.b32 value, first, second, magnitude;
            prmt.b32 bit, 0x00008000, 0, sign;
            or.b32 $0, value, bit;
            shr.u32 magnitude, magnitude, 16;
            shr.u32 sign, sign, 16;
            prmt.b32 value, first, second, magnitude;
            prmt.b32 bit, 0x00008000, 0, sign;
            or.b32 $1, value, bit;
            }
            """,
            "=r,=r,r,r",
            [packed, shift],
            dtype=(tl.float8e5, tl.float8e5),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _matrix_rows_kernel(
    x_ptr, x_scales_ptr, packed_ptr, bytes_ptr, references_ptr, parts_ptr, counters_ptr, y_ptr,
    num_rows, num_outputs, bytes_per_row, slices_per_part,
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    output_N = tl.program_id(0) * N + tl.arange(0, N)
    is_output_N = output_N < num_outputs
    row_M = tl.arange(0, 16)
    is_row_M = row_M < num_rows
    reference_N1 = tl.load(references_ptr + output_N, mask=is_output_N, other=0).to(tl.int32)[:, None]
    byte_H = tl.arange(0, H)
    column_H = 32 * (byte_H // 16) + byte_H % 16
    total_NM = tl.zeros((N, 16), tl.float32)
    first = tl.program_id(1) * slices_per_part * H
    end = tl.minimum(first + slices_per_part * H, bytes_per_row)
    row_of_bytes_N1 = output_N.to(tl.int64)[:, None] * bytes_per_row
    row_of_blocks_N1 = output_N.to(tl.int64)[:, None] * (bytes_per_row // 16)
    block_1D = tl.arange(0, H // 16)[None, :]
    # Single bytes cannot be fetched in the background, so those of the next slice are asked for one slice ahead.
    inside_ND = is_output_N[:, None] & (first // 16 + block_1D < bytes_per_row // 16)
    next_ND = tl.load(bytes_ptr + row_of_blocks_N1 + (first // 16 + block_1D), mask=inside_ND, other=0)
    for start in tl.range(first, end, H):
        is_byte_H = start + byte_H < bytes_per_row
        inside_NH = is_output_N[:, None] & is_byte_H[None, :]
        packed_NH = tl.load(packed_ptr + row_of_bytes_N1 + (start + byte_H)[None, :], mask=inside_NH, other=0)
        shift_ND = next_ND.to(tl.int32) - reference_N1 + 26
        inside_ND = is_output_N[:, None] & ((start + H) // 16 + block_1D < bytes_per_row // 16)
        next_ND = tl.load(bytes_ptr + row_of_blocks_N1 + ((start + H) // 16 + block_1D), mask=inside_ND, other=0)
        shift_ND = (tl.minimum(tl.maximum(shift_ND, 0), 26) * 4).to(tl.uint8)
        shift_NH = tl.reshape(tl.broadcast_to(shift_ND[:, :, None], (N, H // 16, 16)), (N, H))
        low_NH, high_NH = _lifted_codes(packed_NH, shift_NH, IS_INTERPRETED)
        place_MH = row_M[:, None] * (2 * bytes_per_row) + (2 * start + column_H)[None, :]
        inside_MH = is_row_M[:, None] & is_byte_H[None, :]
        x_low_MH = tl.load(x_ptr + place_MH, mask=inside_MH, other=0.0)
        x_high_MH = tl.load(x_ptr + place_MH + 16, mask=inside_MH, other=0.0)
        total_NM = tl.dot(low_NH, x_low_MH.T, total_NM, max_num_imprecise_acc=H)
        total_NM = tl.dot(high_NH, x_high_MH.T, total_NM, max_num_imprecise_acc=H)
    exponent_N1 = reference_N1 - 13  # byte minus 127 minus 13, plus 127
    scale_N1 = tl.where(exponent_N1 > 0, exponent_N1 << 23, 0).to(tl.float32, bitcast=True)
    x_scale_1M = tl.load(x_scales_ptr + row_M, mask=is_row_M, other=0.0)[None, :]
    y_NM = total_NM * x_scale_1M * scale_N1
    inside_NM = is_output_N[:, None] & is_row_M[None, :]
    place_NM = row_M[None, :] * num_outputs + output_N[:, None]
    if P == 1:
        tl.store(y_ptr + place_NM, y_NM.to(y_ptr.dtype.element_ty), mask=inside_NM)
    else:
        part_size = num_rows * num_outputs
        tl.store(parts_ptr + tl.program_id(1) * part_size + place_NM, y_NM, mask=inside_NM)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == P - 1:
            sum_NM = tl.load(parts_ptr + place_NM, mask=inside_NM, other=0.0, cache_modifier=".cg")
            for part in tl.static_range(1, P):
                sum_NM += tl.load(
                    parts_ptr + part * part_size + place_NM, mask=inside_NM, other=0.0, cache_modifier=".cg"
                )
            tl.store(y_ptr + place_NM, sum_NM.to(y_ptr.dtype.element_ty), mask=inside_NM)
            tl.store(counters_ptr + tl.program_id(0), 0)


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


@on_device_of
def matrix_rows_triton(
    x: Lifted,
    packed_NH: Tensor,
    scales_NB: Tensor,
    references_N: Tensor,
    counters: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    outputs: int = 128,
    slice_bytes: int = 128,
    parts: int = 4,
    num_warps: int = 8,
    num_stages: int = 3,
) -> Tensor:
    """Return ``lowered(x) decode(weight)^T``, (M, N) of `dtype`, for one to `MOST_ROWS` rows.

    x: lifted to E4M3, its blocks in halves. references_N: uint8, the largest scale byte of each row's blocks that hold a
    non-zero code. counters: int32 zeros, one per tile of outputs; they are zero again afterwards, and no two products may use
    them at the same time.

    Raises:
        ValueError: another number of rows.
    """
    num_rows = len(x.values_MK)
    if not 0 < num_rows <= MOST_ROWS:
        raise ValueError(f"{num_rows} rows; this product takes 1 to {MOST_ROWS}")
    num_outputs, bytes_per_row = packed_NH.shape
    y = torch.empty(num_rows, num_outputs, dtype=dtype, device=packed_NH.device)
    slices = triton.cdiv(bytes_per_row, slice_bytes)
    parts = min(parts, slices)
    partial = torch.empty(
        parts if parts > 1 else 0, num_rows, num_outputs, dtype=torch.float32, device=packed_NH.device
    )
    if num_outputs:
        _matrix_rows_kernel[(triton.cdiv(num_outputs, outputs), parts)](
            x.values_MK, x.scales_M, packed_NH, scales_NB, references_N, partial, counters, y,
            num_rows, num_outputs, bytes_per_row, triton.cdiv(slices, parts),
            N=outputs, H=slice_bytes, P=parts, IS_INTERPRETED=is_interpreted(_matrix_rows_kernel),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return y
