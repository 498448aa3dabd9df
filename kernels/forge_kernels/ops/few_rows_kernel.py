"""A kernel in Gluon, Triton's language of layouts: 2 to 16 encoded rows times a packed MXFP4 weight, read as it is stored.

Reading the weight, 4.25 bits per element, is what such a product costs; all else has to hide behind it. Both operands are E5M2:
the rows from `encode_lifted_triton`, the weight's codes lifted in registers, from where Hopper's matrix units take them. With the
row's largest scale byte as reference, E2M1 values times 2^d are normal numbers of E5M2 for d from -13 to 13: 27 octaves.

Nothing of the weight moves between threads. Of every 32 inputs the matrix units want bytes 4 q to 4 q + 3 and 16 + 4 q to 19 +
4 q from thread q of four. Which inputs these are is free, as long as both operands agree. So of every span of 256 inputs thread q
takes blocks 2 q and 2 q + 1, which lie side by side, one after the other, eight codes per instruction; four threads read whole
lines of memory, and the rows are laid out to match.

Inputs are cut into parts for more programs to work on; the last one to finish adds the parts up, in order, so that the result
repeats. Every 128 inputs the matrix units' sums, which keep few bits, are added to float32.

Legend: M rows padded to 8 or 16, N outputs of a tile, dealt to W warps as 2 times 8 each (R, G), Q = 4 threads that share them,
H = 16 bytes of a block, K = 128 inputs of a step, T steps of a part, P parts.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from forge_kernels.ops._device import on_device_of
from forge_kernels.ops.lift import Lifted

MOST_ROWS = 16
EXACT_OCTAVES = 26
"""Largest difference of exponents in a weight's row that the kernel holds."""
_STEP = 128
_STEPS = (16, 8, 4)
_WARPS_PER_PROCESSOR = 12
"""Warps that hide the memory's latency; shorter parts are taken for smaller weights until there are as many."""
# Triton renamed it after 3.6, and left the old name in place to say so.
_copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _lifted_codes(packed, low, high, forties):
    """Return E5M2 values of codes 0 to 3 and of codes 4 to 7 of every four bytes.

    low, high: int32 tables of four bytes, the negative values of magnitudes 0 to 3 and 4 to 7. forties: 0x40404040. prmt looks
    up a nibble's low three bits, and gives copies of the byte's high bit where the nibble's own high bit is set. So the lookup in
    `forties` by whole codes gives 0x40 for positive ones and 0 for negative ones, and twice that, taken off, clears the sign.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 magnitudes, codes, values, positives;
        and.b32 magnitudes, $2, 0x77777777;
        prmt.b32 values, $3, $7, magnitudes;
        prmt.b32 positives, $11, $11, $2;
        mad.lo.u32 $0, positives, 0xFFFFFFFE, values;
        shr.u32 magnitudes, magnitudes, 16;
        shr.u32 codes, $2, 16;
        prmt.b32 values, $3, $7, magnitudes;
        prmt.b32 positives, $11, $11, codes;
        mad.lo.u32 $1, positives, 0xFFFFFFFE, values;
        }
        """,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [packed, low, high, forties],
        dtype=(gl.float8e5, gl.float8e5),
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _forties(any_int32):
    """Return 0x40404040, by a way that no compiler sees through: it would write the constant down again before every use."""
    return gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 8; add.u32 $0, $0, 0x40404040;", "=r,r", [any_int32], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _order(instruction: gl.constexpr, W: gl.constexpr):
    """Emit an instruction that no access to memory may be moved across."""
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    gl.inline_asm_elementwise(
        instruction + " mov.u32 $0, $1;",
        "=r,r,~{memory}",
        [gl.arange(0, 32 * W, layout=one_each)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch(ptr, W: gl.constexpr):
    """Ask for a line of memory that is wanted later."""
    thread = gl.arange(0, 32 * W, layout=gl.BlockedLayout([1], [32], [W], [0]))
    gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.s32 first, $2, 0; @first prefetch.global.L2 [$1]; mov.u32 $0, $2; }",
        "=r,l,r",
        [(ptr + thread * 0).to(gl.int64, bitcast=True), thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_step(packed_ptrs, byte_ptrs, blocks_left, step: gl.constexpr, IS_EVEN: gl.constexpr):
    """Load one block per thread, and its scale byte: the first or the second block of a span."""
    block: gl.constexpr = step // 2 * 8 + step % 2
    if IS_EVEN:
        packed = gl.load(packed_ptrs + block * 16, eviction_policy="evict_first")
        return packed, gl.load(byte_ptrs + block)
    else:
        is_inside = blocks_left > block
        packed = gl.load(
            packed_ptrs + block * 16, mask=gl.expand_dims(is_inside, 4), other=0, eviction_policy="evict_first"
        )
        return packed, gl.load(byte_ptrs + block, mask=is_inside, other=0)


@gluon.jit
def _few_rows_kernel(
    x_ptr, x_scales_ptr, packed_ptr, bytes_ptr, references_ptr, parts_ptr, counters_ptr, y_ptr,
    num_rows, num_outputs, blocks_per_row,
    M: gl.constexpr, W: gl.constexpr, T: gl.constexpr, P: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
    IS_EVEN: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = 16 * W
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, M, 32])
    lifted: gl.constexpr = gl.DotOperandLayout(0, product, 4)
    held: gl.constexpr = gl.BlockedLayout([1, 2, 1, 1, 16], [1, 1, 8, 4, 1], [W, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    held_blocks: gl.constexpr = gl.SliceLayout(4, held)
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [W, 1], [1, 0])
    copied_lines: gl.constexpr = gl.SliceLayout(1, copied)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    # Parts of the same outputs run side by side, so that what they read of a row is read at about the same time.
    tile = gl.program_id(0) // P
    part = gl.program_id(0) % P
    first_step = part * T
    steps_per_row = (blocks_per_row + 7) // 8 * 2

    output_WRG1 = gl.set_auto_layout((tile * N + gl.arange(0, N)).reshape((W, 2, 8, 1)), held_blocks)
    block_111Q = gl.expand_dims(gl.expand_dims(gl.arange(0, 4)[None, :] * 2, 0), 0)
    block_111Q = gl.set_auto_layout(block_111Q, held_blocks)
    byte_H = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 16)[None, :], 0), 0), 0)
    byte_H = gl.set_auto_layout(byte_H, held)
    block_WRGQ = output_WRG1.to(gl.int64) * blocks_per_row + (block_111Q + first_step * 4)
    byte_ptrs = bytes_ptr + block_WRGQ
    packed_ptrs = packed_ptr + (gl.expand_dims(block_WRGQ, 4) * 16 + byte_H)
    if IS_EVEN:
        left_WRGQ = 0
        reference_WRG1 = gl.load(references_ptr + output_WRG1).to(gl.int32)
    else:
        left_WRGQ = gl.where(output_WRG1 < num_outputs, blocks_per_row - first_step * 4 - block_111Q, 0)
        reference_WRG1 = gl.load(references_ptr + output_WRG1, mask=output_WRG1 < num_outputs, other=0).to(gl.int32)
    forties_WRG1 = _forties(reference_WRG1)
    # One octave is 4 in a byte. Magnitude 0 keeps its byte whatever the scale, so blocks of zeros may have any.
    low_WRG1 = (26 - reference_WRG1) * 0x04040400 - 0x75777B80  # bytes 8A, 88, 84, 80: -1.5, -1, -0.5, -0
    high_WRG1 = (26 - reference_WRG1) * 0x04040404 - 0x6D6F7174  # bytes 92, 90, 8E, 8C: -6, -4, -3, -2

    rows = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [T * M, 128], shared)
    row_TM = gl.arange(0, M)[None, :]
    step_TM = first_step + gl.arange(0, T)[:, None]
    start_TM, inside_TM = gl.broadcast(
        (row_TM * steps_per_row + step_TM) * 128, (row_TM < num_rows) & (step_TM < steps_per_row)
    )
    start = gl.set_auto_layout(gl.multiple_of(start_TM.reshape((T * M,)), 128), copied_lines)  # lost in reshaping
    inside = gl.set_auto_layout(inside_TM.reshape((T * M,)), copied_lines)
    place = start[:, None] + gl.arange(0, 128, layout=gl.SliceLayout(0, copied))[None, :]
    place, inside = gl.broadcast(place, inside[:, None])

    packed_ahead = ()
    bytes_ahead = ()
    for step in gl.static_range(EARLY):
        packed, scale_bytes = _load_step(packed_ptrs, byte_ptrs, left_WRGQ, step, IS_EVEN)
        packed_ahead = packed_ahead + (packed,)
        bytes_ahead = bytes_ahead + (scale_bytes,)
    _fetch(counters_ptr + tile, W)
    # The weight was there long before; the rows come from the kernel before this one. What is asked for before them delays them
    # and the kernel that makes them; what is asked for after them keeps the memory busy until they are here.
    _order("griddepcontrol.wait;", W)
    _copy_async(rows, x_ptr + place, mask=inside)
    async_copy.commit_group()
    for step in gl.static_range(EARLY, AHEAD):
        packed, scale_bytes = _load_step(packed_ptrs, byte_ptrs, left_WRGQ, step, IS_EVEN)
        packed_ahead = packed_ahead + (packed,)
        bytes_ahead = bytes_ahead + (scale_bytes,)
    async_copy.wait_group(0)
    fence_async_shared()
    _order("bar.sync 0;", W)

    output_N1 = tile * N + gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, product)), 1)
    row_1M = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(0, product)), 0)
    is_output_N1, is_row_1M = output_N1 < num_outputs, row_1M < num_rows
    x_scale_1M = gl.load(x_scales_ptr + row_1M, mask=is_row_1M, other=0.0)
    reference_N1 = gl.load(references_ptr + output_N1, mask=is_output_N1, other=0)
    exponent_N1 = reference_N1.to(gl.int32) - 13  # byte minus 127 minus 13, plus 127
    scale_N1 = gl.where(exponent_N1 > 0, exponent_N1 << 23, 0).to(gl.float32, bitcast=True)

    zero_NM = gl.full((N, M), 0.0, gl.float32, product)
    sum_NM = zero_NM
    for step in gl.static_range(T):
        packed_WRGQH, byte_WRGQ = packed_ahead[0], bytes_ahead[0]
        packed_ahead = packed_ahead[1:]
        bytes_ahead = bytes_ahead[1:]
        if step + AHEAD < T:
            packed, scale_bytes = _load_step(packed_ptrs, byte_ptrs, left_WRGQ, step + AHEAD, IS_EVEN)
            packed_ahead = packed_ahead + (packed,)
            bytes_ahead = bytes_ahead + (scale_bytes,)
        # Without it loads sink to where their values are wanted, and every step waits for the memory.
        _order("bar.warp.sync 0xffffffff;", W)
        low_WRGQ = byte_WRGQ.to(gl.int32) * 0x04040400 + low_WRG1
        high_WRGQ = byte_WRGQ.to(gl.int32) * 0x04040404 + high_WRG1
        packed_WRGQH, low_WRGQH = gl.broadcast(packed_WRGQH, gl.expand_dims(low_WRGQ, 4))
        packed_WRGQH, high_WRGQH = gl.broadcast(packed_WRGQH, gl.expand_dims(high_WRGQ, 4))
        packed_WRGQH, forties_WRGQH = gl.broadcast(packed_WRGQH, gl.expand_dims(forties_WRG1, 4))
        first, second = _lifted_codes(packed_WRGQH, low_WRGQH, high_WRGQH, forties_WRGQH)
        # Axes W, R, G, Q, word, code of four, half. An instruction takes a word: its halves, each with four codes of all blocks.
        lifted_WRGQ = gl.join(first, second).reshape((W, 2, 8, 4, 4, 4, 2))
        weight_NK = lifted_WRGQ.permute((0, 1, 2, 4, 6, 3, 5)).reshape((N, 128))
        weight_NK = gl.convert_layout(weight_NK, lifted, assert_trivial=True)
        sum_NM += warpgroup_mma(weight_NK, rows.slice(step * M, M).permute((1, 0)), zero_NM, use_acc=False)

    y_NM = sum_NM * x_scale_1M * scale_N1
    y_ptrs = y_ptr + (row_1M * num_outputs + output_N1)
    if P == 1:
        gl.store(y_ptrs, y_NM.to(y_ptr.dtype.element_ty), mask=is_row_1M & is_output_N1)
    else:
        part_ptrs = parts_ptr + ((output_N1 + tile * ((P - 1) * N)) * M + row_1M)
        gl.store(part_ptrs + part * (N * M), y_NM)
        # The next kernel may start; it waits for this one's end before it reads or writes what this one does.
        _order("bar.sync 0; griddepcontrol.launch_dependents;", W)
        arrived = gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived == P - 1:
            y_NM = gl.load(part_ptrs, cache_modifier=".cg")
            for other in gl.static_range(1, P):
                y_NM += gl.load(part_ptrs + other * (N * M), cache_modifier=".cg")
            gl.store(y_ptrs, y_NM.to(y_ptr.dtype.element_ty), mask=is_row_1M & is_output_N1)
            gl.store(counters_ptr + tile, 0)


