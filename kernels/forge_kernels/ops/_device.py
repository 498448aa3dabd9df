"""Device functions that the Triton kernels share: the arithmetic of `forge_kernels.ops._arithmetic` on tiles.

A tile of values has the axes (N, J): N blocks of 32. It is read in chunks of E neighbours, E as many as one 16-byte load brings:
Triton gives a thread the neighbours of a load, then deals out the blocks to threads. With as many blocks as threads each holds
whole blocks, and maxima, butterflies and packing stay within its registers.

Every kernel that uses these must be launched with ``enable_fp_fusion=False``: a product that is rounded before it is added would
otherwise be contracted into one operation, and its last bit would differ from the reference. Where a single rounding is meant,
`tl.fma` says so.

Values are rounded by an addition: with p the power of two at or below max(|y|, 1) and c = 1.5 2^22, the sum ``y + p c`` has
p / 2 as the unit of its last place, which is the spacing of E2M1 values from p on. A rounded value times 2^-126 is a float32
whose sign is its first bit and whose bits from 22 on are the code: E2M1's subnormal 0.5 becomes a subnormal of float32.

Legend: N blocks, J = 32 elements of a block, C chunks of E elements, C E = 32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

EVEN = tl.constexpr(0)
RCEIL = tl.constexpr(2)
SEARCH = tl.constexpr(3)
"""Indices of `SCALE_RULES`."""


def on_device_of(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function that launches kernels run with the device of its first tensor as the current one, where Triton launches."""

    @wraps(function)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        first = next((part for part in arguments if isinstance(part, torch.Tensor)), None)
        with torch.cuda.device_of(first):
            return function(*arguments, **named)

    return run


def is_interpreted(kernel: Any) -> bool:
    """Return whether a kernel runs in Triton's interpreter, which has no inline assembly and does not round casts."""
    return not isinstance(kernel, triton.JITFunction)


@triton.jit
def widen(x):
    """Return float32 values of float32, float16 or bfloat16 ones; the interpreter's own cast loses bfloat16 subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return float32 values, which `dtype` must be able to hold exactly, in `dtype`."""
    if dtype == tl.bfloat16:
        return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _halves(values, N: tl.constexpr, WIDTH: tl.constexpr):
    """Return the first and the second half of each of N rows, (N, WIDTH) each."""
    return tl.split(tl.permute(tl.reshape(values, (N, 2, WIDTH)), (0, 2, 1)))


