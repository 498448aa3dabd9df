"""Encode float tensors as strict MXFP4: scale bytes by a stated rule, then the nearest E2M1 codes.

For a block of 32 with largest magnitude a = m 2^f, m in [1, 2), the scale is 2^e with

    even    e = f - 2 + [m >= 1.75]     the largest value is never clipped by more than its own rounding
    floor   e = f - 2                   the procedure of the OCP text; clips where m > 1.5
    rceil   e = ceil(log2(a / 6))       never clips
    search  f - 2 or f - 1, whichever has the lower (weighted) squared error; f - 2 where they are equal

and element codes are nearest-even of x / 2^e, saturating at 6. Choices that the formats leave open: a zero block has
byte 0 and codes 0; minus zero becomes plus zero, code 8 is never written; bytes are clamped to 0..252, so that every
decoded value is finite in float32 (relevant for a >= 1.5 * 2^127 only). float16 and bfloat16 are widened first.

Legend: M rows (all leading axes), K elements per row, B = K / 32 blocks, J = 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.formats import E8M0
from forge_kernels.ops._arithmetic import (
    BLOCK,
    codes_of_e2m1,
    codes_of_e2m1_,
    inverse_scale_of_bytes,
    round_to_e2m1_,
    row_chunks,
    scale_bytes_of_amax,
    split_runs,
    sum_of_block,
)
from forge_kernels.rules import SCALE_RULES, Encoded, ScaleRule

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def encode(x_MK: Tensor, *, scale_rule: ScaleRule = "even", importance_K: Tensor | None = None) -> Encoded:
    """Encode `x_MK` in blocks of 32 along its last axis.

    Args:
        x_MK: (..., K) float32, bfloat16 or float16, finite; K divisible by 32.
        scale_rule: how a block's scale follows from its values.
        importance_K: (K,) non-negative weights of the squared errors that "search" compares; None weighs all alike.

    Returns:
        Codes (..., K) and scale bytes (..., K / 32), both uint8.

    Raises:
        ValueError: wrong dtype, K not divisible by 32, unknown rule, or a non-finite element (its index is named).
    """
    return encode_reference(x_MK, scale_rule=scale_rule, importance_K=importance_K)


def encode_reference(x_MK: Tensor, *, scale_rule: ScaleRule = "even", importance_K: Tensor | None = None) -> Encoded:
    """Do what `encode` says in plain torch operations."""
    codes_MK, scales_MB = _encode_in_chunks(x_MK, scale_rule, importance_K, wants_codes=True)
    assert codes_MK is not None
    return Encoded(codes_NK=codes_MK, scales_NB=scales_MB)


def choose_scales(x_MK: Tensor, *, scale_rule: ScaleRule = "even", importance_K: Tensor | None = None) -> Tensor:
    """Return the scale bytes (..., K / 32), uint8 in 0..252, that `encode` uses; same arguments and errors."""
    return _encode_in_chunks(x_MK, scale_rule, importance_K, wants_codes=False)[1]


def _encode_in_chunks(
    x_MK: Tensor, scale_rule: ScaleRule, importance_K: Tensor | None, *, wants_codes: bool
) -> tuple[Tensor | None, Tensor]:
    """Return codes, if wanted, and scale bytes."""
    require_known_rule(scale_rule)
    x_MK = widen(x_MK)
    if importance_K is not None:
        importance_K = _normalized_importance(importance_K, x_MK)
    blocks_per_row = x_MK.shape[-1] // BLOCK
    x_RBJ = x_MK.view(-1, blocks_per_row, BLOCK) if x_MK.numel() else x_MK.reshape(0, blocks_per_row, BLOCK)
    codes_RBJ = torch.empty(x_RBJ.shape, dtype=torch.uint8, device=x_MK.device) if wants_codes else None
    scales_RB = torch.empty(x_RBJ.shape[:2], dtype=torch.uint8, device=x_MK.device)
    amax_RB1 = torch.empty(*x_RBJ.shape[:2], 1, dtype=torch.float32, device=x_MK.device)
    y_RBJ = scratch_RBJ = None
    for rows in row_chunks(len(x_RBJ), blocks_per_row, x_MK.device):
        chunk_RBJ = x_RBJ[rows]
        if y_RBJ is None or scratch_RBJ is None:  # the first chunk is the longest
            y_RBJ = torch.empty_like(chunk_RBJ)
            scratch_RBJ = torch.empty_like(chunk_RBJ, dtype=torch.int32)
        y, scratch = y_RBJ[: len(chunk_RBJ)], scratch_RBJ[: len(chunk_RBJ)]
        amax_RB1[rows] = block_amax(chunk_RBJ, scratch.view(torch.float32))
        bytes_RB1 = scale_bytes(chunk_RBJ, amax_RB1[rows], scale_rule, importance_K=importance_K)
        scales_RB[rows] = bytes_RB1.squeeze(-1)
        if codes_RBJ is not None:
            torch.mul(chunk_RBJ, inverse_scale_of_bytes(bytes_RB1), out=y)
            codes_RBJ[rows] = codes_of_e2m1_(round_to_e2m1_(y, scratch), scratch)
    if not bool(torch.isfinite(amax_RB1).all()):
        require_finite(x_MK)
    codes_MK = None if codes_RBJ is None else codes_RBJ.view(x_MK.shape)
    return codes_MK, scales_RB.view(*x_MK.shape[:-1], blocks_per_row)


def encode_with_scales(x_MK: Tensor, scales_MB: Tensor) -> Tensor:
    """Return the nearest codes (..., K) uint8 of `x_MK` under given scale bytes (..., K / 32), uint8 in 0..254.

    Raises:
        ValueError: as `encode`, or scales of another dtype or shape, or a scale byte 255 (NaN).
    """
    x_MK = widen(x_MK)
    require_finite(x_MK)
    expected = (*x_MK.shape[:-1], x_MK.shape[-1] // BLOCK)
    if scales_MB.dtype != torch.uint8 or tuple(scales_MB.shape) != expected:
        raise ValueError(
            f"scales are {scales_MB.dtype} {tuple(scales_MB.shape)};"
            f" values {tuple(x_MK.shape)} need torch.uint8 {expected}"
        )
    require_no_nan_scale(scales_MB)
    return _nearest_codes(x_MK, scales_MB)


def block_amax(x_MBJ: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return the largest magnitude per block, (..., B, 1) float32; NaN where a block has one."""
    return torch.abs(x_MBJ, out=scratch).amax(dim=-1, keepdim=True)


