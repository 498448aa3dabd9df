"""Lift MXFP4 to FP8: ordinary FP8 operands whose product is the MXFP4 product, up to accumulation.

An E2M1 value times 2^d is exact in E4M3 for d in -8..6 and in E5M2 for d in -15..13. Every row gets a reference exponent r, the
largest exponent of its blocks that hold a non-zero code, and a block with exponent e is stored as

    value(code) 2^d,    d = e - r + d_max,    d_max = 6 for E4M3 and 13 for E5M2

so that ``row value = stored 2^(r - d_max)``: the row's largest blocks sit at the top of the range, and a matrix product of lifted
operands needs one power of two per row and per column afterwards.

Rows whose blocks' exponents differ by more than 14 (E4M3) or 28 (E5M2) are not exact: their smallest blocks fall below the
format's subnormals and are rounded to nearest. The error of an element is at most half the smallest subnormal, ``2^(r - d_max -
10)`` for E4M3 and ``2^(r - d_max - 17)`` for E5M2. Under every scale rule a row whose blocks differ holds an element of at
least ``2 2^r`` (the largest magnitude is never less than twice its scale), so that is at most 2^-17 (E4M3) or 2^-31 (E5M2) of
the row's largest magnitude. `Lifted.is_exact_M` says which rows these may be.

Legend: M rows, K elements per row, B = K / 32 blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from forge_kernels.formats import E2M1, E4M3, E5M2, E8M0, FloatElement
from forge_kernels.ops._arithmetic import split_runs
from forge_kernels.ops.decode import decode_codes
from forge_kernels.ops.encode import require_no_nan_scale
from forge_kernels.ops.round_to_element import codes_of_element, round_to_element
from forge_kernels.rules import Encoded

LiftElement = Literal["e4m3", "e5m2"]
LIFT_ELEMENTS: Final[dict[LiftElement, tuple[FloatElement, torch.dtype, int]]] = {
    "e4m3": (E4M3, torch.float8_e4m3fn, 6),
    "e5m2": (E5M2, torch.float8_e5m2, 13),
}
"""Format, torch's name of it, and d_max: E2M1's largest value 6 times 2^d_max is the largest multiple that fits."""


@dataclass(frozen=True, kw_only=True)
class Lifted:
    """An MXFP4 matrix as FP8.

    values_MK: (M, K) float8. scales_M: (M,) float32 powers of two; row m stands for ``values_MK[m] * scales_M[m]``.
    is_exact_M: (M,) bool, False where a block lies below the range, so that values of it may have been rounded.
    """

    values_MK: Tensor
    scales_M: Tensor
    is_exact_M: Tensor


def least_exact_shift(element: LiftElement) -> int:
    """Return the smallest d for which E2M1 values times 2^d are exact: -8 for E4M3, -15 for E5M2."""
    return round(math.log2(LIFT_ELEMENTS[element][0].smallest / E2M1.smallest))


def lift(encoded: Encoded, *, element: LiftElement = "e4m3") -> Lifted:
    """Return the FP8 operand of a 2-D encoded matrix.

    Raises:
        ValueError: not 2-D, an unknown element, or codes and scales that do not belong together (see `decode_codes`).
    """
    return lift_reference(encoded, element=element)


def lift_reference(encoded: Encoded, *, element: LiftElement = "e4m3") -> Lifted:
    """Do what `lift` says in plain torch operations."""
    if encoded.codes_NK.dim() != 2:
        raise ValueError(f"can only lift matrices, got codes of shape {tuple(encoded.codes_NK.shape)}")
    if element not in LIFT_ELEMENTS:
        raise ValueError(f"cannot lift to {element!r}; known: {', '.join(LIFT_ELEMENTS)}")
    small, dtype, largest_shift = LIFT_ELEMENTS[element]
    require_no_nan_scale(encoded.scales_NB)
    unscaled_MBJ = split_runs(decode_codes(encoded.codes_NK, torch.full_like(encoded.scales_NB, E8M0.bias)))
    exponent_MB = encoded.scales_NB.to(torch.int32) - E8M0.bias
    is_used_MB = (unscaled_MBJ != 0).any(dim=-1)
    lowest = -E8M0.bias
    reference_M1 = torch.where(is_used_MB, exponent_MB, lowest).amax(dim=1, keepdim=True)
    shift_MB = exponent_MB - reference_M1 + largest_shift
    # Further down everything rounds to zero, and the shift stays within float32.
    clamped_MB1 = shift_MB.clamp(min=-64, max=largest_shift).unsqueeze(-1)
    rounded_MBJ = round_to_element(torch.ldexp(unscaled_MBJ, clamped_MB1), small)
    codes_MK = codes_of_element(rounded_MBJ, small).flatten(-2)
    one_M = torch.ones(len(reference_M1), device=reference_M1.device)
    return Lifted(
        values_MK=codes_MK.to(torch.uint8).view(dtype),
        scales_M=torch.ldexp(one_M, reference_M1.squeeze(1) - largest_shift),
        is_exact_M=((shift_MB >= least_exact_shift(element)) | ~is_used_MB).all(dim=1),
    )


def lowered(lifted: Lifted) -> Tensor:
    """Return the values that a lifted matrix stands for, (M, K) float32."""
    return lifted.values_MK.to(torch.float32) * lifted.scales_M.unsqueeze(1)