@triton.jit
def _larger_halves(values, N: tl.constexpr, WIDTH: tl.constexpr):
    low, high = _halves(values, N, WIDTH)
    return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(x_NJ, N: tl.constexpr, SIZE: tl.constexpr):
    """Return the bits of the largest magnitude of each block, (N,) int32: above 0x7F7FFFFF where one is not finite.

    SIZE: of the Hadamard transform before it; anything above 64 after a matrix product.
    """
    if SIZE <= 64:
        # Triton may ask for the result in two layouts. As a tree it is the same in both and made once; where a large transform
        # goes through shared memory before it, a tree would have that done twice.
        amax = _larger_halves(tl.abs(x_NJ), N, 16)
        amax = _larger_halves(amax, N, 8)
        amax = _larger_halves(amax, N, 4)
        amax = _larger_halves(amax, N, 2)
        return tl.reshape(_larger_halves(amax, N, 1), (N,)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return tl.max(x_NJ.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def scale_bytes_of_amax(bits, RULE: tl.constexpr, RAISED_BY: tl.constexpr):
    """Return the int32 scale byte for the bits of each block maximum; "search" is taken as "floor"."""
    if RULE == EVEN:
        bits += 0x00200000
    if RULE == RCEIL:
        bits += 0x003FFFFF
    return tl.minimum(tl.maximum((bits >> 23) + (RAISED_BY - 2), 0), 252)


@triton.jit
def inverse_scale_of_bytes(scales):
    """Return ``2^(127 - b)`` in float32 for int32 bytes in 0..254."""
    return tl.maximum((254 - scales) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_bytes(scales):
    """Return ``2^(b - 127)`` in float32 for int32 bytes in 0..254."""
    return tl.maximum(scales << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def rounded_up_to_8(y):
    """Return float32 values, |y| < 8, rounded to the E2M1 grid or to 8, in units of their scale; never minus zero."""
    power_bits = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    power = power_bits.to(tl.float32, bitcast=True)
    return tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, y))


@triton.jit
def rounded(y):
    """Return float32 values rounded to the E2M1 grid, in units of their scale, and beyond it to 6; never minus zero."""
    return rounded_up_to_8(tl.minimum(tl.maximum(y, -6.0), 6.0))


@triton.jit
def packed_codes(value_NJ, N: tl.constexpr):
    """Return the codes of values from `rounded_up_to_8` as the bytes of each block, (N, 16) uint8, code 2j in the low nibble.

    8, which the rules leave only to values between 7 and 8, becomes 6.
    """
    bits_NJ = (value_NJ * 1.1754943508222875e-38).to(tl.uint32, bitcast=True)  # 2^-126
    even_NH, odd_NH = tl.split(tl.reshape(bits_NJ, (N, 16, 2)))
    both_NH = (even_NH >> 22) | (odd_NH >> 18)  # magnitudes in bits 0 to 3 and 4 to 7, signs in bits 9 and 13
    eights_NH = both_NH & 0x88
    magnitudes_NH = both_NH | (eights_NH - (eights_NH >> 3))
    return ((magnitudes_NH & 0x77) | ((both_NH >> 6) & 0x88)).to(tl.uint8)


@triton.jit
def _halves_added(values, N: tl.constexpr, WIDTH: tl.constexpr):
    low, high = _halves(values, N, WIDTH)
    return low + high


@triton.jit
def sum_of_block(values_NJ, N: tl.constexpr):
    """Return the sum of each block, (N,): halves added, the tree of the reference."""
    values = _halves_added(values_NJ, N, 16)
    values = _halves_added(values, N, 8)
    values = _halves_added(values, N, 4)
    values = _halves_added(values, N, 2)
    return tl.reshape(_halves_added(values, N, 1), (N,))


@triton.jit
def scale_bytes(x_NJ, bits_N, RULE: tl.constexpr, N: tl.constexpr):
    """Return the int32 scale bytes (N,) of float32 blocks whose `amax_bits` are `bits_N`."""
    bytes_N = scale_bytes_of_amax(bits_N, RULE, 0)
    if RULE == SEARCH:
        high_N = scale_bytes_of_amax(bits_N, RULE, 1)
        y_NJ = x_NJ * inverse_scale_of_bytes(bytes_N)[:, None]
        is_higher_N = high_N > bytes_N
        up_N1 = tl.where(is_higher_N, 2.0, 1.0)[:, None]
        down_N1 = tl.where(is_higher_N, 0.5, 1.0)[:, None]
        low_error = rounded(y_NJ) - y_NJ
        high_error = rounded(y_NJ * down_N1) * up_N1 - y_NJ
        is_raised_N = sum_of_block(high_error * high_error, N) < sum_of_block(low_error * low_error, N)
        bytes_N = tl.where(is_raised_N, high_N, bytes_N)
    return bytes_N


@triton.jit
def stored_bytes(bytes_N, bits_N):
    """Return scale bytes as uint8; 255, which is NaN, for blocks whose `amax_bits` say that something is not finite."""
    return tl.where(bits_N < 0x7F800000, bytes_N, 255).to(tl.uint8)


@triton.jit
def _butterfly(x, PAIRS: tl.constexpr, HALF: tl.constexpr):
    low, high = _halves(x, PAIRS, HALF)
    return tl.permute(tl.join(low + high, low - high), (0, 2, 1))


@triton.jit
def hadamard_tile(x_NJ, SIZE: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr):
    """Return the normalized transform of each run of SIZE elements; runs longer than a block take neighbouring blocks.

    Butterflies from neighbours outwards, then one product with `NORM`, ``1 / sqrt(SIZE)`` in float32.
    """
    x = x_NJ
    for stage in tl.static_range(9):
        if (1 << stage) < SIZE:
            x = tl.reshape(_butterfly(x, N * 16 >> stage, 1 << stage), (N, 32))
    return x * NORM


@triton.jit
def _chunk(ptr, start_N, inside_N1, other, chunk: tl.constexpr, E: tl.constexpr):
    return tl.load(ptr + (start_N[:, None] + (chunk * E + tl.arange(0, E))[None, :]), mask=inside_N1, other=other)


@triton.jit
def side_by_side(left, right, N: tl.constexpr, WIDTH: tl.constexpr):
    """Return (N, 2 WIDTH) from two (N, WIDTH)."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (N, 2 * WIDTH))


@triton.jit
def _four_chunks(ptr, start_N, inside_N1, other, first: tl.constexpr, E: tl.constexpr):
    """Return four neighbouring chunks of each block, (N, 4 E)."""
    N: tl.constexpr = start_N.shape[0]
    low = side_by_side(
        _chunk(ptr, start_N, inside_N1, other, first, E), _chunk(ptr, start_N, inside_N1, other, first + 1, E), N, E
    )
    high = side_by_side(
        _chunk(ptr, start_N, inside_N1, other, first + 2, E),
        _chunk(ptr, start_N, inside_N1, other, first + 3, E),
        N,
        E,
    )
    return side_by_side(low, high, N, 2 * E)


@triton.jit
def load_blocks(
    x_ptr, diagonal_ptr, block_N, num_blocks, blocks_per_row, row_stride,
    HAS_DIAGONAL: tl.constexpr, N: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Return float32 values of the blocks `block_N`, numbered through all rows, times the diagonal of their columns.

    Blocks from `num_blocks` on are zero.
    """
    row_N = block_N // blocks_per_row
    column_N = (block_N % blocks_per_row) * 32
    start_N = row_N.to(tl.int64) * row_stride + column_N
    inside_N1 = (block_N < num_blocks)[:, None]
    # One load per chunk: how Triton deals a third axis to threads differs between its versions.
    if C == 4:
        x_NJ = _four_chunks(x_ptr, start_N, inside_N1, 0.0, 0, E)
    else:
        first = _four_chunks(x_ptr, start_N, inside_N1, 0.0, 0, E)
        x_NJ = side_by_side(first, _four_chunks(x_ptr, start_N, inside_N1, 0.0, 4, E), N, 16)
    x_NJ = widen(x_NJ)
    if HAS_DIAGONAL:
        first = _four_chunks(diagonal_ptr, column_N, inside_N1, 1.0, 0, 4)
        x_NJ *= side_by_side(first, _four_chunks(diagonal_ptr, column_N, inside_N1, 1.0, 4, 4), N, 16)
    return x_NJ
