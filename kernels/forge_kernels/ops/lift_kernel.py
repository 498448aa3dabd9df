"""Triton kernel beside `forge_kernels.ops.lift`: an activation, from bf16 to the FP8 operand of a product, in one pass.

A program holds whole rows, because the reference exponent of a row needs all of its blocks. What lies below the range of FP8 is
rounded here, by an addition: the conversion that follows is exact, on hardware and in the interpreter alike.

Legend: R rows and C columns of a tile (C all columns, padded to a power of two), B = C / 32 blocks, J = 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.ops.encode_kernel import inverse_scale_of_bytes, rounded, scale_bytes, widen
from forge_kernels.ops.lift import LIFT_ELEMENTS, Lifted, LiftElement
from forge_kernels.rules import SCALE_RULES, ScaleRule

MAX_COLUMNS = 32768
"""Longest row that one program holds."""


@triton.jit
def _lift_kernel(
    x_ptr, values_ptr, exponents_ptr, is_exact_ptr, num_rows, num_columns, row_stride,
    RULE: tl.constexpr, LARGEST_SHIFT: tl.constexpr, SMALLEST_INVERSE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = C // 32
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_C = tl.arange(0, C)
    inside_RC = (row_R < num_rows)[:, None] & (column_C < num_columns)[None, :]
    x_RC = widen(tl.load(x_ptr + row_R[:, None] * row_stride + column_C[None, :], mask=inside_RC, other=0.0))
    x_RBJ = tl.reshape(x_RC, (R, B, 32))
    bytes_RB = scale_bytes(x_RBJ, RULE, R, B)
    value_RBJ = rounded(x_RBJ * inverse_scale_of_bytes(bytes_RB)[:, :, None])
    exponent_RB = bytes_RB - 127
    is_used_RB = tl.max(tl.abs(value_RBJ), axis=2) > 0
    reference_R = tl.max(tl.where(is_used_RB, exponent_RB, -127), axis=1)
    shift_RB = tl.minimum(tl.maximum(exponent_RB - reference_R[:, None] + LARGEST_SHIFT, -64), LARGEST_SHIFT)
    power_RB = ((shift_RB + 127) << 23).to(tl.float32, bitcast=True)
    lifted_RC = tl.reshape(value_RBJ * power_RB[:, :, None], (R, C))
    # Above the smallest subnormal every value has at most one bit behind the leading one, which FP8 holds.
    units_RC = lifted_RC * SMALLEST_INVERSE
    whole_RC = tl.where(tl.abs(units_RC) < 16.0, (units_RC + 12582912.0) - 12582912.0, units_RC)
    is_rounded_RC = units_RC != whole_RC
    tl.store(exponents_ptr + row_R, reference_R - LARGEST_SHIFT, mask=row_R < num_rows)
    tl.store(is_exact_ptr + row_R, tl.max(is_rounded_RC.to(tl.int32), axis=1) == 0, mask=row_R < num_rows)
    tl.store(
        values_ptr + row_R[:, None] * num_columns + column_C[None, :],
        (whole_RC * (1 / SMALLEST_INVERSE)).to(values_ptr.dtype.element_ty),
        mask=inside_RC,
    )


def encode_lifted_triton(x_MK: Tensor, scale_rule: ScaleRule, element: LiftElement = "e4m3") -> Lifted:
    """Return ``lift(encode(x))`` of a 2-D tensor with contiguous rows.

    Nothing is checked but the length of the rows: blocks with a NaN or an infinity give some values.

    Raises:
        ValueError: rows longer than `MAX_COLUMNS`.
    """
    num_rows, num_columns = x_MK.shape
    if not 0 < num_columns <= MAX_COLUMNS:
        raise ValueError(
            f"cannot lift rows of {num_columns} elements at once, they are none or too long; at most {MAX_COLUMNS}"
        )
    small, dtype, largest_shift = LIFT_ELEMENTS[element]
    lifted = Lifted(
        values_MK=torch.empty(num_rows, num_columns, dtype=dtype, device=x_MK.device),
        exponents_M=torch.empty(num_rows, dtype=torch.int32, device=x_MK.device),
        is_exact_M=torch.empty(num_rows, dtype=torch.bool, device=x_MK.device),
    )
    if x_MK.numel():
        width = triton.next_power_of_2(num_columns)
        rows = max(1, 4096 // width)
        _lift_kernel[(triton.cdiv(num_rows, rows),)](
            x_MK, lifted.values_MK, lifted.exponents_M, lifted.is_exact_M, num_rows, num_columns, x_MK.stride(0),
            RULE=SCALE_RULES.index(scale_rule), LARGEST_SHIFT=largest_shift, SMALLEST_INVERSE=1 / small.smallest,
            R=rows, C=width,
        )  # fmt: skip
    return lifted