@on_device_of
def few_rows_triton(
    x: Lifted,
    packed_NH: Tensor,
    scales_NB: Tensor,
    references_N: Tensor,
    counters: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``lowered(x) decode(weight)^T``, (M, N) of `dtype`, for one to `MOST_ROWS` rows, on Hopper.

    x: lifted to E5M2 by the kernel launched last, ``encode_lifted_triton(..., for_few_rows=True)``. packed_NH: contiguous uint8.
    references_N: uint8, the largest scale byte of each row's blocks that hold a non-zero code; the others of these are at most
    `EXACT_OCTAVES` less. counters: int32 zeros, one per 64 outputs; they are zero again afterwards, and no two products may use
    them at the same time.

    Raises:
        ValueError: another number of rows.
    """
    num_rows, padded_inputs = x.values_MK.shape
    if not 0 < num_rows <= MOST_ROWS:
        raise ValueError(f"{num_rows} rows; this product takes 1 to {MOST_ROWS}")
    num_outputs, blocks_per_row = scales_NB.shape
    y = torch.empty(num_rows, num_outputs, dtype=dtype, device=packed_NH.device)
    if num_outputs == 0:
        return y
    rows, warps = (8, 4) if num_rows <= 8 else (16, 8)
    tiles = triton.cdiv(num_outputs, 16 * warps)
    wanted = _WARPS_PER_PROCESSOR * torch.cuda.get_device_properties(y.device).multi_processor_count
    steps = next(
        (steps for steps in _STEPS if tiles * warps * (padded_inputs // (_STEP * steps)) >= wanted), _STEPS[-1]
    )
    parts = triton.cdiv(padded_inputs, _STEP * steps)
    sums = torch.empty(tiles * parts * 16 * warps * rows if parts > 1 else 0, dtype=torch.float32, device=y.device)
    _few_rows_kernel[(tiles * parts,)](
        x.values_MK, x.scales_M, packed_NH, scales_NB, references_N, sums, counters, y, num_rows, num_outputs, blocks_per_row,
        M=rows, W=warps, T=steps, P=parts, EARLY=2, AHEAD=3,
        IS_EVEN=num_outputs % (16 * warps) == 0 and blocks_per_row % (4 * steps) == 0, num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return y
