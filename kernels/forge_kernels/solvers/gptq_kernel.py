"""Triton kernel beside `forge_kernels.solvers.gptq.encode_panel_reference`: the channels of one panel, one after another.

Output features do not see each other, so each thread runs through the panel for its own: the loop that a matrix library cannot
do for us costs no launches and no memory traffic. Arithmetic in float64, as in the reference; a sum may be contracted with its
product, so that a value within 2^-50 of a tie may fall otherwise.

Legend: N output features, P = 32 channels of the panel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.formats import MXFP4
from forge_kernels.ops._device import inverse_scale_of_bytes, on_device_of, rounded, scale_of_bytes

_OUTPUTS = 32


@triton.jit
def _channel_of(tile_NP, index_1P, j):
    """Return channel j of a tile (N, P); in integers, because adding zeros there costs nothing."""
    own_NP = tl.where(index_1P == j, tile_NP.to(tl.int64, bitcast=True), 0)
    return tl.sum(own_NP, axis=1).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["column_stride"])
def _encode_panel_kernel(
    target_ptr, weight_ptr, scales_ptr, feedback_ptr, rounded_ptr, difference_ptr,
    num_outputs, feedback_stride, column_stride,
    P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # `column_stride` is 1. Were it known to be, loads would spread neighbours over threads by their own needs; as it is, the
    # first axis goes to threads, and each holds all channels of its output feature.
    index_1P = tl.arange(0, P)[None, :]
    output_N = tl.program_id(0) * N + tl.arange(0, N)
    is_inside_N = output_N < num_outputs
    place_NP = (output_N * column_stride)[:, None] + index_1P * num_outputs
    target_NP = tl.load(target_ptr + place_NP, mask=is_inside_N[:, None], other=0.0)
    weight_NP = tl.load(weight_ptr + place_NP, mask=is_inside_N[:, None], other=0.0)
    nothing_N1 = (output_N * 0)[:, None]
    for j in tl.static_range(P):
        row_N = j * num_outputs + output_N
        byte_N = tl.load(scales_ptr + row_N, mask=is_inside_N, other=0).to(tl.int32)
        scaled_N = _channel_of(target_NP, index_1P, j) * inverse_scale_of_bytes(byte_N).to(tl.float64)
        rounded_N = rounded(scaled_N.to(tl.float32))
        difference_N = _channel_of(weight_NP, index_1P, j) - (rounded_N * scale_of_bytes(byte_N)).to(tl.float64)
        tl.store(rounded_ptr + row_N, rounded_N, mask=is_inside_N)
        tl.store(difference_ptr + row_N, difference_N, mask=is_inside_N)
        # Read once for every thread, so that the channels stay where they are.
        feedback_NP = tl.load(feedback_ptr + j * feedback_stride + index_1P * column_stride + nothing_N1)
        target_NP += feedback_NP * difference_N[:, None]


@on_device_of
def encode_panel_triton(
    target_PN: Tensor,
    weight_PN: Tensor,
    scales_PN: Tensor,
    feedback_PP: Tensor,
    rounded_PN: Tensor,
    difference_PN: Tensor,
) -> None:
    """Do what `encode_panel_reference` says; all tensors have contiguous rows, and `target_PN` is left alone."""
    num_channels, num_outputs = target_PN.shape
    assert num_channels == MXFP4.block, "a weight has whole blocks, and a panel is as long as one"
    assert feedback_PP.stride(1) == 1
    assert all(part.is_contiguous() for part in (target_PN, weight_PN, scales_PN, rounded_PN, difference_PN))
    if num_outputs:
        _encode_panel_kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
            target_PN, weight_PN, scales_PN, feedback_PP, rounded_PN, difference_PN,
            num_outputs, feedback_PP.stride(0), 1, P=num_channels, N=_OUTPUTS, num_warps=1,
        )  # fmt: skip
