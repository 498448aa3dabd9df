"""Move single codes of an encoded weight to a neighbour wherever that lowers the error of the layer's output.

GPTQ decides every code once, knowing only those before it. With D = W - What and moment H, moving code i of a row by a step s to
the next E2M1 value up or down changes the row's error ``d H d^T`` by

    s (s H_ii - 2 (d H)_i)

Blocks of 32 channels are visited in order; in each, every row makes its best move, where one lowers its error, and hands the
change on to its ``d H`` at once. So no move ever raises the error, and a sweep that finds no move has reached weights that no
single move improves. Scales stay as they are.

Legend: N output features, K input features, J = 32 channels of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.formats import MXFP4
from forge_kernels.ops._arithmetic import codes_of_e2m1, scale_of_bytes
from forge_kernels.ops.block_swap import steps_to_neighbours
from forge_kernels.ops.decode import decode_codes
from forge_kernels.rules import Encoded
from forge_kernels.solvers._moments import checked_matrix, checked_moment


def swap_codes(encoded: Encoded, weight_NK: Tensor, moment_KK: Tensor, *, max_sweeps: int = 4) -> Encoded:
    """Return the weight after up to `max_sweeps` sweeps of single moves.

    Args:
        encoded: (N, K) codes and scales to begin with, from `encode` or `gptq`, in the coordinates of `weight_NK`.
        weight_NK: (N, K) floating point, what they stand for.
        moment_KK: (K, K), ``X^T X / T`` of the transformed inputs.
        max_sweeps: each costs about N K^2 multiply-adds; it stops early where nothing moves.

    Raises:
        ValueError: shapes that do not fit, non-finite values, or no sweep to make.
    """
    if max_sweeps < 1:
        raise ValueError(f"max_sweeps is {max_sweeps}; give at least 1")
    weight_NK = checked_matrix(weight_NK, what="weight")
    moment_KK = checked_moment(moment_KK, weight_NK.shape[1]).to(weight_NK.device)
    if encoded.codes_NK.shape != weight_NK.shape:
        raise ValueError(
            f"codes are {tuple(encoded.codes_NK.shape)}; the weight they stand for is {tuple(weight_NK.shape)}"
        )
    codes_NK, scales_NB = (part.to(weight_NK.device) for part in (encoded.codes_NK, encoded.scales_NB))
    gap_NK = weight_NK - decode_codes(codes_NK, scales_NB).double()
    value_NK = decode_codes(codes_NK, torch.full_like(scales_NB, 127))  # in units of the scales
    scale_NB = scale_of_bytes(scales_NB.to(torch.int32)).double()
    pull_NK = gap_NK @ moment_KK
    curvature_K = moment_KK.diagonal()
    for _ in range(max_sweeps):
        num_moved = 0
        for block, start in enumerate(range(0, weight_NK.shape[1], MXFP4.block)):
            channels = slice(start, start + MXFP4.block)
            step_NJ = _best_moves(
                value_NK[:, channels], scale_NB[:, block : block + 1], pull_NK[:, channels], curvature_K[channels]
            )
            num_moved += int(step_NJ.count_nonzero())
            value_NK[:, channels] += step_NJ.to(torch.float32)
            pull_NK.addmm_(step_NJ * scale_NB[:, block : block + 1], moment_KK[channels], alpha=-1)
        if num_moved == 0:
            break
    return Encoded(codes_NK=codes_of_e2m1(value_NK), scales_NB=encoded.scales_NB)


def _best_moves(value_NJ: Tensor, scale_N1: Tensor, pull_NJ: Tensor, curvature_J: Tensor) -> Tensor:
    """Return the move of each row, in units of its scale: zero but for the channel that lowers the error most, if any does."""
    down_NJ, up_NJ = (step.double() for step in steps_to_neighbours(value_NJ))
    down_change_NJ = scale_N1 * down_NJ * (scale_N1 * down_NJ * curvature_J - 2 * pull_NJ)
    up_change_NJ = scale_N1 * up_NJ * (scale_N1 * up_NJ * curvature_J - 2 * pull_NJ)
    is_up_NJ = up_change_NJ < down_change_NJ
    change_N1, place_N1 = torch.where(is_up_NJ, up_change_NJ, down_change_NJ).min(dim=1, keepdim=True)
    step_N1 = torch.where(is_up_NJ, up_NJ, down_NJ).gather(1, place_N1)
    # What rounding alone may show as a gain is none, or two moves could undo each other for ever.
    size_N1 = (scale_N1 * step_N1).square() * curvature_J[place_N1.squeeze(1)].unsqueeze(1)
    step_N1 = torch.where(change_N1 < -1e-12 * size_N1, step_N1, 0.0)
    return torch.zeros_like(pull_NJ).scatter_(1, place_N1, step_N1)
