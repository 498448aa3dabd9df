"""Triton kernels beside `forge_kernels.ops.lift`: the FP8 operand of a product, in one pass.

From an activation, transformed and encoded on the way, or from packed codes.

A program holds whole rows, because the reference exponent of a row needs all of its blocks.

Legend: R rows of a tile, P blocks per row, padded to a power of two, tile (N = R P, J) as in `forge_kernels.ops._device`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.formats import E8M0
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
from forge_kernels.ops.lift import LIFT_ELEMENTS, Lifted, LiftElement, least_exact_shift
from forge_kernels.rules import SCALE_RULES, ScaleRule

MAX_COLUMNS = 32768
"""Longest row that one program holds."""
_LEAST_BLOCKS = 128
"""Blocks of a tile, at least: one for every thread."""


@triton.jit
def _blocks_of_rows(row_R, num_rows, blocks_per_row, R: tl.constexpr, P: tl.constexpr):
    """Return the numbers of the blocks of some rows, (R P,); for what pads them a number beyond the last."""
    block_P = tl.arange(0, P)
    inside_RP = (row_R < num_rows)[:, None] & (block_P < blocks_per_row)[None, :]
    return tl.reshape(
        tl.where(inside_RP, row_R[:, None] * blocks_per_row + block_P[None, :], num_rows * blocks_per_row), (R * P,)
    )


@triton.jit
def _power_of_two(exponent):
    """Return ``2^exponent`` in float32 for int32 exponents from -149 to 127."""
    normal = tl.maximum(exponent, -126)
    rest = exponent - normal
    return ((normal + 127) << 23).to(tl.float32, bitcast=True) * ((rest + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_words(ptr_N, word_N8, is_inside_N, N: tl.constexpr):
    """Store eight words of every block, four words apart, one after the other, so that a thread keeps its block."""
    for last in tl.static_range(2):
        word_N4 = tl.split(tl.reshape(word_N8, (N, 4, 2)))[last]
        for middle in tl.static_range(2):
            word_N2 = tl.split(tl.reshape(word_N4, (N, 2, 2)))[middle]
            for first in tl.static_range(2):
                word_N = tl.split(word_N2)[first]
                tl.store(ptr_N + 4 * (4 * first + 2 * middle + last), word_N, mask=is_inside_N)


@triton.jit
def _store_lifted(
    value_NJ, bytes_N, is_used_N, is_finite_N, block_N, row_R, values_ptr, scales_ptr, is_exact_ptr, num_rows,
    blocks_per_row, LARGEST_SHIFT: tl.constexpr, LEAST_SHIFT: tl.constexpr, SMALLEST_INVERSE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, FOR_FEW_ROWS: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    # One reduction tells both what the largest byte is and whether any block is not finite.
    largest_R = tl.max(tl.reshape(tl.where(is_finite_N, tl.where(is_used_N, bytes_N, 0), 256), (R, P)), axis=1)
    reference_R = largest_R & 255
    shift_RP = tl.reshape(bytes_N, (R, P)) - reference_R[:, None] + LARGEST_SHIFT
    power_RP = ((tl.minimum(tl.maximum(shift_RP, -64), LARGEST_SHIFT) + 127) << 23).to(tl.float32, bitcast=True)
    lifted_NJ = value_NJ * tl.reshape(power_RP, (R * P,))[:, None]
    if ROUNDS_FIRST:
        # The interpreter's conversion does not round, so nothing is left to it; the hardware's rounds to nearest even.
        units_NJ = lifted_NJ * SMALLEST_INVERSE
        units_NJ = tl.where(tl.abs(units_NJ) < 16.0, (units_NJ + 12582912.0) - 12582912.0, units_NJ)
        lifted_NJ = units_NJ * (1 / SMALLEST_INVERSE)
    scale_R = tl.where(largest_R < 256, _power_of_two(reference_R - (127 + LARGEST_SHIFT)), float("nan"))
    tl.store(scales_ptr + row_R, scale_R, mask=row_R < num_rows)
    small_NJ = lifted_NJ.to(values_ptr.dtype.element_ty)
    if FOR_FEW_ROWS:
        # Blocks that pad a row hold zeros, and those of its last span are stored, too.
        block_P = tl.arange(0, P)
        padded = (blocks_per_row + 7) // 8 * 8
        word_P = block_P // 8 * 64 + block_P % 2 * 32 + block_P % 8 // 2
        start_N = tl.reshape(row_R.to(tl.int64)[:, None] * (padded * 8) + word_P[None, :], (R * P,))
        inside_N = tl.reshape((row_R < num_rows)[:, None] & (block_P < padded)[None, :], (R * P,))
        byte_N84 = tl.reshape(small_NJ.to(tl.uint8, bitcast=True).to(tl.uint32), (R * P, 8, 4))
        word_N8 = tl.sum(byte_N84 << (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :], axis=2)
        _store_words(values_ptr.to(tl.pointer_type(tl.uint32)) + start_N, word_N8, inside_N, R * P)
    else:
        # Two stores of 16 bytes per block, so that a thread keeps its block.
        place_12H = tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        start_N11 = (block_N.to(tl.int64) * 32)[:, None, None]
        is_inside_N = block_N < num_rows * blocks_per_row
        tl.store(
            values_ptr + (start_N11 + place_12H), tl.reshape(small_NJ, (R * P, 2, 16)), mask=is_inside_N[:, None, None]
        )
        is_exact_RP = (shift_RP >= LEAST_SHIFT) | tl.reshape(is_used_N == 0, (R, P))
        tl.store(is_exact_ptr + row_R, tl.min(is_exact_RP.to(tl.int32), axis=1) > 0, mask=row_R < num_rows)


@triton.jit
def _encode_lifted_kernel(
    x_ptr, diagonal_ptr, values_ptr, scales_ptr, is_exact_ptr, num_rows, num_blocks, blocks_per_row, row_stride,
    RULE: tl.constexpr, HAS_DIAGONAL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    LARGEST_SHIFT: tl.constexpr, LEAST_SHIFT: tl.constexpr, SMALLEST_INVERSE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, FOR_FEW_ROWS: tl.constexpr, IS_FOLLOWED: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    if IS_FOLLOWED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    block_N = _blocks_of_rows(row_R, num_rows, blocks_per_row, R, P)
    x_NJ = load_blocks(x_ptr, diagonal_ptr, block_N, num_blocks, blocks_per_row, row_stride, HAS_DIAGONAL, N, C, E)
    if SIZE > 1:
        x_NJ = hadamard_tile(x_NJ, SIZE, NORM, N)
    bits_N = amax_bits(x_NJ, N, SIZE)
    bytes_N = scale_bytes(x_NJ, bits_N, RULE, N)
    inverse_N = inverse_scale_of_bytes(bytes_N)
    value_NJ = rounded(x_NJ * inverse_N[:, None])
    is_used_N = rounded(bits_N.to(tl.float32, bitcast=True) * inverse_N) > 0
    _store_lifted(
        value_NJ, bytes_N, is_used_N, bits_N < 0x7F800000, block_N, row_R,
        values_ptr, scales_ptr, is_exact_ptr, num_rows, blocks_per_row,
        LARGEST_SHIFT, LEAST_SHIFT, SMALLEST_INVERSE, ROUNDS_FIRST, FOR_FEW_ROWS, R, P,
    )  # fmt: skip


@triton.jit
def _lift_packed_kernel(
    packed_ptr, bytes_ptr, values_ptr, scales_ptr, is_exact_ptr, num_rows, blocks_per_row,
    LARGEST_SHIFT: tl.constexpr, LEAST_SHIFT: tl.constexpr, SMALLEST_INVERSE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    block_N = _blocks_of_rows(row_R, num_rows, blocks_per_row, R, P)
    is_inside_N = block_N < num_rows * blocks_per_row
    bytes_N = tl.load(bytes_ptr + block_N, mask=is_inside_N, other=0).to(tl.int32)
    place_NH = block_N.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed_NH = tl.load(packed_ptr + place_NH, mask=is_inside_N[:, None], other=0).to(tl.uint32)
    codes_NJ = tl.reshape(tl.join(packed_NH & 15, packed_NH >> 4), (R * P, 32))
    bits_NJ = ((codes_NJ & 7) << 22) | ((codes_NJ & 8) << 28)
    value_NJ = bits_NJ.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    _store_lifted(
        value_NJ, bytes_N, tl.max(packed_NH & 0x77, axis=1) > 0, bytes_N < 255, block_N, row_R,
        values_ptr, scales_ptr, is_exact_ptr, num_rows, blocks_per_row,
        LARGEST_SHIFT, LEAST_SHIFT, SMALLEST_INVERSE, ROUNDS_FIRST, False, R, P,
    )  # fmt: skip


@on_device_of
def encode_lifted_triton(
    x_MK: Tensor,
    scale_rule: ScaleRule,
    element: LiftElement = "e4m3",
    *,
    diagonal_K: Tensor | None = None,
    hadamard_size: int = 1,
    for_few_rows: bool = False,
) -> Lifted:
    """Return ``lift(encode(T x))`` of a 2-D tensor with contiguous rows; T as in `encode_packed_triton`.

    for_few_rows: lay values out as `few_rows_triton` reads them: rows are padded with zeros to spans of 256; of each span come
    the blocks of even number, then those of odd number, and of such four blocks the first four values of each, then the next
    four, and so on; `is_exact_M` stays empty. On a GPU the next kernel may start before this one ends, if it waits by itself.

    Nothing is checked but the length of the rows: rows with a NaN or an infinity get the scale NaN.

    Raises:
        ValueError: rows longer than `MAX_COLUMNS`.
    """
    num_columns = x_MK.shape[1]
    is_followed = for_few_rows and not is_interpreted(_encode_lifted_kernel)
    lifted = _empty_lifted(
        len(x_MK), 256 * triton.cdiv(num_columns, 256) if for_few_rows else num_columns, element, x_MK.device
    )
    if x_MK.numel():
        rows, padded = _rows_and_blocks(lifted.values_MK.shape[1])
        tile = tile_arguments(x_MK, rows * padded)
        num_blocks, blocks_per_row = x_MK.numel() // 32, x_MK.shape[1] // 32
        _encode_lifted_kernel[(triton.cdiv(len(x_MK), rows),)](
            x_MK, x_MK if diagonal_K is None else diagonal_K, lifted.values_MK, lifted.scales_M, lifted.is_exact_M,
            len(x_MK), num_blocks, blocks_per_row, x_MK.stride(0),
            RULE=SCALE_RULES.index(scale_rule), HAS_DIAGONAL=diagonal_K is not None, **hadamard_arguments(hadamard_size),
            **_lift_arguments(element), ROUNDS_FIRST=is_interpreted(_encode_lifted_kernel),
            FOR_FEW_ROWS=for_few_rows, IS_FOLLOWED=is_followed, R=rows, P=padded, **tile,
            num_warps=_num_warps(rows * padded), enable_fp_fusion=False,
            **({"launch_pdl": True} if is_followed else {}),
        )  # fmt: skip
    return replace(lifted, is_exact_M=lifted.is_exact_M[:0]) if for_few_rows else lifted


@on_device_of
def lift_packed_triton(packed_MH: Tensor, scales_MB: Tensor, element: LiftElement = "e4m3") -> Lifted:
    """Return the FP8 operand of packed codes (M, K / 2) and scale bytes (M, K / 32), both uint8 and contiguous.

    Rows with a scale byte 255 get the scale NaN.

    Raises:
        ValueError: rows longer than `MAX_COLUMNS`.
    """
    num_rows, blocks_per_row = scales_MB.shape
    lifted = _empty_lifted(num_rows, blocks_per_row * 32, element, packed_MH.device)
    if packed_MH.numel():
        rows, padded = _rows_and_blocks(blocks_per_row * 32)
        _lift_packed_kernel[(triton.cdiv(num_rows, rows),)](
            packed_MH, scales_MB, lifted.values_MK, lifted.scales_M, lifted.is_exact_M, num_rows, blocks_per_row,
            **_lift_arguments(element), ROUNDS_FIRST=is_interpreted(_lift_packed_kernel), R=rows, P=padded,
            num_warps=_num_warps(rows * padded), enable_fp_fusion=False,
        )  # fmt: skip
    return lifted


def _empty_lifted(num_rows: int, num_columns: int, element: LiftElement, device: torch.device) -> Lifted:
    if not 0 < num_columns <= MAX_COLUMNS:
        raise ValueError(
            f"cannot lift rows of {num_columns} elements at once, they are none or too long; at most {MAX_COLUMNS}"
        )
    return Lifted(
        values_MK=torch.empty(num_rows, num_columns, dtype=LIFT_ELEMENTS[element][1], device=device),
        scales_M=torch.empty(num_rows, dtype=torch.float32, device=device),
        is_exact_M=torch.empty(num_rows, dtype=torch.bool, device=device),
    )


def _lift_arguments(element: LiftElement) -> dict[str, float]:
    small, _, largest_shift = LIFT_ELEMENTS[element]
    return {
        "LARGEST_SHIFT": largest_shift,
        "LEAST_SHIFT": least_exact_shift(element),
        "SMALLEST_INVERSE": 1 / small.smallest,
    }


def _rows_and_blocks(num_columns: int) -> tuple[int, int]:
    """Return how many rows a tile holds and to how many blocks each is padded."""
    padded = triton.next_power_of_2(num_columns // 32)
    return max(1, _LEAST_BLOCKS // padded), padded


def _num_warps(blocks: int) -> int:
    """A block per thread, as far as a program may have threads."""
    return max(1, min(16, blocks // 32))


assert E8M0.bias == 127, "the kernels write it as a number"
