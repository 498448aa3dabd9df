"""Move the one code of each activation block whose move lowers the block's output error most.

Nearest codes minimize the error of each element alone. What a layer's output sees of a block's error e is ``e^T G e`` with
``G = What_b^T What_b``, the 32 x 32 Gram matrix of the installed weight's columns of that block (summed over the layers that
read the input): static data, known before any token comes. Moving element i by d, to the next code up or down, changes it by

    d (2 (G e)_i + d G_ii)

The move with the lowest change is made where that is below zero; of equal ones that of the first element, downward before upward.
Scales stay as they are, and a code never leaves the range of E2M1. A function of the token's own vector and of static data only.

Legend: M rows (all leading axes), K elements per row, B = K / 32 blocks, J = i = j = 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.formats import E2M1, MXFP4
from forge_kernels.ops._arithmetic import (
    codes_of_e2m1,
    inverse_scale_of_bytes,
    round_to_e2m1_,
    scale_of_bytes,
    split_runs,
)
from forge_kernels.ops.encode import block_amax, choose_scales, require_known_rule, scale_bytes, widen
from forge_kernels.rules import Encoded, ScaleRule


def encode_with_swap(x_MK: Tensor, gram_Bij: Tensor, *, scale_rule: ScaleRule = "even") -> Encoded:
    """Encode `x_MK` with nearest codes, then move one code per block.

    Args:
        x_MK: (..., K) float32, bfloat16 or float16, finite; K divisible by 32.
        gram_Bij: (B, 32, 32) symmetric positive semidefinite, see `block_gram`.
        scale_rule: see `forge_kernels.encode`.

    Raises:
        ValueError: as `encode`, or a Gram matrix of another shape.
    """
    return encode_with_swap_reference(x_MK, gram_Bij, scale_rule=scale_rule)


def encode_with_swap_reference(x_MK: Tensor, gram_Bij: Tensor, *, scale_rule: ScaleRule = "even") -> Encoded:
    """Do what `encode_with_swap` says in plain torch operations."""
    scales_MB = choose_scales(x_MK, scale_rule=scale_rule)
    x_MBJ = split_runs(widen(x_MK))
    y_MBJ = x_MBJ * inverse_scale_of_bytes(scales_MB.to(torch.int32).unsqueeze(-1))
    moved_MBJ = _moved(y_MBJ, _checked(gram_Bij, x_MBJ))
    return Encoded(codes_NK=codes_of_e2m1(moved_MBJ).flatten(-2), scales_NB=scales_MB)


def fake_quantize_with_swap(x_MK: Tensor, gram_Bij: Tensor, *, scale_rule: ScaleRule = "even") -> Tensor:
    """Return ``decode(encode_with_swap(x_MK, gram_Bij))`` bit for bit, (..., K) float32.

    A block with a NaN or an infinity becomes NaN as a whole, where `encode_with_swap` would raise.

    Raises:
        ValueError: wrong dtype, K not divisible by 32, unknown rule, or a Gram matrix of another shape.
    """
    require_known_rule(scale_rule)
    x_MBJ = split_runs(widen(x_MK))
    amax_MB1 = block_amax(x_MBJ)
    scales_MB1 = scale_bytes(x_MBJ, amax_MB1, scale_rule)
    moved_MBJ = _moved(x_MBJ * inverse_scale_of_bytes(scales_MB1), _checked(gram_Bij, x_MBJ))
    # amax - amax is 0, or NaN where the block is not finite.
    return moved_MBJ.mul_(scale_of_bytes(scales_MB1).add_(amax_MB1 - amax_MB1)).flatten(-2)


def block_gram(weights: tuple[Tensor, ...]) -> Tensor:
    """Return ``sum over weights of W_b^T W_b``, (B, 32, 32) float32, from (N, K) decoded weights that share an input.

    Summed in float64, then each block scaled by a power of two so that its largest entry lies in [0.5, 1): a comparison
    within the block needs no more, and nothing can overflow or vanish.

    Raises:
        ValueError: no weight, or weights of different or indivisible K.
    """
    if not weights or any(w.dim() != 2 or w.shape[-1] != weights[0].shape[-1] for w in weights):
        raise ValueError(f"weights {[tuple(weight.shape) for weight in weights]} do not read one input")
    if not weights[0].shape[-1] or weights[0].shape[-1] % MXFP4.block:
        raise ValueError(f"{weights[0].shape[-1]} inputs are no whole blocks of {MXFP4.block}")
    blocks = [split_runs(weight.detach().double()) for weight in weights]
    gram_Bij = torch.stack([torch.einsum("nbi,nbj->bij", block, block) for block in blocks]).sum(dim=0)
    _, exponent_B11 = torch.frexp(gram_Bij.abs().amax(dim=(1, 2), keepdim=True))
    return (gram_Bij * 2.0 ** -exponent_B11.double()).to(torch.float32)


def _moved(y_MBJ: Tensor, gram_Bij: Tensor) -> Tensor:
    """Return rounded values after the best move of each block; `y_MBJ` is in units of the scales."""
    value_MBJ = round_to_e2m1_(y_MBJ.clone())
    error_MBJ = value_MBJ - y_MBJ
    # Term by term: a matrix product may add in another order for another number of rows, and a tie would fall otherwise.
    pull_MBJ = torch.zeros_like(error_MBJ)
    for j in range(MXFP4.block):
        pull_MBJ.add_(error_MBJ[..., j : j + 1] * gram_Bij[:, j])
    pull_MBJ.mul_(2)
    curvature_BJ = gram_Bij.diagonal(dim1=-2, dim2=-1)
    down_MBJ, up_MBJ = steps_to_neighbours(value_MBJ)
    down_change_MBJ = down_MBJ * (pull_MBJ + down_MBJ * curvature_BJ)
    up_change_MBJ = up_MBJ * (pull_MBJ + up_MBJ * curvature_BJ)
    is_up_MBJ = up_change_MBJ < down_change_MBJ
    change_MB1, place_MB1 = torch.where(is_up_MBJ, up_change_MBJ, down_change_MBJ).min(dim=-1, keepdim=True)
    step_MB1 = torch.where(is_up_MBJ, up_MBJ, down_MBJ).gather(-1, place_MB1)
    step_MB1 = torch.where(change_MB1 < 0, step_MB1, 0.0)
    return value_MBJ.scatter_add_(-1, place_MB1, step_MB1)


def steps_to_neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (negative) step to the next E2M1 value below and the step to the one above; 0 beyond the largest."""
    magnitude = value.abs()
    outward = _half_power_of_two(magnitude).masked_fill_(magnitude == E2M1.max_value, 0.0)
    inward = _half_power_of_two(magnitude * 0.99)
    is_negative = value < 0
    # From zero both ways lead outward, by the same step.
    return -torch.where(is_negative, outward, inward), torch.where(is_negative, inward, outward)


def _half_power_of_two(magnitude: Tensor) -> Tensor:
    """Return half the power of two at or below each magnitude, at least 0.5: the spacing of E2M1 values from there on."""
    return torch.bitwise_and(magnitude.view(torch.int32), 0x7F800000).view(torch.float32).clamp(min=1.0).mul_(0.5)


def _checked(gram_Bij: Tensor, x_MBJ: Tensor) -> Tensor:
    expected = (x_MBJ.shape[-2], MXFP4.block, MXFP4.block)
    if tuple(gram_Bij.shape) != expected:
        raise ValueError(
            f"Gram matrices are {tuple(gram_Bij.shape)}; an input of {x_MBJ.shape[-2]} blocks needs {expected}"
        )
    return gram_Bij.to(x_MBJ.device, torch.float32)
