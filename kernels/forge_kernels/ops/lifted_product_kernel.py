"""Triton kernel: the product of two lifted operands, with scales, bias and low-rank branch in its epilogue.

    y_mn = s_m t_n sum_k a_mk b_nk + bias_n + sum_r u_mr v_nr

A tile of the output is summed on the matrix units over slices of K. Hopper adds FP8 products in fewer bits than float32 has; with
fp32 accumulation every slice starts from zero and is added to the tile's float32 sums by the ordinary units.

Legend: M rows, N output features, K inputs, R rank of the branch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forge_kernels.ops.lift import Lifted

_GROUP = 8
"""Row tiles that are walked together, so that the operands they share stay in the L2 cache."""


@triton.jit
def _lifted_product_kernel(
    a_descriptor, b_descriptor, a_scales_ptr, b_scales_ptr, bias_ptr, u_ptr, v_ptr, y_ptr, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, IS_FAST: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, M)
    tiles_per_group = GROUP * tl.cdiv(num_outputs, N)
    first_row_tile = (tile // tiles_per_group) * GROUP
    group_rows = tl.minimum(num_row_tiles - first_row_tile, GROUP)
    first_row = (first_row_tile + (tile % tiles_per_group) % group_rows) * M
    first_output = ((tile % tiles_per_group) // group_rows) * N
    sum_MN = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, num_inputs, K):
        a_MK = a_descriptor.load([first_row, start])
        b_NK = b_descriptor.load([first_output, start])
        if IS_FAST:
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN)
        else:
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN, max_num_imprecise_acc=K)
    row_M = first_row + tl.arange(0, M)
    output_N = first_output + tl.arange(0, N)
    is_row_M = row_M < num_rows
    is_output_N = output_N < num_outputs
    a_scale_M = tl.load(a_scales_ptr + row_M, mask=is_row_M, other=0.0)
    b_scale_N = tl.load(b_scales_ptr + output_N, mask=is_output_N, other=0.0)
    y_MN = sum_MN * a_scale_M[:, None] * b_scale_N[None, :]
    if HAS_BIAS:
        y_MN += tl.load(bias_ptr + output_N, mask=is_output_N, other=0.0)[None, :]
    if RANK > 0:
        rank_R = tl.arange(0, R)
        is_rank_1R = (rank_R < RANK)[None, :]
        u_MR = tl.load(u_ptr + row_M[:, None] * RANK + rank_R[None, :], mask=is_row_M[:, None] & is_rank_1R, other=0.0)
        v_NR = tl.load(
            v_ptr + output_N[:, None] * RANK + rank_R[None, :], mask=is_output_N[:, None] & is_rank_1R, other=0.0
        )
        y_MN += tl.dot(u_MR, v_NR.T, input_precision="tf32x3")
    place_MN = row_M.to(tl.int64)[:, None] * num_outputs + output_N[None, :]
    tl.store(y_ptr + place_MN, y_MN.to(y_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_output_N[None, :])


def lifted_product_triton(
    a: Lifted,
    b: Lifted,
    *,
    bias_N: Tensor | None = None,
    branch: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    is_fast: bool = False,
) -> Tensor:
    """Return ``a b^T`` plus bias and branch, (M, N) of `dtype`.

    bias_N: float32. branch: (u_MR, v_NR), float32 and contiguous. `is_fast` leaves all sums to the matrix units.
    """
    num_rows, num_inputs = a.values_MK.shape
    num_outputs = len(b.values_MK)
    y = torch.empty(num_rows, num_outputs, dtype=dtype, device=a.values_MK.device)
    m, n, k, num_stages = (128, 256, 64, 4) if is_fast else (128, 256, 128, 3)
    n = min(n, max(16, triton.next_power_of_2(num_outputs)))
    u, v = branch if branch is not None else (a.scales_M, b.scales_M)
    rank = u.shape[1] if branch is not None else 0
    grid = (triton.cdiv(num_rows, m) * triton.cdiv(num_outputs, n),)
    if y.numel():
        with torch.cuda.device_of(y):
            _lifted_product_kernel[grid](
                TensorDescriptor.from_tensor(a.values_MK, [m, k]), TensorDescriptor.from_tensor(b.values_MK, [n, k]),
                a.scales_M, b.scales_M, b.scales_M if bias_N is None else bias_N, u, v, y, num_rows, num_outputs, num_inputs,
                HAS_BIAS=bias_N is not None, RANK=rank, R=max(16, triton.next_power_of_2(rank)), IS_FAST=is_fast, GROUP=_GROUP,
                M=m, N=n, K=k, num_stages=num_stages, num_warps=8,
            )  # fmt: skip
    return y