def scale_bytes(x_MBJ: Tensor, amax: Tensor, scale_rule: ScaleRule, *, importance_K: Tensor | None = None) -> Tensor:
    """Return scale bytes (..., B, 1) as int32; float32 input, nothing is checked and nothing synchronizes.

    `amax` is `block_amax` of the values. `importance_K` is float32 with its largest entry at most 1.
    """
    if scale_rule != "search":
        return scale_bytes_of_amax(amax, scale_rule)
    low = scale_bytes_of_amax(amax, "floor")
    high = scale_bytes_of_amax(amax, "floor", raised_by=1)
    # Both errors in units of the low scale: |y| < 8, so that no square overflows or vanishes.
    y_MBJ = x_MBJ * inverse_scale_of_bytes(low)
    ratio = (1 << (high - low)).to(torch.float32)
    error_low = round_to_e2m1_(y_MBJ.clone()).sub_(y_MBJ)
    error_high = round_to_e2m1_(y_MBJ / ratio).mul_(ratio).sub_(y_MBJ)
    error_low.mul_(error_low)
    error_high.mul_(error_high)
    if importance_K is not None:
        importance_BJ = importance_K.view(-1, BLOCK)
        error_low.mul_(importance_BJ)
        error_high.mul_(importance_BJ)
    raised = sum_of_block(error_high) < sum_of_block(error_low)
    return torch.where(raised.unsqueeze(-1), high, low)


def widen(x_MK: Tensor) -> Tensor:
    """Check dtype and block divisibility; return float32, contiguous, detached.

    Raises:
        ValueError: what was given cannot be encoded.
    """
    if x_MK.dtype not in _INPUT_DTYPES:
        raise ValueError(f"cannot encode {x_MK.dtype}; give float32, bfloat16 or float16 (x.float() rounds to float32)")
    if x_MK.dim() == 0 or x_MK.shape[-1] == 0 or x_MK.shape[-1] % BLOCK:
        raise ValueError(f"shape {tuple(x_MK.shape)} has no whole blocks; the last axis must be a multiple of {BLOCK}")
    return x_MK.detach().to(torch.float32).contiguous()


def require_finite(x_MK: Tensor) -> None:
    """Raise where an element is NaN or infinite.

    Raises:
        ValueError: names the first such element and how many there are.
    """
    finite = torch.isfinite(x_MK)
    if bool(finite.all()):
        return
    bad = (~finite).nonzero()
    index = tuple(int(i) for i in bad[0])
    raise ValueError(
        f"cannot encode non-finite values: element {index} is {float(x_MK[index])}"
        f" ({len(bad)} of {x_MK.numel()} are not finite)"
    )


def require_no_nan_scale(scales_MB: Tensor) -> None:
    """Raise where a scale byte is 255.

    Raises:
        ValueError: names the first such block.
    """
    bad = (scales_MB > E8M0.max_byte).nonzero()
    if len(bad):
        raise ValueError(f"scale byte of block {tuple(int(i) for i in bad[0])} is 255 (NaN); use 0..{E8M0.max_byte}")


def require_known_rule(scale_rule: str) -> None:
    """Raise where the rule is not one of `SCALE_RULES`.

    Raises:
        ValueError: names the known rules.
    """
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"unknown scale rule {scale_rule!r}; known: {', '.join(SCALE_RULES)}")


def _nearest_codes(x_MK: Tensor, scales_MB: Tensor) -> Tensor:
    x_MBJ = split_runs(x_MK)
    y_MBJ = x_MBJ * inverse_scale_of_bytes(scales_MB.to(torch.int32).unsqueeze(-1))
    return codes_of_e2m1(round_to_e2m1_(y_MBJ)).flatten(-2)


def _normalized_importance(importance_K: Tensor, x_MK: Tensor) -> Tensor:
    """Return the weights in float32 with the largest 1: a comparison needs no more, and nothing can overflow."""
    if importance_K.shape != x_MK.shape[-1:]:
        raise ValueError(
            f"importance has shape {tuple(importance_K.shape)}; values {tuple(x_MK.shape)} need ({x_MK.shape[-1]},)"
        )
    if not bool((torch.isfinite(importance_K) & (importance_K >= 0)).all()):
        raise ValueError(
            "importance has negative or non-finite entries; give weights of squared errors,"
            " such as the diagonal of a second moment"
        )
    importance_K = importance_K.to(x_MK.device, torch.float64)
    largest = importance_K.amax()
    return (importance_K / torch.where(largest > 0, largest, torch.ones_like(largest))).to(torch.float32)
